"""Models as lists of layers. To add a family, write its file and add it to FAMILIES; the tests run over this table."""

from __future__ import annotations

from acsgd.config.spec import suggest
from acsgd.shards.gpt2 import GPT2
from acsgd.shards.layers import ModelFamily
from acsgd.shards.llama import Llama

FAMILIES: dict[str, ModelFamily] = {
    # key: `model_type` of the Hugging Face config
    "gpt2": GPT2(),
    "llama": Llama(),
    "mistral": Llama(),
    "qwen2": Llama(),
}


def family_of(model_type: str) -> ModelFamily:
    """Return the family of a Hugging Face `model_type`. Raises ValueError that lists the known families."""
    if model_type not in FAMILIES:
        raise ValueError(f'the model is of the unknown family "{model_type}"{suggest(model_type, FAMILIES)}')
    return FAMILIES[model_type]
