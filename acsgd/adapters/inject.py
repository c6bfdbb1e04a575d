"""Put the layers of an adapter into a model, by PEFT, and describe the model with them."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from acsgd.adapters.virtual_tokens import (
    PrefixedAttention,
    PromptedEmbedding,
    inject_prefix,
    inject_prompt,
    prefix_config,
    prompt_config,
)
from acsgd.config.adapters import (
    ALL_LINEAR,
    IA3,
    NAME,
    Adapter,
    LoRA,
    PrefixTuning,
    PromptTuning,
    VirtualTokens,
    names_in,
)
from acsgd.layers.description import LayerSpec, ModelLayers
from acsgd.layers.quantize import QuantizedFormat, quantize_layers
from acsgd.layers.skeleton import parameter_names, set_parameter
from acsgd.model_classes import MODEL_CLASSES, ModelClass


def peft_config(adapter: Adapter, model: PreTrainedModel, task: str) -> Any:
    """Return PEFT's config of an adapter for a model. Raises ValueError if PEFT is not installed."""
    try:
        from peft import LoraConfig
    except ImportError:
        raise ValueError('adapter.spec needs PEFT, which is not installed; pip install "acsgd[adapters]"') from None
    if isinstance(adapter, PromptTuning):
        return prompt_config(adapter, model.config)
    if isinstance(adapter, PrefixTuning):
        return prefix_config(adapter, model.config)
    if isinstance(adapter, IA3):
        return _ia3_config(adapter, model, task)
    targets = names_in(adapter.targets)
    return LoraConfig(
        task_type=MODEL_CLASSES[task].peft_type,
        r=adapter.r,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]  # PEFT divides it
        lora_dropout=adapter.dropout,
        target_modules=targets[0] if targets == [ALL_LINEAR] else targets,
        exclude_modules=_trained_wholly_pattern(adapter, model, task),
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
    )


def _ia3_config(adapter: IA3, model: PreTrainedModel, task: str) -> Any:
    """Return PEFT's config of IA3.

    Raises ValueError if neither PEFT nor the adapter names targets for the model, or if `feedforward` has other names.
    """
    from peft import IA3Config
    from peft.utils.constants import (
        TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING,
        TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING,
    )

    kind, targets, feedforward = model.config.model_type, names_in(adapter.targets), names_in(adapter.feedforward)
    if not targets:
        if kind not in TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING:
            raise ValueError(
                f"adapter.spec: PEFT knows no targets of ia3 for {kind}; give some; {_linear_layers(model)}"
            )
        targets = TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING[kind]
        feedforward = feedforward or TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING[kind]
    if others := [name for name in feedforward if name not in targets]:
        raise ValueError(
            f"adapter.spec: feedforward={'+'.join(others)} is not among the targets, {'+'.join(targets)}; "
            "add it to targets"
        )
    return IA3Config(
        task_type=MODEL_CLASSES[task].peft_type,
        target_modules=list(targets),
        feedforward_modules=list(feedforward),
        exclude_modules=_trained_wholly_pattern(adapter, model, task),
    )


def _trained_wholly_pattern(adapter: LoRA | IA3, model: PreTrainedModel, task: str) -> str | None:
    """Return a pattern of the modules that are trained as a whole, and so not adapted, as PEFT does it."""
    names = *names_in(adapter.modules_to_save), *new_heads(model, task)
    return "|".join(rf"(.*\.)?{re.escape(name)}(\..*)?" for name in names) or None


def new_heads(model: PreTrainedModel, task: str) -> list[str]:
    """Return the modules outside of the base model that labels need. They are new, and so trained as a whole."""
    if not MODEL_CLASSES[task].has_new_head:
        return []
    children = ((name, module) for name, module in model.named_children() if name != model.base_model_prefix)
    return [name for name, module in children if next(module.parameters(), None) is not None]


def inject(model: PreTrainedModel, adapter: Adapter, task: str) -> None:
    """Replace the adapted modules of a model by PEFT's layers around them, in place.

    Their parameters are on the meta device. Raises ValueError if no module is adapted.
    """
    config = peft_config(adapter, model, task)
    from peft import inject_adapter_in_model

    if isinstance(adapter, PromptTuning):
        inject_prompt(model, adapter)
        return
    if isinstance(adapter, PrefixTuning):
        inject_prefix(model, adapter)
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that Conv1D, of GPT-2, is transposed, which PEFT notices itself
            inject_adapter_in_model(config, model, adapter_name=NAME, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ValueError(f"adapter.spec: {str(error).splitlines()[0].rstrip('.')}; {_linear_layers(model)}") from None


def take_virtual_tokens(model: PreTrainedModel) -> list[Tensor]:
    """Undo `inject` of virtual tokens, and return their parameters, [n, ...] each, first layer first."""
    kinds = (PromptedEmbedding, PrefixedAttention)
    around = {path: module for path, module in model.named_modules() if isinstance(module, kinds)}
    for path, module in around.items():
        model.set_submodule(path, module.base_layer)
    return [module.virtual for module in around.values()]


def virtual_tokens_in_peft(
    adapter: VirtualTokens, config: PreTrainedConfig, parameters: Sequence[Tensor]
) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of an adapter directory of PEFT, and PEFT's config. parameters: of `take_virtual_tokens`."""
    embeddings = torch.cat(tuple(parameters), dim=1)
    if isinstance(adapter, PrefixTuning):
        return {"prompt_embeddings": embeddings}, prefix_config(adapter, config)
    return {"prompt_embeddings": embeddings}, prompt_config(adapter, config, embeddings.shape[1])


def inject_into(module: nn.Module, config: Any, path: str) -> Any:
    """Return PEFT's layer around one module, with a new adapter. path: in the model; config: of PEFT, is changed."""
    from peft import inject_adapter_in_model

    config.target_modules, config.exclude_modules = ["module"], None
    if isinstance(feedforward := getattr(config, "feedforward_modules", None), set | list):
        config.feedforward_modules = ["module"] if any(_ends_in(path, name) for name in feedforward) else []
    holder = nn.ModuleDict({"module": module})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in `inject`
        inject_adapter_in_model(config, holder, adapter_name=NAME)
    return holder["module"]


def loaded_module(model: PreTrainedModel, path: str, tensor: Callable[[str], Tensor]) -> nn.Module:
    """Return a copy of a module of a model without adapter, its parameters in fp32. tensor: returns one by its name."""
    module = copy.deepcopy(model.get_submodule(path))
    keys = {name: key for key, names in parameter_names(model).items() for name in names}
    for name, _ in list(module.named_parameters()):
        set_parameter(module, name, nn.Parameter(tensor(keys[f"{path}.{name}"]).float(), requires_grad=False))
    return module


def is_of_adapter(key: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return NAME in key.split(".")


def module_of(key: str) -> str:
    """Return the path of the module that a parameter of an adapter belongs to: "h.0.c_attn.lora_A.default.weight"."""
    parts = key.split(".")
    return ".".join(parts[: parts.index(NAME) - 1])


def build_adapted(
    model_class: ModelClass,
    config: PreTrainedConfig,
    adapter: Adapter | None,
    dtype: torch.dtype = torch.float32,
    *,
    blocks: Collection[str] = (),
    quantization: QuantizedFormat | None = None,
) -> PreTrainedModel:
    """Build a model as `ModelClass.build_in` does, with an adapter if one is given. Raises as `inject`.

    quantization: of the frozen linear layers of `blocks`, module paths.
    """
    model = model_class.build_in(config, dtype)
    if adapter is not None:
        if quantization is not None:
            quantize_layers(model, blocks, quantization, names_in(adapter.modules_to_save))
        inject(model, adapter, model_class.name)
    return model


def with_adapter(layers: ModelLayers, model: PreTrainedModel, adapter: Adapter, task: str) -> ModelLayers:
    """Return the layers of a model with an adapter. model: with the adapter injected.

    The layers that use a module also use its adapter. All other parameters are frozen but those of modules that are
    trained as a whole. Raises ValueError if these do not exist, or if a tied parameter is adapted or among them.
    """
    names = parameter_names(model)
    wholly = _trained_wholly(model, adapter, task)
    added: dict[str, list[str]] = {}
    for key in filter(is_of_adapter, names):
        added.setdefault(module_of(key), []).append(key)
    adapted = [key for key, aliases in names.items() if any(_owner(alias) in added for alias in aliases)]
    if isinstance(adapter, VirtualTokens):
        adapted = []  # the table of the embedding and the attentions stay as they are
    for key in (*wholly, *adapted):
        if len(names[key]) > 1:
            other = names[key][1].replace(".base_layer.", ".")
            raise ValueError(
                f"adapter.spec: {key} is tied to {other}, so that an adapter of one would change the other; leave it "
                "out of targets and modules_to_save"
            )

    def extend(layer: LayerSpec) -> LayerSpec:
        if isinstance(adapter, PromptTuning):  # no other layer with the table, such as a head, uses virtual tokens
            more = [key for keys in added.values() for key in keys if layer.index == 0]
        else:
            more = [key for path, keys in added.items() if _is_in(path, layer.parameters) for key in keys]
        random = layer.random or (adapter.dropout > 0 and bool(more))
        return replace(layer, parameters=(*layer.parameters, *more), random=random)

    frozen = [key for key in layers.holders() if key not in layers.frozen and key not in wholly]
    return replace(layers, layers=tuple(map(extend, layers.layers)), frozen=(*layers.frozen, *frozen))


def _owner(name: str) -> str:
    """Return the path of the module that has a parameter, without PEFT's layer around it."""
    return name.rpartition(".")[0].removesuffix(".base_layer")


def _trained_wholly(model: PreTrainedModel, adapter: Adapter, task: str) -> set[str]:
    """Return the parameters of modules that are trained as a whole."""
    keys, found = parameter_names(model), set()
    for name in (*names_in(adapter.modules_to_save), *new_heads(model, task)):
        paths = modules_named(model, name)
        if not paths:
            raise ValueError(f'adapter.spec: modules_to_save="{name}" matches no module; {_linear_layers(model)}')
        own = {key for key, aliases in keys.items() for path in paths if _is_in(path, aliases)}
        found |= {key for key in own if not is_of_adapter(key)}
    return found


def modules_named(model: nn.Module, name: str) -> list[str]:
    """Return the paths of the modules whose paths end in a name, as PEFT matches modules_to_save."""
    return [path for path, _ in model.named_modules() if _ends_in(path, name)]


def _ends_in(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _is_in(path: str, names: Sequence[str]) -> bool:
    """Return whether a module, or one in it, has a parameter of one of these names."""
    return any(name.startswith(f"{path}.") for name in names)


def _linear_layers(model: nn.Module) -> str:
    """List the names of the linear layers of a model, for messages."""
    linear = (path for path, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D))
    leaves = dict.fromkeys(re.sub(r"\.base_layer$", "", path).rpartition(".")[2] for path in linear)
    return f"its linear layers are {', '.join(leaves)}"
