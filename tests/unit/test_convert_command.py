"""`acsgd convert` writes a complete directory or nothing, continues if it was interrupted, and prints one sentence."""

from __future__ import annotations

import os
import re
import resource
import shlex
import signal
import socket
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lib.commands import acsgd
from lib.hub_server import hub_server
from lib.processes import CONTEXT, WAIT_S, started, wait_for_a_signal
from lib.saved import SMALL, assert_describes_its_model
from peft import LoraConfig, get_peft_config, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

from acsgd import cli
from acsgd.commands.generation.model import load
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.shards import convert, export
from acsgd.shards.convert import from_hf
from acsgd.shards.export import to_hf
from acsgd.shards.hub import find_model
from acsgd.shards.legacy.convert import from_legacy, to_legacy
from acsgd.shards.manifest import StoredFile

TinyModel = Callable[..., Path]


def layers_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


def convert_and_wait(source: Path, target: Path, layers: int, writing: Event, outcome: Connection) -> None:
    """Convert a model in a process that stops for a signal when some of its layers are written."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests were started with nohup
    write_layer, written = convert.write_layer, list[str]()

    def write(directory: Path, layer: str, tensors: Mapping[str, Tensor]) -> StoredFile:
        if len(written) == layers:
            writing.set()
            wait_for_a_signal()
        written.append(layer)
        return write_layer(directory, layer, tensors)

    convert.write_layer = write  # type: ignore[assignment]
    outcome.send(acsgd("convert", "from-hf", source, target))


def interrupt(source: Path, target: Path, number: signal.Signals, layers: int = 2) -> tuple[int, str] | None:
    """Interrupt a conversion; return its exit code and what it printed, None if it was killed."""
    writing, (outcome, end) = CONTEXT.Event(), CONTEXT.Pipe(duplex=False)
    with started(convert_and_wait, source, target, layers, writing, end) as process:
        assert writing.wait(WAIT_S)
        assert process.pid
        os.kill(process.pid, number)
        process.join(WAIT_S)
    return tuple(outcome.recv()) if outcome.poll() else None


def continue_conversion(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Convert a model; return the layers that were written."""
    write_layer, written = convert.write_layer, list[str]()

    def write(directory: Path, layer: str, tensors: Mapping[str, Tensor]) -> StoredFile:
        written.append(layer)
        return write_layer(directory, layer, tensors)

    monkeypatch.setattr(convert, "write_layer", write)
    assert acsgd("convert", "from-hf", source, target) == (0, "")
    monkeypatch.undo()
    return written


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        signal.SIGKILL,
        *(pytest.param(each, marks=pytest.mark.soak) for each in (signal.SIGHUP, signal.SIGTERM)),
    ],
)
def test_an_interrupted_conversion_continues(
    number: signal.Signals, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tiny_model("gpt2", **SMALL), tmp_path / "new" / "target"
    kept = target.with_name(".acsgd-target.resumable")
    outcome = interrupt(source, target, number)
    assert os.listdir(target.parent) == [kept.name]
    if number != signal.SIGKILL:
        message = f"stopped by {number.name}; start the same command again to continue, or remove {kept}"
        assert outcome == (128 + number, f"error: {message}\n")
    assert continue_conversion(source, target, monkeypatch) == ["head"]
    assert os.listdir(target.parent) == ["target"]
    assert acsgd("convert", "from-hf", source, tmp_path / "other") == (0, "")
    assert layers_of(target) == layers_of(tmp_path / "other")
    assert acsgd("inspect", target)[0] == 0


def test_what_is_left_of_an_interrupted_conversion_is_verified(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tiny_model("gpt2", **SMALL), tmp_path / "target"
    interrupt(source, target, signal.SIGKILL)
    partial = tmp_path / ".acsgd-target.resumable" / "target"
    damaged = bytearray((partial / "embed.safetensors").read_bytes())
    damaged[-1] ^= 1
    (partial / "embed.safetensors").write_bytes(damaged)
    with (partial / ".written.jsonl").open("a") as journal:
        journal.write('{"layer": "he')  # the line that was being written
    assert continue_conversion(source, target, monkeypatch) == ["embed", "head"]
    assert acsgd("inspect", target)[0] == 0


def test_a_conversion_of_another_model_does_not_continue(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tiny_model("gpt2", **SMALL), tmp_path / "target"
    interrupt(tiny_model("gpt2", **SMALL, tie_word_embeddings=False), target, signal.SIGKILL)
    assert continue_conversion(source, target, monkeypatch) == ["embed", "block-00000", "head"]
    assert os.listdir(tmp_path) == ["target"]


def test_a_second_conversion_to_one_target_is_refused(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tiny_model("gpt2", **SMALL), tmp_path / "target"
    write_layer, outcomes = convert.write_layer, list[tuple[int, str]]()

    def write(directory: Path, layer: str, tensors: Mapping[str, Tensor]) -> StoredFile:
        monkeypatch.setattr(convert, "write_layer", write_layer)
        outcomes.append(acsgd("convert", "from-hf", source, target))
        return write_layer(directory, layer, tensors)

    monkeypatch.setattr(convert, "write_layer", write)
    assert acsgd("convert", "from-hf", source, target) == (0, "")
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    assert outcomes == [(2, f"error: {target} is being written by {holder}; wait for it, or end it\n")]
    assert os.listdir(tmp_path) == ["target"]
    assert acsgd("inspect", target)[0] == 0


def test_a_stop_signal_during_an_export_leaves_nothing(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, shards = tiny_model("gpt2", **SMALL), tmp_path / "shards"
    assert acsgd("convert", "from-hf", source, shards) == (0, "")
    monkeypatch.setattr(export, "model_card", lambda *_: signal.raise_signal(signal.SIGTERM))
    code, printed = acsgd("convert", "to-hf", shards, tmp_path / "target")
    assert (code, printed) == (128 + signal.SIGTERM, "error: stopped by SIGTERM; nothing was written\n")
    assert os.listdir(tmp_path) == ["shards"]


def test_each_direction_prints_what_was_written_and_what_to_type_next(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What to type loads the model, converts it back, or is an option of a run."""
    source = tiny_model("gpt2", **SMALL, pad_token_id=0)  # which classifiers need
    shards, old, again, hf = (tmp_path / x for x in ("a b", "old", "again", "hf"))
    capsys.readouterr()

    def convert_to(direction: str, source: Path, target: Path, *options: str) -> str:
        cli.run(["convert", direction, str(source), str(target), *options])
        sentence, following = capsys.readouterr().out.removesuffix("\n").split("; ")
        size = sum(path.stat().st_size for path in target.iterdir()) / 1e6
        task = options[-1] if options else "lm"
        assert sentence == f"wrote {target}: 3 layers, {size:.1f} MB, task {task}"
        return following

    assert convert_to("from-hf", source, shards) == f"train it with --model.name '{shards}'"
    assert convert_to("to-hf", shards, hf) == f"load it with AutoModelForCausalLM.from_pretrained('{hf}')"
    back = convert_to("to-legacy", shards, old).removeprefix("convert it back with ")
    assert shlex.split(back) == ["acsgd", "convert", "from-legacy", str(old), "SHARDS"]
    assert convert_to("from-legacy", old, again) == f"train it with --model.name {again}"
    following = convert_to("from-hf", hf, tmp_path / "c", "--task", "classification")
    assert following == f"train it with --model.name {tmp_path / 'c'} --model.task classification"


def test_each_direction_reports_its_progress(tiny_model: TinyModel, tmp_path: Path) -> None:
    """After each part, up to the bytes of all tensors; the old layout has a copy of those that are tied."""

    def reports_of(build: Callable[..., None], source: Path, target: Path) -> list[tuple[int, int]]:
        reports: list[tuple[int, int]] = []
        target.mkdir()
        build(source, target, report=lambda done, total: reports.append((done, total)))
        return reports

    shards, hf, old, again = (tmp_path / name for name in ("shards", "hf", "old", "again"))
    once = [reports_of(from_hf, tiny_model("gpt2", **SMALL), shards), reports_of(to_hf, shards, hf)]
    twice = [reports_of(to_legacy, shards, old), reports_of(from_legacy, old, again)]
    model = GPT2LMHeadModel.from_pretrained(hf)
    size, copy = 4 * model.num_parameters(), 4 * model.lm_head.weight.numel()
    for reports, total in [*((each, size) for each in once), *((each, size + copy) for each in twice)]:
        done = [done for done, _ in reports]
        assert {total for _, total in reports} == {total}
        assert done == sorted(set(done))
        assert done[-1] == total
        assert len(done) >= 3


@pytest.mark.parametrize("direction", ["from-hf", "to-hf"])
@pytest.mark.parametrize("has_room", [True, False])
def test_a_full_disk_leaves_nothing(
    has_room: bool, direction: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for all, nothing is written. Else the limit of the size of files stands for a disk that is filled
    meanwhile: the system refuses the write.
    """
    source, target = tiny_model("gpt2", **SMALL), tmp_path / "new" / "target"
    if direction == "to-hf":
        assert acsgd("convert", "from-hf", source, tmp_path / "shards") == (0, "")
        source = tmp_path / "shards"
    before = os.listdir(tmp_path)
    if not has_room:
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2**12, total=2**13))
        monkeypatch.setattr("acsgd.shards.convert.write_layer", None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, hard))
    try:
        code, printed = acsgd("convert", direction, source, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    problem = "File too large; raise the limit on the size of files (ulimit -f), or give a path on another disk\n"
    if not has_room:
        problem = r"No space left on device for [\d,]+ bytes of (layers|weights); free .* \([\d,]+ .* free now\)\n"
    assert code == 2
    assert re.fullmatch(f"error: {re.escape(str(target))}: {problem if not has_room else re.escape(problem)}", printed)
    assert os.listdir(tmp_path) == before


def test_a_taken_target_is_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.symlink_to("nowhere")
    code, printed = acsgd("convert", "from-hf", tiny_model("gpt2", **SMALL), target)
    assert (code, printed) == (2, f"error: {target} exists already; give a directory that does not, or remove it\n")


def test_a_source_of_the_other_kind_is_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, shards = tiny_model("gpt2", **SMALL), tmp_path / "shards"
    code, printed = acsgd("convert", "to-hf", model, tmp_path / "hf")
    assert (code, printed.partition("; ")[2]) == (
        2,
        "it is a Hugging Face directory, of which acsgd convert from-hf makes layer shards\n",
    )
    assert acsgd("convert", "from-hf", model, shards)[0] == 0
    code, printed = acsgd("convert", "from-hf", shards, tmp_path / "again")
    assert (code, printed) == (
        2,
        f"error: {shards} has layer shards already; use it as it is, or: acsgd convert to-hf {shards} MODEL\n",
    )


@pytest.mark.parametrize(
    ("family", "rows", "options"),
    [
        ("gpt2", None, {"target_modules": ["c_attn"], "r": 4, "rank_pattern": {"h.1.attn.c_attn": 2}}),
        ("llama", None, {"target_modules": "all-linear", "use_dora": True, "modules_to_save": ["lm_head"]}),
        ("llama", None, {"target_modules": ["q_proj", "embed_tokens"], "use_rslora": True}),
        ("llama", None, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
        ("llama", None, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}),
        ("gpt2", None, {"target_modules": ["c_attn"], "trainable_token_indices": {"wte": [3, 5]}}),
        ("gpt2", 1500, {"target_modules": ["c_attn"]}),
        ("gpt2", 1500, {"target_modules": ["c_attn"], "modules_to_save": ["wte"]}),
        ("llama", 1500, {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}),
        ("llama", 1500, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
        ("gpt2", 1500, {"target_modules": ["c_attn"], "trainable_token_indices": {"wte": [3, 1499]}}),
        ("llama", None, {"peft_type": "LN_TUNING", "target_modules": ["input_layernorm"]}),
        ("gpt2", None, {"peft_type": "IA3", "target_modules": ["c_attn"], "feedforward_modules": []}),
    ],
)
def test_an_adapter_that_peft_has_written_is_merged_as_peft_merges_it(
    family: str, rows: int | None, options: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """A table that was resized before is part of the adapter, here one of more rows than that of the base."""
    model, ids = tiny_model(family), torch.arange(24).view(2, 12)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if rows:
        base.resize_token_embeddings(rows)
        ids[:, 0] = rows - 1
    kind = {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(base, get_peft_config(kind | options))
    for param in adapted.parameters():
        if param.requires_grad:
            param.data += torch.randn_like(param) / 20
    adapted.save_pretrained(str(tmp_path / "peft"))
    unmerged = adapted.eval()(ids).logits.detach()
    code, printed = acsgd("convert", "merge", tmp_path / "peft", tmp_path / "merged")
    assert code == 0, printed
    assert_describes_its_model(tmp_path / "merged")
    expected = adapted.merge_and_unload().eval()
    assert acsgd("convert", "to-hf", tmp_path / "merged", tmp_path / "hf")[0] == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, expected(ids).logits, atol=1e-5)
        assert torch.allclose(merged(ids).logits, unmerged, atol=1e-4)


def test_a_tokenizer_of_an_adapter_with_tokens_that_the_model_lacks_is_not_used(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As TRL saves it, with a token for padding and no row for it."""
    model, peft = tiny_model(), tmp_path / "peft"
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(task_type="CAUSAL_LM"))
    adapted.save_pretrained(peft)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = adapted.config.vocab_size
    tokenizer.add_tokens([f"<{number}>" for number in range(rows - len(tokenizer))])
    tokenizer.save_pretrained(peft)
    tokens = []
    for pad in (None, "[PAD]"):
        if pad is not None:
            tokenizer.add_special_tokens({"pad_token": pad})
            tokenizer.save_pretrained(peft)
        loaded = load(str(peft), dtype=None, device=torch.device("cpu"))
        tokens.append((len(loaded.tokenizer), loaded.tokenizer_directory))
    assert tokens == [(rows, peft), (len(AutoTokenizer.from_pretrained(model)), model)]
    note = f"the tokenizer in {peft} has {rows + 1} tokens, more than the {rows} of the model; tokenizer and chat templ"
    assert capsys.readouterr().err.count(note) == 1
    code, printed = acsgd("convert", "merge", peft, tmp_path / "merged")
    assert code == 0, printed
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) == tokens[1][0]


def test_an_adapter_without_one_of_two_resized_tables_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    """PEFT does not save the head if the embedding is a target; its new rows are lost."""
    base = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    base.resize_token_embeddings(1500)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["embed_tokens"])
    get_peft_model(base, config).save_pretrained(tmp_path / "peft")
    code, printed = acsgd("convert", "merge", tmp_path / "peft", tmp_path / "merged")
    assert code == 2
    assert f"error: {tmp_path / 'peft'} has 1500 rows of the embedding, but not of lm_head.weight, which" in printed


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("gpt2", {"target_modules": ["wte"]}, " changes transformer.wte, but not lm_head.weight, to which its"),
        (
            "llama",
            {"target_modules": ["q_proj"], "lora_bias": True},
            " cannot be merged into model.layers.0.self_attn.q_proj: Impossible to",
        ),
    ],
)
def test_an_adapter_that_no_weight_can_hold_is_not_merged(
    family: str, options: dict[str, Any], reason: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """PEFT would merge that of one of two tied tables into both, which changes the other one."""
    base = AutoModelForCausalLM.from_pretrained(tiny_model(family))
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options)).save_pretrained(tmp_path / "peft")
    code, printed = acsgd("convert", "merge", tmp_path / "peft", tmp_path / "merged")
    assert code == 2
    assert f"error: {tmp_path / 'peft'}{reason}" in printed
    assert "bug" not in printed


@pytest.mark.parametrize(
    ("address", "fails", "expected"),
    [
        ("hf://me/model", "", ""),
        ("me/model", "", "error: --push=me/model must be a repository of the Hugging Face Hub, as hf://owner/name"),
        ("hf://me/model", "create_repo", "error: --push=hf://me/model cannot be written: 401 Unauthorized; log in"),
        ("hf://me/model", "upload_folder", "hf is complete, but could not be pushed: 401 Unauthorized; continue with"),
    ],
)
def test_a_model_is_pushed_with_its_card(
    address: str, fails: str, expected: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be written is found before the conversion."""
    shards, calls = tmp_path / "shards", list[tuple[str, object]]()
    shards.mkdir()
    from_hf(tiny_model(n_layer=1), shards)

    class Hub:
        def _call(self, name: str, **arguments: object) -> None:
            if name == fails:
                raise OSError("401 Unauthorized")
            calls.append((name, arguments))

        def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> SimpleNamespace:
            self._call("create_repo", private=private, exist_ok=exist_ok)
            return SimpleNamespace(repo_id=name)

        def upload_folder(self, *, repo_id: str, folder_path: Path) -> None:
            files = sorted(path.name for path in folder_path.iterdir())
            self._call("upload_folder", repo_id=repo_id, files=files)

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    code, printed = acsgd("convert", "to-hf", shards, tmp_path / "hf", "--push", address)
    assert expected in printed
    assert (code == 0) == (not expected)
    assert (tmp_path / "hf").exists() == (not expected or fails == "upload_folder")
    if code == 0:
        (_, created), (_, uploaded) = calls
        assert created == {"private": True, "exist_ok": True}
        assert isinstance(uploaded, dict)
        assert {"README.md", "config.json", "model.safetensors"} <= {*uploaded["files"]}


def test_of_a_run_the_newest_checkpoint_is_converted_or_the_best(tiny_model: TinyModel, tmp_path: Path) -> None:
    saved = CheckpointDirectory(tmp_path / "run/checkpoints")
    for step in (1, 2):
        saved.of(step).mkdir(parents=True)
        from_hf(tiny_model(**SMALL | {"n_layer": step}), saved.of(step))
    code, printed = acsgd("convert", "to-hf", tmp_path / "run", tmp_path / "none", "--best")
    assert code == 2
    assert "run has no best checkpoint, since its run had no metric to choose one by; leave out --best" in printed
    saved.mark_best(1)
    for step, options in ((2, []), (1, ["--best"])):
        assert acsgd("convert", "to-hf", tmp_path / "run", tmp_path / f"hf{step}", *options)[0] == 0
        assert AutoConfig.from_pretrained(tmp_path / f"hf{step}").n_layer == step


@pytest.mark.soak
def test_a_model_that_is_pushed_is_the_one_that_its_id_names(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a server that speaks as the Hub; a token that may not write is found before or after the conversion."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home"))
    (tmp_path / "shards").mkdir()
    from_hf(tiny_model(n_layer=1), tmp_path / "shards")
    with hub_server() as hub:
        assert acsgd("convert", "to-hf", tmp_path / "shards", tmp_path / "hf", "--push", "hf://me/model")[0] == 0
        files = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
        assert hub.repositories["me/model"] == files
        assert b"library_name" in files["README.md"]
        found = find_model("me/model", option="model.name")
        assert (found / "model.safetensors").read_bytes() == files["model.safetensors"]
        hub.allows_writes = False
        code, printed = acsgd("convert", "to-hf", tmp_path / "shards", tmp_path / "other", "--push", "hf://me/other")
        assert code == 2
        assert f"{tmp_path}/other is complete, but could not be pushed: " in printed
        assert printed.rstrip().endswith(f"continue with hf upload me/other {tmp_path}/other")
        assert "you must use a write token" in printed
