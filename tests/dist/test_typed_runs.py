"""Models of many types: losses of runs of two and four ranks are those of one process in plain PyTorch."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lib.model_types import VOCABULARY, small_config, task_of
from lib.ranks import on_ranks
from lib.training import RELATIVE, train_whole
from lib.typed_runs import BATCH, SEQUENCE, WEIGHTS, Drawn, digest, fill_cache, train_ranks
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from acsgd.config.options import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
)
from acsgd.layers.batch import Batch
from acsgd.model_classes import MODEL_CLASSES
from acsgd.pp.wire.frame import HEADER_BYTES
from acsgd.shards.manifest import Manifest
from acsgd.streams import mix_seed

STEPS, HALF = 4, 2
SMALL, SCALE = 0.05, 4.0
"""New matrices with a standard deviation below SMALL are multiplied by SCALE: attention would be nearly uniform,
whatever its mask. Those of t5 are larger."""


DECODERS = ("opt", "gptj", "gpt_neox", "bloom", "gemma2", "qwen3", "mixtral")
TYPES = (*DECODERS, "deberta-v2", "albert", "t5", "bart")
PADDED = {"opt": "4 stages", "bloom": "2 stages x 2 replicas"}
"""Decoders that are trained on padded rows, too, whose micro-batches are cut to the longest row; and how."""
SMOOTHED = "bart"
"""Type that is trained with label smoothing."""
DROPOUT = {
    "opt": {"dropout": 0.1, "attention_dropout": 0.1},
    "gptj": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "deberta-v2": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "pooler_dropout": 0.1},
    "t5": {"dropout_rate": 0.1},
    "bart": {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1},
}
"""Options of types with dropout."""
DROPOUT_SPLITS = {"opt": ["2 stages"], "gptj": ["4 stages"]}
"""Splits of types that are compared with `oracle` with dropout, too; others are compared with each other."""


class Split(NamedTuple):
    """Division of a model over ranks."""

    stages: int
    replicas: int
    layers: tuple[int, ...]
    """Number of blocks of each stage."""
    schedule: str = "1f1b"


def splits(model_type: str) -> dict[str, Split]:
    """Return divisions of a small model, by name."""
    if task_of(model_type).name == "seq2seq":
        return {
            "2 stages": Split(2, 1, (3, 1)),
            "2 stages x 2 replicas": Split(2, 2, (1, 1, 1, 1), "interleaved:chunks=2"),
            "4 stages": Split(4, 1, (1, 1, 1, 1)),
        }
    return {
        "2 stages": Split(2, 1, (2, 1)),
        "2 stages x 2 replicas": Split(2, 2, (1, 2), "gpipe"),
        "4 stages": Split(4, 1, (1, 1, 1, 0)),
    }


def compared(model_type: str) -> list[str]:
    """Return the names of the splits in which a type is compared with one process; of decoders, one on four ranks."""
    two, replicas, four = splits(model_type)
    if model_type not in DECODERS:
        return [two, replicas, four]
    return [two, (four, replicas)[DECODERS.index(model_type) % 2]]


class Runs:
    """Runs in a directory, to be trained with one start of processes per number of ranks.

    A run is named by its type, its split and what else is special: "t5, 4 stages".
    """

    def __init__(self, directory: Path) -> None:
        self.configs: dict[str, Config] = {}
        self._ranks: dict[str, int] = {}
        self._directory = directory

    def add(self, model_type: str, split: str, special: str = "", **options: Any) -> Config:
        """Add a run. options: of the config of the model, or of a run as "pp.forward"."""
        task = options.pop("model.task", task_of(model_type).name)
        run_options = {key: options.pop(key) for key in list(options) if "." in key}
        name = ", ".join(filter(None, [model_type, split, special]))
        stages, replicas, layers, schedule = splits(model_type)[split]
        config = Config(
            model=ModelConfig(str(self._model(model_type, task, options)), task=task),
            data=DataConfig(sources="demo", sequence=SEQUENCE, batch=BATCH, seed=3),
            optim=OptimConfig(
                lr=1e-3,
                steps=STEPS,
                warmup=3,
                clip=0.5,
                weight_decay=0.1,
                label_smoothing=0.1 if model_type == SMOOTHED else 0.0,
            ),
            pp=PipelineConfig(stages=stages, layers=layers, schedule=schedule, micro=2),
            log=LogConfig(dir=str(self._directory / "runs" / name), to="jsonl"),
        )
        for key, value in run_options.items():
            section, _, option = key.partition(".")
            config = dataclasses.replace(
                config, **{section: dataclasses.replace(getattr(config, section), **{option: value})}
            )
        self.configs[name] = config
        self._ranks[name] = stages * replicas
        return config

    def _model(self, model_type: str, task: str, options: dict[str, Any]) -> Path:
        """Return the directory of a model, which is written if it is not there yet."""
        changes = [f"{key}={value}" for key, value in options.items()]
        directory = self._directory / "models" / " ".join([model_type, task, *changes])
        if not directory.exists():
            save_model(directory, task, small_config(model_type, **options))
        return directory

    def train(self, ranks: int) -> None:
        """Train all runs of a number of ranks, in the order in which they were added."""
        configs = [config for name, config in self.configs.items() if self._ranks[name] == ranks]
        for config in configs:
            fill_cache(config, ranks)
        on_ranks(ranks, train_ranks, self._directory / f"store-{ranks}", configs)


def checkpoint_of(config: Config, step: int) -> Path:
    """Return the path of a checkpoint."""
    return Path(config.log.dir) / "checkpoints" / f"step-{step:08d}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The runs of this module, trained."""
    runs = Runs(tmp_path_factory.mktemp("typed"))
    for model_type in TYPES:
        for split in compared(model_type):
            saves = {"checkpoint.every": str(HALF)} if (model_type, split) == ("t5", "4 stages") else {}
            runs.add(model_type, split, **saves)
    for model_type, options in DROPOUT.items():
        for split in DROPOUT_SPLITS.get(model_type, ("2 stages", "4 stages")):
            runs.add(model_type, split, "dropout", **options)
    for model_type, split in PADDED.items():
        runs.add(model_type, split, "padded rows", **{"data.rows": "single"})
    runs.add("deberta-v2", "2 stages", "regression", **{"model.task": "regression", "num_labels": 1})
    runs.add("bart", "4 stages", "classifier", **{"model.task": "classification", "num_labels": 3})
    runs.add("bart", "2 stages", "fixpoint", **{"pp.forward": "fixpoint:bits=8", "pp.backward": "fixpoint:bits=8"})
    runs.add("bart", "2 stages", "delta", **{"pp.forward": "delta:bits=8"})
    runs.add("mixtral", "2 stages", "bf16", **{"model.dtype": "bf16"})
    runs.add("t5", "2 stages", "recompute", **{"model.recompute": "layers"})
    resumed = runs.add("t5", "2 stages", "resumed")
    runs.train(4)
    saved = checkpoint_of(runs.configs["t5, 4 stages"], HALF)
    shutil.copytree(saved, checkpoint_of(resumed, HALF))
    metrics = Path(runs.configs["t5, 4 stages"].log.dir) / "metrics.jsonl"
    Path(resumed.log.dir, "metrics.jsonl").write_text("".join(metrics.read_text().splitlines(keepends=True)[:HALF]))
    runs.train(2)
    return runs


@pytest.mark.parametrize("model_type", TYPES)
def test_losses_are_those_of_one_process(model_type: str, runs: Runs) -> None:
    configs = [runs.configs[f"{model_type}, {split}"] for split in compared(model_type)]
    expected = oracle(configs[0])
    for config in configs:
        assert_equal(config, expected)


@pytest.mark.parametrize("model_type", DROPOUT_SPLITS)
def test_losses_with_dropout_are_those_of_one_process(model_type: str, runs: Runs) -> None:
    (config,) = (runs.configs[f"{model_type}, {split}, dropout"] for split in DROPOUT_SPLITS[model_type])
    expected = oracle(config)
    assert_equal(config, expected)
    without = result_of(runs.configs[f"{model_type}, 2 stages"]).losses
    assert expected.losses != pytest.approx(without, rel=10 * RELATIVE), "dropout is not active"


@pytest.mark.parametrize("model_type", ["deberta-v2", "t5", "bart"])
def test_dropout_does_not_depend_on_the_stages(model_type: str, runs: Runs) -> None:
    two, four = (runs.configs[f"{model_type}, {split}, dropout"] for split in ("2 stages", "4 stages"))
    assert_equal(two, result_of(four))
    without = result_of(runs.configs[f"{model_type}, 2 stages"]).losses
    assert result_of(four).losses != pytest.approx(without, rel=10 * RELATIVE), "dropout is not active"


@pytest.mark.parametrize("model_type", PADDED)
def test_losses_of_padded_rows_are_those_of_one_process(model_type: str, runs: Runs) -> None:
    """The loop of one process pads all rows to the same length."""
    config = runs.configs[f"{model_type}, {PADDED[model_type]}, padded rows"]
    assert_equal(config, oracle(config))


def test_messages_are_as_long_as_the_longest_row_of_their_micro_batch(runs: Runs) -> None:
    cut, full = (runs.configs[f"opt, 4 stages{special}"] for special in (", padded rows", ""))
    width = small_config("opt").hidden_size
    for number, (ours, others) in enumerate(zip(bytes_of(cut), bytes_of(full), strict=True)):
        lengths = [rows.sequence for rows in Drawn.whole(cut).batch(number).longest_rows or ()]
        cut_lengths = [min(8 * math.ceil(length / 8), SEQUENCE) for length in lengths]
        for sent, sizes in ((ours, cut_lengths), (others, [SEQUENCE] * len(lengths))):
            assert sent == sum(3 * (HEADER_BYTES + cut.pp.micro * size * width * 4) for size in sizes)
    assert sum(bytes_of(cut)) < sum(bytes_of(full))


def test_losses_of_a_regression_are_those_of_one_process(runs: Runs) -> None:
    config = runs.configs["deberta-v2, 2 stages, regression"]
    assert_equal(config, oracle(config))


def test_losses_of_a_classifier_with_a_decoder_are_those_of_one_process(runs: Runs) -> None:
    """Its head reads the tokens, which the first stage reads, too."""
    config = runs.configs["bart, 4 stages, classifier"]
    assert_equal(config, oracle(config))


def assert_equal(config: Config, expected: Result) -> None:
    found = result_of(config)
    assert found.losses == pytest.approx(expected.losses, rel=RELATIVE), config.log.dir
    assert found.eval_loss == pytest.approx(expected.eval_loss, rel=RELATIVE), config.log.dir
    assert found.losses[-2] < found.losses[0], "both steps have the same samples"


@pytest.mark.parametrize("codec", ["fixpoint", "delta"])
def test_codecs_take_several_tensors_per_boundary(codec: str, runs: Runs) -> None:
    found = result_of(runs.configs[f"bart, 2 stages, {codec}"])
    exact = result_of(runs.configs["bart, 2 stages"])
    assert found.losses == pytest.approx(exact.losses, rel=0.01)
    assert found.losses != exact.losses


def test_bf16_trains_as_fp32(runs: Runs) -> None:
    found, exact = (result_of(runs.configs[f"mixtral, 2 stages{special}"]) for special in (", bf16", ""))
    assert found.losses == pytest.approx(exact.losses, rel=2.0**-8)
    assert found.losses != exact.losses


def test_recomputation_changes_no_bit(runs: Runs) -> None:
    kept, recomputed = (runs.configs[f"t5, 2 stages{special}"] for special in ("", ", recompute"))
    assert result_of(recomputed) == result_of(kept)
    assert weights_of(recomputed, STEPS) == weights_of(kept, STEPS)


def test_all_copies_of_a_weight_are_equal_at_the_end(runs: Runs) -> None:
    for name, config in runs.configs.items():
        saved = stored_weights(checkpoint_of(config, STEPS))
        for weights in weights_of(config, STEPS):
            assert weights == {key: saved[key] for key in weights}, name
    last_run = weights_of(runs.configs["t5, 4 stages"], STEPS)
    tables = [sum("relative_attention_bias" in key for key in weights) for weights in last_run]
    assert min(tables) > 0, "every stage of t5 has a table of relative biases"


def test_a_run_resumes_on_another_number_of_stages_with_the_same_weights(runs: Runs) -> None:
    config = runs.configs["t5, 2 stages, resumed"]
    saved = stored_weights(checkpoint_of(runs.configs["t5, 4 stages"], HALF))
    for weights in weights_of(config, HALF):
        assert weights == {key: saved[key] for key in weights}
    assert_equal(config, oracle(config))


def weights_of(config: Config, step: int) -> list[dict[str, str]]:
    """Return the hashes of the weights of each rank."""
    paths = sorted(Path(config.log.dir).glob(WEIGHTS.format(step=step, rank="*")))
    assert len(paths) % config.pp.stages == 0 < len(paths)
    return [json.loads(path.read_text()) for path in paths]


def stored_weights(checkpoint: Path) -> dict[str, str]:
    """Return the hashes of the weights in a checkpoint."""
    manifest = Manifest.read(checkpoint)
    files = {entry.file for entry in (manifest.layers | manifest.tables).values()}
    return {key: digest(x) for file in files for key, x in load_file(checkpoint / file).items()}


class Result(NamedTuple):
    """Losses of a run."""

    losses: list[float]
    eval_loss: float


def bytes_of(config: Config) -> list[int]:
    """Return the bytes of the activations that were sent in each step."""
    return [record["pp_forward_bytes"] for record in records_of(config)]


def records_of(config: Config) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl."""
    return [json.loads(line) for line in (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines()]


def result_of(config: Config) -> Result:
    """Read the result of a run."""
    lines = records_of(config)
    assert [line["step"] for line in lines] == list(range(1, config.optim.steps + 1))
    return Result([line["loss"] for line in lines], lines[-1]["eval_loss"])


def oracle(config: Config) -> Result:
    """Train the run in this process with the Hugging Face model alone.

    Dropout is seeded at the start of forward and before each block, which is what acsgd does if the model's code
    between and after the blocks has none.
    """
    task, optim = MODEL_CLASSES[config.model.task], config.optim
    model = task.auto_class.from_pretrained(config.model.name, dtype=torch.float32).train()
    drawn, place = Drawn.whole(config), [0, 0]

    def reseed(index: int) -> None:
        torch.manual_seed(mix_seed(config.data.seed, *place, index))

    def before(step: int, micro: int, batch: Batch) -> None:
        place[:] = [step, micro]
        reseed(0)

    for index, path in enumerate(task.layers(model.config).blocks):
        module = model.get_submodule(path)
        module.register_forward_pre_hook(lambda *_, layer=index + 1: reseed(layer))

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        if config.model.task == "regression":
            return (logits.squeeze(-1) - labels).square().sum()
        smoothing = optim.label_smoothing if model.training else 0.0
        logits, labels = logits.flatten(0, -2), labels.flatten()
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)

    losses = train_whole(model, optim, map(drawn.batch, range(optim.steps)), loss=loss, before=before)
    (held_out,) = drawn.batches(0)
    assert held_out.labels is not None
    assert held_out.inputs is not None
    with torch.no_grad():
        logits = model.eval()(**{name: x.flatten(0, 1) for name, x in held_out.inputs.items()}, use_cache=False).logits
        labels = held_out.labels.flatten(0, 1)
        return Result(losses, float(loss(logits, labels) / (labels != -100).sum()))


def save_model(directory: Path, task: str, config: PreTrainedConfig) -> None:
    """Write a model with new weights, and a tokenizer of as many tokens."""
    torch.manual_seed(0)
    model = MODEL_CLASSES[task].auto_class.from_config(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1 and param.std() < SMALL:
                param.mul_(SCALE)
    model.save_pretrained(directory)
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(ord("!") + token): token for token in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(directory)
