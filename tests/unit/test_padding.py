"""Laws of micro-batches that are cut to their longest row, and of the models and runs in which they are not."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lib.labelled import save_model, with_special_tokens
from lib.model_types import SHAPE, TYPES, WITHOUT_KEY_VALUE_HEADS, small_config, task_of
from lib.training import make_config
from transformers import AutoConfig, PreTrainedTokenizerFast

from acsgd import codecs
from acsgd.codecs.base import wire_bytes
from acsgd.config.options import Config
from acsgd.io.data.rows.base import LENGTHS
from acsgd.launch import Launch
from acsgd.layers.batch import Lengths, cut, longest
from acsgd.layers.compare import ComparedStages
from acsgd.layers.padding import depends_on_length, ignores_padding
from acsgd.layers.verify import fill_with_random, make_batches
from acsgd.model_classes import IGNORED, MODEL_CLASSES
from acsgd.run.plan.job import prepare
from acsgd.run.setup.data import open_data
from acsgd.run.setup.describe import describe_padding, micro_shapes

TinyModel = Callable[..., Path]


def ignores(config: Any, task_name: str) -> bool:
    task = MODEL_CLASSES[task_name]
    stages = ComparedStages(fill_with_random(task.build(config)), task.build(config), task.layers(config))
    inputs = task.inputs_of(config)
    return ignores_padding(stages, make_batches(stages.whole, inputs)["plain"], inputs, task.predicted)


@pytest.mark.parametrize("model_type", TYPES)
def test_rows_have_the_same_logits_with_less_padding(model_type: str) -> None:
    assert ignores(small_config(model_type), task_of(model_type).name)


@pytest.mark.parametrize("model_type", ["fnet", "convbert", "nystromformer"])
def test_models_whose_results_depend_on_padding_are_found(model_type: str) -> None:
    """Fourier transforms, convolutions over padding, and means over segments of a row."""
    sizes = WITHOUT_KEY_VALUE_HEADS | {"vocab_size": 96, "embedding_size": 32}
    assert not ignores(AutoConfig.for_model(model_type, **sizes), "classification")


ROPE = {"rope_theta": 1e4, "factor": 2.0}
DYNAMIC = {"rope_parameters": ROPE | {"rope_type": "dynamic"}}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 32} | {
    "long_factor": [1.0] * 4,
    "short_factor": [1.0] * 4,
}
LENGTH_DEPENDENT = {
    "block-sparse attention": ("big_bird", {"attention_type": "block_sparse"}, 64, True),
    "full attention": ("big_bird", {"attention_type": "original_full"}, 64, False),
    "capacity of experts": ("switch_transformers", {"expert_capacity": 4}, 64, True),
    "dynamic frequencies": ("llama", DYNAMIC, 65, True),
    "dynamic frequencies within the pretraining": ("llama", DYNAMIC, 64, False),
    "frequencies of long batches": ("llama", {"rope_parameters": ROPE | LONG}, 33, True),
    "frequencies of short batches": ("llama", {"rope_parameters": ROPE | LONG}, 32, False),
    "constant frequencies": ("llama", {"rope_parameters": ROPE | {"rope_type": "linear"}}, 65, False),
}


@pytest.mark.parametrize("case", LENGTH_DEPENDENT)
def test_options_that_make_results_depend_on_the_length_of_a_batch_are_known(case: str) -> None:
    model_type, options, sequence, expected = LENGTH_DEPENDENT[case]
    config = AutoConfig.for_model(model_type, **({} if model_type == "switch_transformers" else SHAPE) | options)
    assert depends_on_length(config, sequence) == expected


def test_lengths_are_multiples_of_eight_and_at_most_those_of_the_data() -> None:
    full = Lengths(30, 12)
    assert [Lengths(n, n).rounded_up(full) for n in (0, 1, 8, 9, 25)] == [
        (8, 8), (8, 8), (8, 8), (16, 12), (30, 12),
    ]  # fmt: skip
    assert Lengths(9).rounded_up(Lengths(30)) == (16, 0), "a model without a decoder after an encoder"
    assert longest([Lengths(3, 9), Lengths(5, 2)]) == (5, 9)


def test_tensors_are_cut_along_the_axes_of_their_rows() -> None:
    x = torch.arange(2 * 6).view(2, 6)
    assert cut(x, ("batch", "sequence"), Lengths(4, 2)).tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert cut(x, ("batch", "target"), Lengths(4, 2)).tolist() == [[0, 1], [6, 7]]
    assert cut(x[:, 0], ("batch",), Lengths(1, 1)).tolist() == [0, 6]
    assert cut(x, ("batch", "sequence"), Lengths(4, 2)).is_contiguous()


@pytest.mark.parametrize("spec", codecs.CODECS)
def test_no_message_of_shorter_rows_is_longer(spec: str) -> None:
    """Receive buffers have room for the longest rows."""
    codec = codecs.parse(spec)
    for dtype in (torch.float32, torch.bfloat16):
        sizes = [wire_bytes(codec.wire((3, length, 24), dtype)) for length in range(1, 70)]
        assert all(shorter <= longer for shorter, longer in itertools.pairwise(sizes))


def padded_run(model: Path, tmp_path: Path, *, sequence: int = 40, **pp: Any) -> Config:
    """Return a run on texts of different lengths, one per row."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": "ab" * (1 + n % 7)}) for n in range(20)))
    config = make_config(model, tmp_path, **pp)
    data = dataclasses.replace(config.data, sources=str(texts), rows="single", sequence=sequence)
    return dataclasses.replace(config, data=data)


def test_padded_rows_are_cut_unless_a_cache_or_a_mask_belongs_to_their_positions(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    config = padded_run(tiny_model("gpt2"), tmp_path, micro=2)
    job = prepare(config, Launch())
    assert micro_shapes(job).is_cut
    assert describe_padding(job) == ()
    others = {
        "pp.forward=delta": dataclasses.replace(config, pp=dataclasses.replace(config.pp, forward="delta")),
        "model.dropout_mask=sample": dataclasses.replace(
            config, model=dataclasses.replace(config.model, dropout_mask="sample")
        ),
    }
    for reason, other in others.items():
        job = prepare(other, Launch())
        assert not micro_shapes(job).is_cut
        assert micro_shapes(job).lengths(None, 3) == [Lengths(40)] * 3
        assert describe_padding(job)[0].startswith(f"padding: micro-batches are not cut to their longest row: {reason}")
    packed = prepare(dataclasses.replace(config, data=dataclasses.replace(config.data, rows="pack")), Launch())
    assert not micro_shapes(packed).is_cut
    assert describe_padding(packed) == ()


def test_nothing_but_padding_is_cut_from_documents(tiny_model: TinyModel, tmp_path: Path) -> None:
    job = prepare(padded_run(tiny_model("gpt2"), tmp_path, micro=2), Launch())
    shapes, batch = micro_shapes(job), open_data(job).reader.batch(0)
    assert batch.inputs is not None
    assert batch.labels is not None
    lengths = shapes.lengths(batch.longest_rows, len(batch.sample_ids))
    for micro, each in enumerate(lengths):
        assert each is not None
        full = {name: x[micro] for name, x in batch.inputs.items()}
        ids, labels = shapes.cut_inputs(full, each)["input_ids"], shapes.cut_labels(batch.labels[micro], each)
        assert ids.shape == labels.shape == (2, each.sequence)
        assert (labels != IGNORED).sum() == (batch.labels[micro] != IGNORED).sum()
        last = (labels != IGNORED).nonzero()[:, 1].max()
        assert each.sequence - last <= 8, "more padding than the multiple needs"
    assert all(each is not None and each.sequence < 40 for each in lengths)
    assert shapes.lengths(None, 3) == [None] * 3


def test_prompt_and_answer_are_cut_to_lengths_of_their_own(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    special = with_special_tokens(tokenizer)
    model = save_model(tmp_path / "bart", special, "bart", "seq2seq", decoder_start_token_id=513)
    path = tmp_path / "pairs.jsonl"
    rows = [{"input": "a" * (2 * n), "output": "b" * (20 - n)} for n in range(1, 13)]
    path.write_text("\n".join(map(json.dumps, rows)))
    config = make_config(model, tmp_path, micro=2)
    data = dataclasses.replace(config.data, sources=str(path))
    config = dataclasses.replace(config, data=data, model=dataclasses.replace(config.model, task="seq2seq"))
    job = prepare(config, Launch())
    shapes, reader = micro_shapes(job), open_data(job).reader.rows
    assert shapes.is_cut
    read = reader.read(np.zeros(12, dtype=np.int64), np.arange(12))
    assert read.inputs is not None
    assert read.labels is not None
    for micro, each in enumerate(shapes.lengths(read.longest_rows, 6)):
        assert each is not None
        inputs = shapes.cut_inputs({name: x[micro] for name, x in read.inputs.items()}, each)
        labels = shapes.cut_labels(read.labels[micro], each)
        assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (2, each.sequence)
        assert inputs["decoder_input_ids"].shape == labels.shape == (2, each.target)
        assert inputs["attention_mask"].sum() == read.inputs["attention_mask"][micro].sum()
        assert (labels != IGNORED).sum() == (read.labels[micro] != IGNORED).sum()
        assert each.sequence - inputs["attention_mask"].sum(1).max() < 8
        assert each.target - (labels != IGNORED).sum(1).max() < 8


def test_ranks_that_read_no_rows_know_no_lengths(tiny_model: TinyModel, tmp_path: Path) -> None:
    rows = open_data(prepare(padded_run(tiny_model("gpt2"), tmp_path, micro=2), Launch())).reader.rows
    neither = dataclasses.replace(rows, wants_inputs=False, wants_labels=False)
    only_labels = dataclasses.replace(rows, wants_inputs=False)
    places = np.zeros(4, dtype=np.int64), np.arange(4)
    assert neither.read(*places).longest_rows is None
    assert only_labels.read(*places).longest_rows == rows.read(*places).longest_rows
    assert rows.read(*places).num_tokens == sum(rows.rows[0].read(n)[LENGTHS].sum() for n in range(4))
