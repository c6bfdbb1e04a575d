"""Laws of which rank holds a weight that layers of several ranks share, and what is printed of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lib.model_types import small_config, task_of
from lib.training import make_config

from acsgd.codecs.base import wire_bytes
from acsgd.launch import Launch
from acsgd.layers.description import ModelLayers
from acsgd.pp.schedules.actions import Action, Op
from acsgd.pp.schedules.rows import UseOrder
from acsgd.pp.tied.groups import MicroGroups, RowGroups
from acsgd.pp.tied.plan import TiedDense, TiedRows, TiedWeight, tied_weights
from acsgd.run.plan.job import prepare
from acsgd.run.setup.describe import describe_tied


def layers_of(model_type: str) -> ModelLayers:
    return task_of(model_type).layers(small_config(model_type, tie_word_embeddings=True))


def plan(layers: ModelLayers, how: TiedRows | TiedDense) -> dict[str, TiedWeight]:
    """Return the tied weights if each layer is on a rank of its own."""
    return {weight.key: weight for weight in tied_weights(layers, lambda layer: layer, how)}


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_the_rank_of_the_head_holds_the_table(model_type: str) -> None:
    layers = layers_of(model_type)
    [weight] = plan(layers, TiedRows()).values()
    head = len(layers.layers) - 1
    assert (weight.ranks, weight.owner, dict(weight.lookups)) == ((0, head), head, {0: ("input_ids",)})
    assert not plan(layers, TiedDense())[weight.key].lookups
    assert plan(layers.freeze([weight.key]), TiedRows()) == {}, "a frozen table does not travel"
    assert tied_weights(layers, lambda _: 0, TiedRows()) == [], "nor one whose layers are on one rank"


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_three_layers_of_an_encoder_decoder_share_a_table(model_type: str) -> None:
    """The embeddings of encoder and decoder, each with indices of its own, and the head."""
    [weight] = [each for each in plan(layers_of(model_type), TiedRows()).values() if each.lookups]
    encoder, decoder, head = weight.ranks
    assert weight.owner == head
    assert dict(weight.lookups) == {encoder: ("input_ids",), decoder: ("decoder_input_ids",)}


def test_other_tied_weights_have_copies() -> None:
    """Those of the one block of ALBERT, which all of its layers use: no table of an embedding."""
    weights = plan(layers_of("albert"), TiedRows())
    assert weights
    assert all(len(weight.ranks) > 1 and not weight.lookups for weight in weights.values())


@pytest.mark.parametrize(
    ("tied", "expected"),
    [
        ("rows", "rank 1 of each pipeline holds it; rank 0 gets the rows of its tokens, at most 192 of 512, 0.0246 MB"),
        ("rows:bits=8", "at most 192 of 512, 0.00654 MB per step, and sends their gradients, 0.00654 MB"),
        ("dense", "ranks 0 and 1 have copies; each sends its gradient of 0.0655 MB per step to the others"),
    ],
)
def test_what_travels_at_most_is_printed(
    tied: str, expected: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """A batch of 6 sequences of 32 tokens, a table of 512 rows of 32 elements."""
    config = make_config(tiny_model("gpt2", n_layer=2), tmp_path, stages=2, tied=tied)
    job = prepare(config, Launch(0, 0, 2))
    [note] = describe_tied(job, job.model.build(torch.float32))
    assert note.startswith("transformer.wte.weight: ")
    assert expected in note


@pytest.mark.parametrize(("how", "share"), [(TiedRows(), 1.0), (TiedRows(bits=8), 0.3)])
def test_bytes_of_a_batch_whose_tokens_are_all_different(how: TiedRows, share: float) -> None:
    """Relative to its activations in fp32, in each direction; 4 micro-batches of 256 tokens, 768 elements."""
    micros, tokens, width = 4, 256, 768
    actions = [Action(op, 0, micro) for op in (Op.F, Op.B) for micro in range(micros)]
    ids = torch.randperm(50257)[: micros * tokens].view(micros, tokens)
    groups = RowGroups.unpack(RowGroups.pack(ids, MicroGroups.of(UseOrder.of(actions, 0), 1)))
    activations = micros * tokens * width * 4
    for codec, parts in ((how.rows, groups.parts), (how.gradients, groups.end_parts)):
        sent = sum(wire_bytes(codec.wire((part.size, width), torch.float32)) for part in parts)
        assert 0 < sent <= share * activations
