"""Every configuration error is found before any process group exists, is one sentence, and leaves no files."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from lib.saved import SMALL, small_run, train_alone
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from acsgd.config.options import Config
from acsgd.config.run_file import parse
from acsgd.host_memory import HostMemory
from acsgd.launch import Launch
from acsgd.run.plan import limits
from acsgd.run.plan.job import prepare
from acsgd.run.setup.inputs import open_inputs
from acsgd.shards.config import longest_sequence
from acsgd.shards.convert import from_hf
from acsgd.shards.manifest import MANIFEST, VERSION, Manifest

TinyModel = Callable[..., Path]


def refuse(tmp_path: Path, flags: str, *, world_size: int = 1) -> str:
    """Return the message with which a run is refused, after checking that it wrote nothing."""
    run_dir = tmp_path / "runs" / "bad"
    before = contents(tmp_path)
    given = flags.split()
    defaults = {
        "--data.sources": "demo",
        "--data.sequence": "32",
        "--data.batch": "4",
        "--optim.lr": "1e-3",
        "--optim.steps": "2",
        "--log.dir": str(run_dir),
    }
    for flag, value in defaults.items():
        if flag not in given:
            given += [flag, value]
    config = parse(given)
    with pytest.raises(ValueError) as refused:
        decide(config, Launch(0, 0, world_size))
    assert contents(tmp_path) == before, "a refused run wrote something"
    return str(refused.value)


def decide(config: Config, launch: Launch) -> None:
    """Do what a rank does before it connects."""
    open_inputs(prepare(config, launch))


def contents(directory: Path) -> dict[Path, bytes | None]:
    """Return every file with its content, and every directory, except the cache and its parent."""
    return {
        path: path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
        if path != directory / "runs" and not path.is_relative_to(directory / "runs" / "cache")
    }


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
    [
        (
            "--pp.schedule 1f2b",
            1,
            'unknown name "1f2b"; use "gpipe", "1f1b", "interleaved", "zb", "zbv" or "auto"',
        ),
        ("--pp.schedule zb --model.recompute layers", 1, "model.recompute=layers computes them together; remove one"),
        ("--model.recompute every:0", 1, "use none, attention, layers, or every:2 for groups of 2 layers"),
        ("--model.recompute attention --model.compile", 1, "use --model.recompute layers, or remove model.compile"),
        ("--pp.schedule zbv --model.compile", 1, "model.compile=true computes them together; remove one of both"),
        (
            "--dp.compress auto:max_loss_cost=0.0001",
            1,
            'allows no mode but allreduce: the one that costs least, "allreduce:dtype=bf16", costs 0.0002; give',
        ),
        ("--dp.compress auto --dp.mode cocktail", 1, "chooses dp.mode; remove dp.mode=cocktail or dp.compress"),
        ("--dp.mode cocktail --optim.betas 0.9 0.0", 2, "squared gradients, and optim.betas=(0.9, 0.0) has none; give"),
        ("--dp.compress best", 1, 'dp.compress="best": unknown name "best"; use "auto"'),
        ("--pp.schedule auto:lead=2", 1, '"auto" has no option "lead"; it takes no options'),
        ("--pp.schedule interleaved:chunk=2", 1, 'has no option "chunk"; it takes "chunks" or "lead"'),
        ("--pp.forward fixpoint8", 1, 'pp.forward="fixpoint8": unknown name'),
        ("--dp.domain=", 1, "dp.domain is empty; give a name such as --dp.domain rack-1"),
        ("--dp.mode allreduce:bucket_mb=0", 1, 'dp.mode="allreduce:bucket_mb=0": bucket_mb=0.0 must be greater'),
        ("--pp.stages 2", 1, "pp.stages=2 does not divide the number of processes, 1; use --pp.stages 1"),
        ("--pp.stages 3", 4, "pp.stages=3 does not divide the number of processes, 4; use --pp.stages 1 or 2 or 4"),
        ("--pp.stages 9", 9, "needs 9 stages, but the model has 8 layers (an embedding, 6 blocks, a head)"),
        ("--pp.stages 3 --pp.schedule interleaved:chunks=3", 3, "needs 9 stages, but the model has 8 layers"),
        ("--pp.micro 4", 2, "into 1 micro-batches, too few for 2 replicas; use a smaller pp.micro, or data.batch"),
        (
            "--data.batch 1048576",
            1,
            "data.batch=1048576 with pp.micro=1 gives a pipeline 1048576 micro-batches, for 1 stages, which is more "
            "than 65536 forwards; use pp.micro=16 or more, or a smaller data.batch",
        ),
        ("--pp.schedule interleaved:chunks=999999999", 1, "which is more than 65536 forwards"),
        ("--pp.micro 3", 1, "pp.micro=3 does not divide data.batch=4"),
        ("--pp.stages 2 --pp.layers 3 2", 2, "pp.layers=[3, 2] adds up to 5, but the model has 6 blocks"),
        ("--pp.stages 2 --pp.hosts 1 2", 2, "pp.hosts=1 2 does not name each host once, by its number from 0"),
        ("--pp.stages 2 --pp.hosts 1 0 2", 2, "3 hosts for 2 processes, of which this host has 1; give --pp.hosts 0 1"),
        ("--pp.stages 2 --pp.layers 6", 2, "pp.layers=[6] has 1 entries, but there are 2 stages"),
        ("--model.freeze transformer.x.*", 1, 'model.freeze="transformer.x.*": "transformer.x.*" matches no parameter'),
        ("--model.freeze * --adapter.spec lora", 1, "model.freeze: adapter.spec freezes all parameters of the model"),
        ("--model.freeze *", 1, 'model.freeze="*": no parameter is left to train'),
        ("--data.sequence 65", 1, "data.sequence=65 exceeds the model's maximum length; use data.sequence=64 or less"),
        ("--data.sources no.jsonl", 1, "no.jsonl does not exist"),
        ("--data.sources empty.jsonl", 1, "empty.jsonl is empty"),
        ("--data.sources blank.jsonl", 1, "blank.jsonl has no token"),
        ("--data.sources short.txt", 1, "less than one sequence"),
        ("--data.sources broken.jsonl", 1, "broken.jsonl, line 2"),
        ("--data.sources text.xml", 1, "text.xml does not exist in"),
        ("--log.dir loop", 1, "loop is a symbolic link to nothing, or to itself; remove it"),
        ("--log.dir empty.jsonl/run", 1, "empty.jsonl is a file; give a directory"),
        ("--checkpoint.dir empty.jsonl", 1, "checkpoint.dir=empty.jsonl"),
        (
            "--checkpoint.resume no/where",
            1,
            'checkpoint.resume=no/where does not exist; give the path of a checkpoint, ".../step-00000100", or "auto"',
        ),
        (
            "--checkpoint.resume empty.jsonl",
            1,
            'empty.jsonl is not a complete checkpoint; give the path of a checkpoint, ".../step-00000100", or "auto"',
        ),
        ("--run.device cuda", 1, "torch finds no GPU on this host; acsgd doctor prints why; use --run.device cpu"),
        ("--data.deal speed --dp.mode diloco", 1, "data.deal=speed: with dp.mode=diloco each replica makes steps of"),
        (
            "--dp.shard optimizer --dp.mode diloco",
            2,
            "dp.shard=optimizer needs several hosts (or dp.domain) with",
        ),
        ("--dp.shard weights --dp.mode powersgd", 2, "compresses whole matrices, and dp.shard=weights leaves"),
        ("--dp.shard gradients", 3, "all 3 replicas need the same number of micro-batches, of 4 in a step"),
        ("--dp.shard gradients --pp.stages 2 --pp.schedule zb", 4, "backwards in two parts; use --dp.shard optimizer"),
        (
            "--dp.shard weights",
            3,
            "dp.shard=weights sums gradients after each micro-batch, so that all 3 replicas need",
        ),
        ("--model.offload cpu", 1, "lie where their masters are; add --optim.offload cpu, or train an adapter, such"),
        ("--model.offload disk", 1, "use --model.offload cpu --optim.offload cpu, or train an adapter, such as"),
        ("--model.offload disk --model.freeze *.h.0.* --model.init scratch", 1, "weights; use --model.offload cpu"),
        ("--model.offload disk --model.freeze *.h.0.* --dp.shard weights", 2, "on each device; remove one"),
        ("--data.deal speed --dp.shard gradients", 2, "gives faster ones more; use --data.deal even, or --dp.shard"),
        ("--data.deal speed --pp.forward delta:bits=4", 1, "data.deal=speed: with pp.forward=delta:bits=4 a sequence"),
        ("--data.deal speed --pp.backward delta", 1, "data.deal=speed: with pp.backward=delta a sequence"),
        ("--pp.forward delta --pp.backward delta:cache_bits=8", 2, "cache differently; give both the same cache"),
        ("--pp.forward delta:step=1,transform=true,balance=1", 2, "give pp.backward=delta:step=0.5,transform=true,"),
        ("--pp.backward delta:step=1,transform=true,balance=1", 2, "is for activations; move it to pp.forward"),
    ],
)
def test_an_impossible_run_is_refused(
    flags: str, world_size: int, message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"txet": "not"}\n')
    refused = refuse(tmp_path, f"--model.name {tiny_model()} {flags}", world_size=world_size)
    assert message in refused
    assert "\n" not in refused


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--optim.steps None --optim.epochs 2", "optim.epochs needs the length of stream:a.jsonl"),
        ("--optim.warmup 1epoch", 'optim.warmup="1epoch" needs the length of stream:a.jsonl'),
        ("--data.eval_fraction 0.1", "data.eval_fraction=0.1 holds out the end of stream:a.jsonl"),
        ("--data.eval_sources stream:a.jsonl", "data.eval_sources: stream:a.jsonl cannot be streamed"),
        ("--data.weights tokens", "data.weights=tokens needs the number of target tokens of stream:a.jsonl"),
        ("--data.sources stream:a.jsonl,demo", 'write, for example, data.sources="stream:a.jsonl:0.5,demo:0.5"'),
        ("--pp.forward delta:bits=4", "pp.forward=delta:bits=4 keeps the activations of all sequences"),
        ("--model.dropout_mask sample", "model.dropout_mask=sample repeats the masks of all sequences"),
        ("--data.sources stream:demo", "demo cannot be streamed"),
    ],
)
def test_what_a_streamed_source_cannot_do_is_refused(
    flags: str, message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n')
    given = flags if "--data.sources" in flags else f"--data.sources stream:a.jsonl {flags}"
    refused = refuse(tmp_path, f"--model.name {tiny_model()} {given}")
    assert message in refused
    assert "\n" not in refused


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    assert "model.name=nothing is a directory without config.json" in refuse(tmp_path, "--model.name nothing")
    assert "model.name=./no/where does not exist" in refuse(tmp_path, "--model.name ./no/where")


def test_an_unknown_hub_id_is_refused(tmp_path: Path) -> None:
    message = refuse(tmp_path, "--model.name no/such-model")
    assert "model.name=no/such-model is neither a local directory nor" in message
    assert "give a directory with a copy (hf download no/such-model --local-dir DIRECTORY)" in message


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gtp2", 'is of the unknown type "gtp2" (did you mean gpt2?)'),
        (
            "vit",
            'is of the type "vit", for which transformers has no AutoModelForCausalLM (task lm); give another model',
        ),
    ],
)
def test_a_type_that_transformers_lacks_is_refused(model_type: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert reason in refuse(tmp_path, "--model.name model")


def test_code_in_a_repository_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    fields = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling.Model"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    (tmp_path / "model" / "modeling.py").write_text("raise SystemExit('executed')")
    assert 'is of the type "own", whose code lies in its repository ("auto_map")' in refuse(
        tmp_path, "--model.name model"
    )


def test_a_broken_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    assert "model/config.json is not valid JSON" in refuse(tmp_path, "--model.name model")


@pytest.mark.parametrize(
    "sizes",
    [{"n_embd": 10**6, "n_layer": 5000}, {"vocab_size": 2**31 - 1}, {"n_positions": 2**31 - 1}],
)
def test_a_new_model_that_no_memory_holds_is_refused_before_it_is_built(sizes: dict[str, int], tmp_path: Path) -> None:
    config = {"n_layer": 1, "n_head": 2, "vocab_size": 100, "n_positions": 64, "n_embd": 1024} | sizes
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "gpt2", **config}))
    message = refuse(tmp_path, "--model.name model --model.init scratch")
    width, tables = config["n_embd"], config["vocab_size"] + config["n_positions"]
    parameters = tables * width + config["n_layer"] * (12 * width**2 + 13 * width) + 2 * width
    assert message.startswith(f"the model has {parameters:,} parameters; weights and gradients need at least ")
    assert message.endswith("use a smaller model, or more stages on more hosts")


def test_a_tokenizer_of_another_model_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 100, "n_positions": 64}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert "model has no tokenizer (tokenizer.json" in refuse(tmp_path, "--model.name model --model.init scratch")
    tokenizer.save_pretrained(tmp_path / "model")
    message = refuse(tmp_path, "--model.name model --model.init scratch")
    assert f"has {len(tokenizer)} tokens, but the model's vocabulary only 100" in message


def test_a_model_without_safetensors_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_model().iterdir():
        if path.suffix == ".json":
            (model / path.name).write_bytes(path.read_bytes())
    message = refuse(tmp_path, "--model.name model")
    assert "has neither model.safetensors nor model.safetensors.index.json" in message
    assert "--model.init scratch" in message


@pytest.fixture(scope="module")
def saved(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run of GPT-2 with checkpoints of steps 1 and 2."""
    run = tmp_path_factory.mktemp("saved") / "runs" / "run"
    train_alone(small_run(tiny_model("gpt2", **SMALL), run))
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of the run in runs/run of the working directory."""
    shutil.copytree(saved.parent / "cache", tmp_path / "runs" / "cache")
    return Path(shutil.copytree(saved, tmp_path / "runs" / "run", symlinks=True))


def refuse_to_resume(tmp_path: Path, model: Path, flags: str, run_dir: str = "runs/run") -> str:
    """Return the message that refuses to resume a run with its own options except `flags`."""
    as_trained = {
        "--model.name": str(model),
        "--data.sequence": "16",
        "--data.batch": "2",
        "--data.eval_fraction": "0.0001",
        "--log.dir": run_dir,
    }
    given = [f"{flag} {value}" for flag, value in as_trained.items() if flag not in flags.split()]
    message = refuse(tmp_path, f"{flags} {' '.join(given)}")
    assert "\n" not in message
    assert not message.endswith(".")
    return message


ADVICE = (
    "use what it was trained with, or start a new run: --log.dir NEW or --checkpoint.resume never; from the weights of "
    "this checkpoint: --model.name {} --log.dir NEW"
)


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        ("--data.batch 4", "its batches differ: data.batch is 2 in the checkpoint, 4 in the run"),
        ("--data.sequence 8", "its batches differ: data.sequence is 16 in the checkpoint, 8 in the run"),
        ("--data.seed 7", "its batches differ: data.seed is 0 in the checkpoint, 7 in the run"),
        (
            "--data.eval_fraction 0.01",
            "its batches differ: data.eval_fraction is 0.0001 in the checkpoint, 0.01 in the run",
        ),
        (
            "--data.sources other.txt",
            "data.sources lacks demo, which it was trained on, data.sources has other.txt, which it was not trained on",
        ),
        ("--data.sources demo:0.5,other.txt:0.5", "data.sources has other.txt, which it was not trained on"),
    ],
)
def test_a_checkpoint_of_other_data_is_refused(
    flags: str, difference: str, tiny_model: TinyModel, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.txt").write_text("other text " * 100)
    newest = Path("runs/run/checkpoints/step-00000002")
    for resume in ("", f"--checkpoint.resume {newest} "):
        message = refuse_to_resume(tmp_path, tiny_model("gpt2", **SMALL), resume + flags)
        assert message == f"cannot resume from {newest}: {difference}; {ADVICE.format(newest)}"


def test_a_checkpoint_of_another_model_is_refused(tiny_model: TinyModel, run: Path, tmp_path: Path) -> None:
    newest = Path("runs/run/checkpoints/step-00000002")
    models = {
        tiny_model("gpt2", **SMALL | {"n_layer": 2}): "its model differs: n_layer is 1 in the checkpoint, 2 in the run",
        tiny_model(
            "gpt2", **SMALL | {"attn_pdrop": 0.5}
        ): "its model differs: attn_pdrop is 0.0 in the checkpoint, 0.5 in the run",
        tiny_model("llama"): 'its model is of family "gpt2", the run\'s of family "llama"',
        with_another_tokenizer(tiny_model("gpt2", **SMALL), tmp_path): ("its tokenizer differs from the run's"),
    }
    for model, difference in models.items():
        message = refuse_to_resume(tmp_path, model, "")
        assert message == f"cannot resume from {newest}: {difference}; {ADVICE.format(newest)}"


def with_another_tokenizer(model: Path, tmp_path: Path) -> Path:
    """Return a copy of a model whose tokenizer has two tokens swapped."""
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    rules = json.loads((copy / "tokenizer.json").read_text())
    vocabulary = rules["model"]["vocab"]
    first, second = (token for token, number in vocabulary.items() if number in (5, 6))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (copy / "tokenizer.json").write_text(json.dumps(rules))
    assert AutoTokenizer.from_pretrained(copy).get_vocab()[first] == vocabulary[first]
    return copy


@pytest.mark.parametrize("resume", ["auto", "runs/run/checkpoints/step-00000002"])
@pytest.mark.parametrize(
    ("version", "advice"),
    [(VERSION + 1, "upgrade acsgd"), (1, "convert the model again, or use the acsgd that wrote it")],
)
def test_a_checkpoint_of_another_version_is_refused(
    version: int,
    advice: str,
    resume: str,
    tiny_model: TinyModel,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newest = Path("runs/run/checkpoints/step-00000002")
    manifest = Manifest.read(newest)
    with monkeypatch.context() as patch:
        patch.setattr("acsgd.shards.manifest.VERSION", version)
        manifest.write(newest)
    if version == 1:  # which had no checksum
        fields = json.loads((newest / MANIFEST).read_text())
        del fields["checksum"]
        (newest / MANIFEST).write_text(json.dumps(fields))
    message = refuse_to_resume(tmp_path, tiny_model("gpt2", **SMALL), f"--checkpoint.resume {resume}")
    assert (
        message
        == f"{newest} was written in version {version} of the format, this acsgd reads version {VERSION}; {advice}"
    )


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        (
            "runs/run/checkpoints/step-00000001",
            "checkpoint.resume=runs/run/checkpoints/step-00000001 is of step 1, but runs/run/checkpoints holds step 2, "
            "from which a later start would resume; give another log.dir, or move the newer ones away",
        ),
        (
            "runs/run",
            "checkpoint.resume=runs/run is not a complete checkpoint; give the path of a checkpoint, "
            'runs/run/checkpoints/step-00000002, or "auto"',
        ),
        (
            "runs/run/checkpoints/step-00000003",
            "checkpoint.resume=runs/run/checkpoints/step-00000003 does not exist; give the path of a checkpoint, "
            'runs/run/checkpoints/step-00000002, or "auto"',
        ),
        (
            "converted",
            "converted holds a model without run state; to train from its weights: --model.name converted",
        ),
        ("foreign", "foreign/manifest.json is not the manifest of a layer-shard directory"),
    ],
)
def test_a_path_without_a_usable_checkpoint_is_refused(
    resume: str, message: str, tiny_model: TinyModel, run: Path, tmp_path: Path
) -> None:
    model = tiny_model("gpt2", **SMALL)
    (tmp_path / "converted").mkdir()
    from_hf(model, tmp_path / "converted")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / MANIFEST).write_text('{"manifest_version": 3}')
    assert refuse_to_resume(tmp_path, model, f"--checkpoint.resume {resume}") == message


def test_a_requested_incomplete_checkpoint_is_refused(tiny_model: TinyModel, run: Path, tmp_path: Path) -> None:
    newest = Path("runs/run/checkpoints/step-00000002")
    (newest / MANIFEST).unlink()
    message = refuse_to_resume(tmp_path, tiny_model("gpt2", **SMALL), f"--checkpoint.resume {newest}")
    assert message.startswith(
        f"checkpoint.resume={newest} is not a complete checkpoint; give the path of a checkpoint, "
    )


def test_a_batch_that_exceeds_the_memory_of_the_host_is_refused(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "host_memory", lambda: HostMemory(2**34, 2**33, 0, False))
    message = refuse(tmp_path, f"--model.name {tiny_model()} --data.batch 16777216 --pp.micro 16777216")
    assert message == (
        "data.batch=16777216 with data.sequence=32 needs 48.2 GiB of host memory per process to read batches, but "
        "8.0 GiB are available for 1 processes on this host; use a smaller data.batch or data.sequence"
    )


@pytest.mark.parametrize(
    ("key", "flags", "reason"),
    [
        ("log.dir", 0, "no permission to write to"),
        ("checkpoint.dir", os.ST_RDONLY, "no writing to the read-only file system of"),
    ],
)
def test_a_directory_without_write_permission_is_refused(
    key: str, flags: int, reason: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root can write anywhere, so the answer of the system is replaced."""
    locked = tmp_path / "locked"
    locked.mkdir()
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(locked) and may(path, mode))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=flags))
    message = refuse(tmp_path, f"--model.name {tiny_model()} --{key} locked/run")
    assert message == f"{key}=locked/run: {reason} {locked}; give another directory"


def test_a_file_of_the_run_directory_of_another_type_is_refused_at_once(tiny_model: TinyModel, tmp_path: Path) -> None:
    files = "bad/config.toml", "bad/metrics.jsonl", "bad/logs/rank-00000.log"
    wrong = dict.fromkeys(files, True) | {"bad/logs": False, "cache": False}
    for number, (name, is_directory) in enumerate(wrong.items()):
        run_dir = tmp_path / str(number) / "bad"
        path = run_dir.parent / name
        run_dir.mkdir(parents=True)
        path.parent.mkdir(exist_ok=True)
        (path.mkdir if is_directory else path.touch)()
        message = refuse(tmp_path, f"--model.name {tiny_model()} --log.dir {run_dir}")
        kind = "file" if is_directory else "directory"
        assert message == f"log.dir={run_dir}: {path} is not a {kind}; remove it, or give another directory"


def test_a_model_that_takes_long_to_build_is_reported(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("acsgd.notes.FIRST_REPORT_S", 0.0)
    train_alone(small_run(tiny_model("gpt2", **SMALL), tmp_path / "runs" / "run", steps=1))
    printed = capsys.readouterr().err
    assert re.search(r"^loading a model of [\d,]+ parameters in 3 layers$", printed, re.MULTILINE)


def test_a_model_may_have_no_maximum_length() -> None:
    assert longest_sequence(AutoConfig.for_model("gpt2")) == 1024
    assert longest_sequence(AutoConfig.for_model("xlnet")) is None
