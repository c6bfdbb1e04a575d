"""Law: documents of a row do not see each other, also in models without positions, which would tell them apart."""

from __future__ import annotations

import inspect

import pytest
import torch
from lib.model_types import VOCABULARY, small_config
from transformers import AutoModelForCausalLM

from acsgd.layers.masks import DOCUMENTS, masked


@pytest.mark.parametrize("model_type", ["bloom", "llama"])
def test_documents_of_a_row_have_the_logits_of_documents_alone(model_type: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(model_type)).eval()
    assert ("position_ids" in inspect.signature(model.forward).parameters) == (model_type == "llama")
    tokens, first = torch.randint(3, VOCABULARY, (2, 9)), 4
    documents = (torch.arange(9) >= first).long().expand(2, 9)
    with torch.no_grad(), masked(model, {"input_ids": tokens, DOCUMENTS: documents}) as arguments:
        logits = model(**arguments, use_cache=False).logits
    with torch.no_grad():
        alone = [model(each, use_cache=False).logits for each in (tokens[:, :first], tokens[:, first:])]
    assert torch.allclose(logits, torch.cat(alone, dim=1), atol=1e-5)
