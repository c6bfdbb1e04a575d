"""Frozen linear layers of blocks in 4 or 8 bits, by bitsandbytes (QLoRA: Dettmers et al. 2023, arXiv:2305.14314)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from acsgd.errors import RunError
from acsgd.layers.skeleton import parameter_names, weights_on_meta

QuantizedFormat = Literal["nf4", "int8"]
LARGEST_ERROR = {"nf4": 0.16, "int8": 0.006}
"""Largest error of a quantized weight, as a fraction of the largest magnitude in its block or row: half the largest
distance of two levels of NF4, 0.3038 / 2, or of 127 levels, and the rounding of fp16 and of scales."""
BLOCK = 64
"""Weights that have a scale in common in nf4."""
LEVELS_BYTES = 64
"""The 16 levels of nf4, which each weight has in fp32."""


def quantize_layers(
    model: PreTrainedModel, blocks: Collection[str], quantization: QuantizedFormat, trained: Collection[str]
) -> None:
    """Replace the linear layers of blocks by those of bitsandbytes, in place, their parameters on the meta device.

    trained: ends of the paths of modules that are trained as a whole. These stay as they are, as do tied layers and
    those that the model keeps in fp32. Raises ValueError if there are no other linear layers.
    """
    tied = {name for names in parameter_names(model).values() if len(names) > 1 for name in names}
    kept = (*trained, *(model._keep_in_fp32_modules or ()))  # code of T5 reads the dtype of such a weight
    found = [
        (path, module)
        for path, module in model.named_modules()
        if type(module) is nn.Linear
        and any(path.startswith(f"{block}.") for block in blocks)
        and f"{path}.weight" not in tied
        and not any(path == name or path.endswith(f".{name}") for name in kept)
    ]
    if not found:
        raise ValueError(
            f"model.quantize={quantization}: the blocks of {type(model).__name__} have no torch.nn.Linear that is "
            "frozen and not tied; use a model with linear layers, such as a Llama, or remove model.quantize"
        )
    for path, module in found:
        model.set_submodule(path, _quantized_layer(module, quantization))
    setattr(model, "is_loaded_in_4bit" if quantization == "nf4" else "is_loaded_in_8bit", True)  # PEFT reads it


def _quantized_layer(linear: nn.Linear, quantization: QuantizedFormat) -> nn.Module:
    """Return the layer of bitsandbytes in place of a linear layer, its weight on the meta device."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    layer: Any
    sizes, has_bias = (linear.in_features, linear.out_features), linear.bias is not None
    with weights_on_meta():
        if quantization == "nf4":
            layer = Linear4bit(*sizes, bias=has_bias)
            # else an evaluation on a CPU with AVX512-BF16 repacks the weight for products in bf16, also in training
            layer.support_avx512bf16_for_cpu = False
        else:
            layer = Linear8bitLt(*sizes, bias=has_bias, has_fp16_weights=False)
    kind: Any = type(layer.weight)
    layer.weight = kind(linear.weight.detach(), requires_grad=False, **_options(quantization))
    layer.bias = linear.bias
    return layer


def is_quantized(param: Tensor) -> bool:
    """Whether a parameter, which may be on the meta device, is that of a quantized layer."""
    return type(param).__name__ in ("Params4bit", "Int8Params")


def quantized_bytes(meta: Tensor) -> int:
    """Return the memory of a quantized parameter, with its scales. meta: on the meta device, [rows, columns]."""
    if type(meta).__name__ == "Params4bit":
        return -(-meta.numel() // 2) + 4 * -(-meta.numel() // BLOCK) + LEVELS_BYTES
    return meta.numel() + 4 * meta.shape[0]


def least_bytes(parameters: int, quantization: QuantizedFormat) -> int:
    """Return a lower bound of the memory of a number of parameters, any of which may be quantized."""
    return parameters // 2 if quantization == "nf4" else parameters


def quantize(meta: Tensor, tensor: Tensor, key: str, *, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """Return the quantized parameter of a layer of `quantize_layers`, in a new tensor.

    meta: the parameter on the meta device; dtype: of the run, to which the tensor is rounded first. Raises RunError if
    bitsandbytes does not restore the weight, as its CPU kernels do not of rows that are no multiple of its blocks.
    """
    quantization: QuantizedFormat = "nf4" if type(meta).__name__ == "Params4bit" else "int8"
    kind: Any = type(meta)
    rounded = tensor.to(dtype)
    param: nn.Parameter = kind(rounded, requires_grad=False, **_options(quantization)).to(device)
    restored, weight = dequantize(param).float().cpu(), rounded.float()
    blocks = weight.reshape(-1, BLOCK) if weight.numel() % BLOCK == 0 and quantization == "nf4" else weight
    largest = blocks.abs().amax(dim=-1, keepdim=True).expand_as(blocks).reshape(weight.shape)
    if not bool(((restored - weight).abs() <= LARGEST_ERROR[quantization] * largest + 1e-6).all()):
        raise RunError(
            f"model.quantize={quantization}: the installed bitsandbytes does not restore {key} {tuple(weight.shape)} "
            f"on {device.type}; use a GPU, a model whose layers have multiples of {BLOCK} inputs, or remove "
            "model.quantize"
        )
    return param


def dequantize(param: Any) -> Tensor:
    """Return the values of a quantized parameter."""
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant

    if type(param).__name__ == "Params4bit":
        values: Tensor = dequantize_4bit(param.data, param.quant_state)
        return values
    restored: Tensor = int8_vectorwise_dequant(param.CB, param.SCB)
    return restored


def _options(quantization: QuantizedFormat) -> dict[str, Any]:
    return {"quant_type": "nf4", "compress_statistics": False} if quantization == "nf4" else {"has_fp16_weights": False}
