"""Models of many types: losses of runs of two and four ranks are those of one process in plain PyTorch."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lib.model_types import small_config
from lib.training import RELATIVE
from lib.typed_runs import (
    HALF,
    SEQUENCE,
    STEPS,
    WEIGHTS,
    Drawn,
    Runs,
    assert_equal,
    checkpoint_of,
    digest,
    oracle,
    records_of,
    result_of,
    splits,
)
from safetensors.torch import load_file

from acsgd.config.options import Config
from acsgd.pp.wire.frame import HEADER_BYTES
from acsgd.shards.manifest import Manifest

DECODERS = ("opt", "bloom", "mixtral")
TYPES = (*DECODERS, "deberta-v2", "t5", "bart")
"""The soak area `models` trains others, too."""
PADDED = {"opt": "2 stages", "bloom": "2 stages x 2 replicas"}
"""Decoders that are trained on padded rows, too, whose micro-batches are cut to the longest row; and how."""
DROPOUT = {
    "opt": {"dropout": 0.1, "attention_dropout": 0.1},
    "deberta-v2": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "pooler_dropout": 0.1},
    "t5": {"dropout_rate": 0.1},
    "bart": {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1},
}
"""Options of types with dropout."""
SOAK = {
    *("bloom", "mixtral", "bart", "deberta-v2"),
    *("deberta-v2 with dropout", "t5 with dropout", "bart with dropout", "fixpoint", "classification", "bf16"),
}
"""Rows whose laws others show, with other types or codecs."""
GATHERED = ("mixtral", "deberta-v2", "t5", "bart", "albert")
"""Types with experts, replicated tensors, code between blocks, and one block that is called several times."""
DROPOUT_SPLITS = {"opt": ["2 stages"]}
"""Splits of types that are compared with `oracle` with dropout, too; others are compared with each other."""


def compared(model_type: str) -> list[str]:
    """Return the names of the splits in which a type is compared with one process."""
    _, two, replicas, four = splits(model_type)
    return {"opt": [two], "mixtral": [two], "bart": [two, replicas]}.get(model_type, [two, four])


def rows(*names: str, special: str = "") -> list[Any]:
    """Return the rows of a table."""
    return [pytest.param(name, marks=[pytest.mark.soak] * (name + special in SOAK)) for name in names]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, selected: Callable[[str], set[str]]) -> Runs:
    """The runs of this module, trained, but for rows that are not selected."""
    left_out = SOAK.difference(*map(selected, ("model_type", "codec", "task", "dtype")))
    left_out -= {"mixtral"} if selected("dtype") else set()
    left_out -= {f"{model_type} with dropout" for model_type in selected("with_dropout")}
    runs = Runs(tmp_path_factory.mktemp("typed"))
    for model_type in (each for each in TYPES if each not in left_out):
        for split in compared(model_type):
            saves = {"checkpoint.every": str(HALF)} if (model_type, split) == ("t5", "4 stages") else {}
            runs.add(model_type, split, **saves)
    for model_type, options in DROPOUT.items():
        if f"{model_type} with dropout" in left_out:
            continue
        for split in DROPOUT_SPLITS.get(model_type, ("2 stages", "4 stages")):
            runs.add(model_type, split, "dropout", **options)
    for model_type, split in PADDED.items():
        if model_type not in left_out:
            runs.add(model_type, split, "padded rows", **{"data.rows": "single"})
    runs.add("deberta-v2", "2 stages", "regression", **{"model.task": "regression", "num_labels": 1})
    if "classification" not in left_out:
        runs.add("bart", "2 stages", "classifier", **{"model.task": "classification", "num_labels": 3})
    if "fixpoint" not in left_out:
        runs.add("t5", "2 stages", "fixpoint", **{"pp.forward": "fixpoint:bits=8", "pp.backward": "fixpoint:bits=8"})
    gathered = {"dp.mode": "allreduce:bucket_mb=0.01", "dp.shard": "weights", "pp.micro": 1}
    for model_type in selected("gathered"):
        runs.add(model_type, "2 replicas", "gathered", **gathered)
    runs.add("t5", "2 stages", "delta", **{"pp.forward": "delta:bits=8"})
    if "bf16" not in left_out:
        runs.add("mixtral", "2 stages", "bf16", **{"model.dtype": "bf16"})
    runs.add("t5", "2 stages", "recompute", **{"model.recompute": "layers"})
    offloaded = {"pp.schedule": "zb", "pp.layers": (1, 3), "model.offload": "cpu", "optim.offload": "cpu"}
    runs.add("bart", "2 stages", "offloaded", **offloaded, encoder_layers=3, decoder_layers=1)
    resumed = runs.add("t5", "2 stages", "resumed")
    runs.train(4)
    saved = checkpoint_of(runs.configs["t5, 4 stages"], HALF)
    shutil.copytree(saved, checkpoint_of(resumed, HALF))
    metrics = Path(runs.configs["t5, 4 stages"].log.dir) / "metrics.jsonl"
    Path(resumed.log.dir, "metrics.jsonl").write_text("".join(metrics.read_text().splitlines(keepends=True)[:HALF]))
    runs.train(2)
    return runs


@pytest.mark.parametrize("model_type", rows(*TYPES))
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


@pytest.mark.parametrize("with_dropout", rows("deberta-v2", "t5", "bart", special=" with dropout"))
def test_dropout_does_not_depend_on_the_stages(with_dropout: str, runs: Runs) -> None:
    two, four = (runs.configs[f"{with_dropout}, {split}, dropout"] for split in ("2 stages", "4 stages"))
    assert_equal(two, result_of(four))
    without = result_of(runs.configs[f"{with_dropout}, 2 stages"]).losses
    assert result_of(four).losses != pytest.approx(without, rel=10 * RELATIVE), "dropout is not active"


@pytest.mark.parametrize("model_type", rows(*PADDED))
def test_losses_of_padded_rows_are_those_of_one_process(model_type: str, runs: Runs) -> None:
    """The loop of one process pads all rows to the same length."""
    config = runs.configs[f"{model_type}, {PADDED[model_type]}, padded rows"]
    assert_equal(config, oracle(config))


def test_messages_are_as_long_as_the_longest_row_of_their_micro_batch(runs: Runs) -> None:
    cut, full = (runs.configs[f"opt, 2 stages{special}"] for special in (", padded rows", ""))
    width = small_config("opt").hidden_size
    for number, (ours, others) in enumerate(zip(bytes_of(cut), bytes_of(full), strict=True)):
        lengths = [rows.sequence for rows in Drawn.whole(cut).batch(number).longest_rows or ()]
        cut_lengths = [min(8 * math.ceil(length / 8), SEQUENCE) for length in lengths]
        for sent, sizes in ((ours, cut_lengths), (others, [SEQUENCE] * len(lengths))):
            assert sent == sum(HEADER_BYTES + cut.pp.micro * size * width * 4 for size in sizes)
    assert sum(bytes_of(cut)) < sum(bytes_of(full))


def test_losses_of_a_regression_are_those_of_one_process(runs: Runs) -> None:
    config = runs.configs["deberta-v2, 2 stages, regression"]
    assert_equal(config, oracle(config))


@pytest.mark.soak
@pytest.mark.parametrize("gathered", GATHERED)
def test_weights_that_replicas_divide_have_the_losses_of_one_process(gathered: str, runs: Runs) -> None:
    config = runs.configs[f"{gathered}, 2 replicas, gathered"]
    assert_equal(config, oracle(config))


@pytest.mark.parametrize("task", rows("classification"))
def test_losses_of_a_classifier_with_a_decoder_are_those_of_one_process(task: str, runs: Runs) -> None:
    """Its head reads the tokens, which the first stage reads, too."""
    config = runs.configs["bart, 2 stages, classifier"]
    assert config.model.task == task
    assert_equal(config, oracle(config))


@pytest.mark.parametrize("codec", rows("fixpoint", "delta"))
def test_codecs_take_several_tensors_per_boundary(codec: str, runs: Runs) -> None:
    found = result_of(runs.configs[f"t5, 2 stages, {codec}"])
    exact = result_of(runs.configs["t5, 2 stages"])
    assert found.losses == pytest.approx(exact.losses, rel=0.01)
    assert found.losses != exact.losses


@pytest.mark.parametrize("dtype", rows("bf16"))
def test_bf16_trains_as_fp32(dtype: str, runs: Runs) -> None:
    found, exact = (result_of(runs.configs[f"mixtral, 2 stages{special}"]) for special in (f", {dtype}", ""))
    assert found.losses == pytest.approx(exact.losses, rel=2.0**-8)
    assert found.losses != exact.losses


def test_recomputation_changes_no_bit(runs: Runs) -> None:
    kept, recomputed = (runs.configs[f"t5, 2 stages{special}"] for special in ("", ", recompute"))
    assert result_of(recomputed) == result_of(kept)
    assert weights_of(recomputed, STEPS) == weights_of(kept, STEPS)


def test_split_backwards_of_several_layers_fetch_parameters_again_after_each_update(runs: Runs) -> None:
    """The second stage has a part of the encoder, and tables of replicated tensors: its layers are in one graph."""
    config = runs.configs["bart, 2 stages, offloaded"]
    assert_equal(config, oracle(config))


def test_all_copies_of_a_weight_are_equal_at_the_end(runs: Runs) -> None:
    for name, config in runs.configs.items():
        if config.dp.shard == "weights":
            continue
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


def bytes_of(config: Config) -> list[int]:
    """Return the bytes of the activations that were sent in each step."""
    return [record["pp_forward_bytes"] for record in records_of(config)]
