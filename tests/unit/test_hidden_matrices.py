"""Which parameters of a model are hidden matrices: those that Muon orthogonalizes."""

from __future__ import annotations

import pytest
from lib.model_types import small_config

from acsgd.adapters.inject import build_adapted
from acsgd.config.adapters import parse_adapter
from acsgd.model_classes import MODEL_CLASSES
from acsgd.shards.layer_tensors import hidden_matrices

LLAMA = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
LLAMA_MLP = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
T5 = {"SelfAttention.q", "SelfAttention.k", "SelfAttention.v", "SelfAttention.o"}


def ends_of(model_type: str, task: str, spec: str | None = None) -> set[str]:
    """Return the hidden matrices of a model by the end of their names, two modules."""
    config, adapter = small_config(model_type), parse_adapter(spec)
    model = build_adapted(MODEL_CLASSES[task], config, adapter)
    hidden = hidden_matrices(model, MODEL_CLASSES[task].layers(config))
    return {".".join(key.removesuffix(".weight").rsplit(".", 2)[-2:]) for key in hidden}


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [("gpt2", {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}), ("llama", LLAMA | LLAMA_MLP)],
)
def test_they_are_the_matrices_of_blocks(model_type: str, expected: set[str]) -> None:
    assert ends_of(model_type, "lm") == expected


def test_a_table_of_relative_biases_is_none() -> None:
    found = ends_of("t5", "seq2seq")
    assert found > T5
    assert not any("relative" in end or "embed" in end or "shared" in end or "lm_head" in end for end in found)
