"""Laws of tasks: losses are torch's, and the buffers of a model in 16 bits are those that from_pretrained computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lib.model_types import VOCABULARY, small_config
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, logging

from acsgd.layers.description import LayersError
from acsgd.model_classes import IGNORED, MODEL_CLASSES

LM = MODEL_CLASSES["lm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["gptj", "llama", "gpt_neox"])
def test_buffers_are_those_of_from_pretrained(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Rotary tables of GPT-J that are computed in 16 bits differ."""
    config = small_config(model_type)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    theirs = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).named_buffers())
    ours = dict(LM.build_in(config, dtype).named_buffers())
    assert ours.keys() == theirs.keys()
    for name, buffer in ours.items():
        assert buffer.dtype == theirs[name].dtype, name
        assert torch.equal(buffer, theirs[name]), name


def test_a_model_is_built_without_the_advice_of_transformers(caplog: pytest.LogCaptureFixture) -> None:
    """It gives some for a BERT that attends to later tokens; an error says the same."""
    size = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
    config = AutoConfig.for_model("bert", vocab_size=VOCABULARY, **size)
    logging.set_verbosity_warning()  # the command of another test may have changed it
    with pytest.raises(LayersError, match='set "is_decoder": true'):
        LM.verify(config, LM.layers(config))
    assert not caplog.messages
    AutoModelForCausalLM.from_config(config)
    assert "is_decoder" in caplog.messages[0]


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_loss_of_tokens_is_summed_over_those_that_are_not_ignored(label_smoothing: float) -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    labels = torch.tensor([[0, 1, IGNORED, 3, 4], [IGNORED, 6, 5, 4, IGNORED]])
    one_by_one = [
        functional.cross_entropy(logits[row, column].float(), label, label_smoothing=label_smoothing)
        for row, of_row in enumerate(labels)
        for column, label in enumerate(of_row)
        if label != IGNORED
    ]
    loss = LM.loss(logits, labels, label_smoothing)
    torch.testing.assert_close(loss, torch.stack(one_by_one).sum())


def test_the_losses_of_examples_are_summed() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0], [0.5, 0.0, -1.0]])
    classes = MODEL_CLASSES["classification"].loss(logits, torch.tensor([2, 0]), 0.0)
    log_softmax = logits.log_softmax(-1)
    torch.testing.assert_close(classes, -(log_softmax[0, 2] + log_softmax[1, 0]))
    numbers = MODEL_CLASSES["regression"].loss(torch.tensor([[1.0], [3.0]]), torch.tensor([0.5, -1.0]), 0.0)
    assert numbers.item() == 0.5**2 + 4.0**2
