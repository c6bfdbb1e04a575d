"""Layouts of AC-SGD, CocktailSGD and OpenChatKit: which file holds which modules of a model, and under which names.

A model is a list of files named by what they hold: "embs", "0", "1", ... for the blocks, "lm_head". Names in a file are
those of the Hugging Face model without the path of the modules. The head is never tied to the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

EMBEDDING = "embs"
HEAD = "lm_head"
WHOLE = ""
"""Name in a file that holds one module alone."""
BLOCK = "block"
"""Any block, in the names of buffers."""


class Buffer(NamedTuple):
    """A tensor that older versions of transformers stored and today's computes."""

    compute: Callable[[PreTrainedModel, int, int], Tensor]
    """Returns it for a block of a model. Its last argument is the number of positions."""
    is_checked: bool = True
    """Whether another value means that the model was trained with another attention."""


@dataclass(frozen=True)
class LegacyLayout:
    """Files of the models of one type."""

    task: str
    """Name of the model's class, of those in acsgd.model_classes."""
    blocks: str
    """Module path of the list of blocks; the file of a block holds it as a whole."""
    files: Mapping[str, Mapping[str, str]]
    """Module paths by file and by name in the file, for modules that not all configs have, too."""
    buffers: Mapping[str, Buffer] = field(default_factory=dict)
    """Buffers by file and name in it: "block.attn.bias"."""
    new_head: str | None = None
    """File of a head that the replaced systems initialized and never saved; read and written if there is one."""

    def names(self, model: PreTrainedModel) -> dict[str, dict[str, str]]:
        """Return by file, first to last, the names in it and those in the model. `model` has no tied parameters."""
        files: dict[str, dict[str, str]] = {}
        for key, _ in model.named_parameters():
            if (place := self._place(key)) is not None:
                file, name = place
                files.setdefault(file, {})[name] = key
        return {file: files[file] for file in sorted(files, key=_position)}

    def _place(self, key: str) -> tuple[str, str] | None:
        """Return the file of a parameter and its name there."""
        if key.startswith(f"{self.blocks}."):
            index, _, name = key.removeprefix(f"{self.blocks}.").partition(".")
            return index, name
        for file, modules in self.files.items():
            for name, path in modules.items():
                if key.startswith(f"{path}."):
                    return file, f"{name}{key.removeprefix(path)}".removeprefix(".")
        return None


def _position(file: str) -> float:
    """Return the position of a file in the model: embedding, blocks, others."""
    return -1 if file == EMBEDDING else int(file) if file.isdecimal() else math.inf


def _causal_mask(model: PreTrainedModel, block: int, positions: int) -> Tensor:
    return torch.ones(positions, positions, dtype=torch.bool).tril()[None, None]


def _gpt_neo_mask(model: PreTrainedModel, block: int, positions: int) -> Tensor:
    mask = _causal_mask(model, block, positions)
    is_local = model.config.attention_layers[block] == "local"
    return mask & ~mask.tril(-model.config.window_size) if is_local else mask


def _lowest(model: PreTrainedModel, block: int, positions: int) -> Tensor:
    return torch.tensor(-1e9)


def _position_ids(model: PreTrainedModel, block: int, positions: int) -> Tensor:
    return torch.arange(positions)[None]


def _rotary(path: str) -> Buffer:
    return Buffer(lambda model, block, positions: model.get_buffer(f"{path}.inv_freq"))


def _in(path: str, *modules: str) -> dict[str, str]:
    return {name: f"{path}.{name}" for name in modules}


def _mask_of(
    attention: str, compute: Callable[[PreTrainedModel, int, int], Tensor] = _causal_mask
) -> dict[str, Buffer]:
    return {
        f"{BLOCK}.{attention}.bias": Buffer(compute),
        f"{BLOCK}.{attention}.masked_bias": Buffer(_lowest, is_checked=False),
    }


LAYOUTS: Mapping[str, LegacyLayout] = {
    "gpt2": LegacyLayout(
        "lm",
        "transformer.h",
        {EMBEDDING: _in("transformer", "wte", "wpe"), HEAD: _in("transformer", "ln_f") | {"lm_head": "lm_head"}},
        _mask_of("attn"),
    ),
    "gpt_neo": LegacyLayout(
        "lm",
        "transformer.h",
        {EMBEDDING: _in("transformer", "wte", "wpe"), HEAD: _in("transformer", "ln_f") | {"lm_head": "lm_head"}},
        _mask_of("attn.attention", _gpt_neo_mask),
    ),
    "gptj": LegacyLayout(
        "lm",
        "transformer.h",
        {EMBEDDING: _in("transformer", "wte"), HEAD: _in("transformer", "ln_f") | {"lm_head": "lm_head"}},
        _mask_of("attn"),
    ),
    "gpt_neox": LegacyLayout(
        "lm",
        "gpt_neox.layers",
        {EMBEDDING: _in("gpt_neox", "embed_in"), HEAD: _in("gpt_neox", "final_layer_norm") | {"embed_out": "lm_head"}},
        _mask_of("attention") | {f"{BLOCK}.attention.rotary_emb.inv_freq": _rotary("gpt_neox.rotary_emb")},
    ),
    "opt": LegacyLayout(
        "lm",
        "model.decoder.layers",
        {
            EMBEDDING: _in("model.decoder", "embed_tokens", "embed_positions", "project_in"),
            HEAD: _in("model.decoder", "final_layer_norm", "project_out") | {"lm_head": "lm_head"},
        },
    ),
    "llama": LegacyLayout(
        "lm",
        "model.layers",
        {EMBEDDING: _in("model", "embed_tokens"), HEAD: _in("model", "norm") | {"lm_head": "lm_head"}},
        {f"{BLOCK}.self_attn.rotary_emb.inv_freq": _rotary("model.rotary_emb")},
    ),
    "deberta-v2": LegacyLayout(
        "classification",
        "deberta.encoder.layer",
        {
            EMBEDDING: {WHOLE: "deberta.embeddings"},
            "rel_embs": {WHOLE: "deberta.encoder.rel_embeddings"},
            "ln": {WHOLE: "deberta.encoder.LayerNorm"},
            "conv": {WHOLE: "deberta.encoder.conv"},
            "cls_head": {"pooler": "pooler", "classifier": "classifier"},
        },
        {f"{EMBEDDING}.position_ids": Buffer(_position_ids)},
        new_head="cls_head",
    ),
}
"""Layouts by model type."""
