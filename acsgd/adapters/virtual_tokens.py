"""Prompt tuning and prefix tuning: trained embeddings, or keys and values, of virtual tokens before each sequence."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from acsgd.config.adapters import NAME, PrefixTuning, PromptTuning
from acsgd.streams import mix_seed


class PromptedEmbedding(nn.Module):
    """An embedding of tokens whose first outputs of each sequence are trained parameters.

    base_layer: the embedding; count: number of virtual tokens. New parameters are on the meta device.
    """

    def __init__(self, base_layer: nn.Module, count: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        width: Any = base_layer.embedding_dim
        self.prompt = nn.ModuleDict({NAME: nn.Embedding(count, width, device="meta")})

    @property
    def weight(self) -> Tensor:
        """Table of the embedding."""
        table: Tensor = self.base_layer.weight  # type: ignore[assignment]
        return table

    @property
    def virtual(self) -> Tensor:
        """Embeddings of virtual tokens, [n, D]."""
        embeddings: Tensor = self.prompt[NAME].weight  # type: ignore[assignment]
        return embeddings

    def forward(self, ids: Tensor) -> Tensor:
        """Return embeddings [B, T, D]; the first n of `ids` [B, T] are placeholders."""
        embedded: Tensor = self.base_layer(ids)
        virtual = self.virtual.to(embedded.dtype)
        return torch.cat([virtual.expand(len(ids), -1, -1), embedded[:, len(virtual) :]], dim=1)


def prompt_config(
    adapter: PromptTuning, config: PreTrainedConfig, width: int | None = None, tokenizer: Path | None = None
) -> Any:
    """Return PEFT's config of prompt tuning.

    config: of the model; width: of embeddings; tokenizer: directory, for init=text.
    """
    from peft import PromptTuningConfig

    is_text = adapter.init == "text" and tokenizer is not None
    return PromptTuningConfig(
        task_type="SEQ_2_SEQ_LM" if config.is_encoder_decoder else "CAUSAL_LM",
        num_virtual_tokens=adapter.tokens,
        token_dim=width,  # type: ignore[arg-type]
        num_transformer_submodules=1,  # also of an encoder-decoder: the inputs of its encoder
        prompt_tuning_init="TEXT" if is_text else "RANDOM",
        prompt_tuning_init_text=adapter.text if is_text else None,
        tokenizer_name_or_path=str(tokenizer) if is_text else None,
    )


def inject_prompt(model: PreTrainedModel, adapter: PromptTuning) -> None:
    """Replace the embedding of a model, or of its encoder, by one with virtual tokens, in place.

    Raises ValueError for an encoder that multiplies embeddings by a factor, unless its input is embeddings, as in PEFT.
    """
    owner = model.get_encoder() if model.config.is_encoder_decoder else model
    embedding = owner.get_input_embeddings()
    scale = getattr(owner, "embed_scale", 1.0)
    if scale != 1.0 and not hasattr(embedding, "embed_scale"):
        raise ValueError(
            f"adapter.spec: {type(model).__name__} multiplies its embeddings by {scale:g}, but not those that PEFT "
            "gives it, so that prompt_tuning would train another model than PEFT loads; use lora"
        )
    path = next(path for path, module in model.named_modules() if module is embedding)
    assert isinstance(embedding, nn.Module)
    model.set_submodule(path, PromptedEmbedding(embedding, adapter.tokens))


def draw_prompt(
    embedding: nn.Module, adapter: PromptTuning, config: PreTrainedConfig, tokenizer: Path, *, seed: int
) -> dict[str, Tensor]:
    """Return initial parameters of a PromptedEmbedding, as PEFT initializes them.

    embedding: with its weights; config: of the model.
    """
    from peft import PromptEmbedding

    width: Any = embedding.embedding_dim
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(mix_seed(seed, adapter.tokens))
        drawn = PromptEmbedding(prompt_config(adapter, config, width, tokenizer), embedding).embedding.weight
    return {f"prompt.{NAME}.weight": drawn.detach()}


CACHE_ARGUMENTS = ("past_key_values", "layer_past")
"""Names of the argument by which attention modules of transformers get a cache of keys and values."""


class PrefixedAttention(nn.Module):
    """An attention whose first keys and values of each sequence are trained parameters.

    base_layer: of transformers, with a cache argument; count: number of virtual tokens; heads, width: number and size
    of the keys per token. New parameters are on the meta device.
    """

    def __init__(self, base_layer: nn.Module, count: int, heads: int, width: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.prefix = nn.ModuleDict({NAME: nn.Embedding(count, 2 * heads * width, device="meta")})
        self._shape = (count, 2, heads, width)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the attention, such as a module with parameters, if this module does not have it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_layer"), name)

    @property
    def virtual(self) -> Tensor:
        """Keys, then values of virtual tokens, [n, 2 * heads * width], as PEFT orders those of one layer."""
        embeddings: Tensor = self.prefix[NAME].weight  # type: ignore[assignment]
        return embeddings

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(self.base_layer.forward).bind_partial(*args, **kwargs)
        argument = _cache_argument(self.base_layer)
        assert argument is not None
        call.arguments[argument] = _Prefix(self.virtual.view(self._shape))
        return self.base_layer(*call.args, **call.kwargs)


class _Prefix:
    """In place of a cache of an attention: replaces its first keys and values. tensors: [n, 2, heads, width]."""

    def __init__(self, tensors: Tensor) -> None:
        self._keys, self._values = tensors.permute(1, 2, 0, 3)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values, [B, heads, T, width], those of the first n tokens replaced."""
        return _replace_first(keys, self._keys), _replace_first(values, self._values)


def _replace_first(x: Tensor, first: Tensor) -> Tensor:
    """Return x [B, heads, T, width] with `first` [heads, n, width] in place of its first n tokens."""
    if (x.shape[1], x.shape[3]) != (first.shape[0], first.shape[2]):
        raise ValueError(
            f"adapter.spec: an attention has keys or values of {x.shape[1]} x {x.shape[3]} per token, and the prefix "
            f"tuning of PEFT gives it {first.shape[0]} x {first.shape[2]}; use lora or prompt_tuning"
        )
    return torch.cat([first.to(x.dtype).expand(len(x), -1, -1, -1), x[:, :, first.shape[1] :]], dim=2)


def prefix_config(adapter: PrefixTuning, config: PreTrainedConfig) -> Any:
    """Return PEFT's config of prefix tuning. config: of the model."""
    from peft import PrefixTuningConfig

    heads, width = _key_shape(config)
    return PrefixTuningConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=adapter.tokens,
        num_layers=config.num_hidden_layers,
        token_dim=heads * width,
        num_attention_heads=heads,
        num_transformer_submodules=1,
    )


def inject_prefix(model: PreTrainedModel, adapter: PrefixTuning) -> None:
    """Replace the attention of each block by one with virtual tokens, in place.

    Raises ValueError if blocks have none with a cache.
    """
    paths = _attention_paths(model)
    if len(paths) != model.config.num_hidden_layers:
        raise ValueError(
            f"adapter.spec: prefix_tuning needs one attention with a cache per block; {type(model).__name__} has "
            f"{len(paths)} in {model.config.num_hidden_layers} blocks; use lora or prompt_tuning"
        )
    for path in paths:
        model.set_submodule(
            path, PrefixedAttention(model.get_submodule(path), adapter.tokens, *_key_shape(model.config))
        )


def draw_prefix(adapter: PrefixTuning, config: PreTrainedConfig, *, seed: int) -> dict[str, Tensor]:
    """Return initial parameters of a PrefixedAttention, from the standard normal distribution as in PEFT."""
    heads, width = _key_shape(config)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return {f"prefix.{NAME}.weight": torch.randn(adapter.tokens, 2 * heads * width)}


def _key_shape(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the number of keys per token, and their size, as PEFT finds them."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, width


def _attention_paths(model: PreTrainedModel) -> list[str]:
    """Return the paths of the attention modules: those with an index in the cache, the innermost if they are nested."""
    found = [path for path, module in model.named_modules() if hasattr(module, "layer_idx") and _cache_argument(module)]
    return [path for path in found if not any(other.startswith(f"{path}.") for other in found)]


def _cache_argument(module: nn.Module) -> str | None:
    """Return the name of the argument by which a module gets a cache; None if it has none."""
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)
