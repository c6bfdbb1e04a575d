"""Check of a config: a small model with its flags, divided into layers, is compared with the whole small model."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from acsgd.layers.compare import ComparedStages, InputTensors, compare
from acsgd.layers.derive import derive
from acsgd.layers.description import LayersError, LayerSpec, ModelLayers, Verification
from acsgd.layers.masks import DOCUMENTS, NO_PREFIX, PREFIXES
from acsgd.layers.padding import APART, ignores_padding
from acsgd.layers.skeleton import parameter_names, set_tied_parameter
from acsgd.layers.small_config import WINDOW, small_configs

MAX_PARAMETERS = (2**25, 2**27)
"""Bounds for the parameters of the small model, 128 and 512 MiB in fp32. Widths are reduced until it is within the
first; if that is impossible, within the second."""
ROWS, LENGTH, DOCUMENT = 2, 3 * WINDOW, WINDOW + 2
"""Sizes of the batches: number of sequences, their length, and the length of a first document where packed."""

PACKED = "packed"
"""Name of the batch with several documents per sequence."""
PREFIXED = "prefixed"
"""Name of the batch whose sequences begin with a prefix with attention in both directions."""

Build = Callable[[PreTrainedConfig], PreTrainedModel]
"""Returns a new model in training mode, built within `weights_on_meta`."""

InputSizes = Mapping[str, Sequence[str]]
"""Integer inputs of forward by name, as in `derive`."""


def verify(
    build: Build,
    config: PreTrainedConfig,
    inputs: InputSizes,
    layers: ModelLayers,
    *,
    predicted: str | None,
    bounds: Sequence[int] = MAX_PARAMETERS,
    every_cut: bool = False,
) -> Verification:
    """Compare a small model with the flags of `config`, run layer by layer, with the same model run as a whole.

    layers: derived from `config`; predicted: input whose next token the logits predict; every_cut: compare every
    division into two stages, not one. Raises LayersError that names the batch, the tensor and the difference; or if the
    logits depend on the tokens to predict; or if there is no small model.
    """
    stages = small_stages(build, config, inputs, layers, bounds)
    batches = make_batches(stages.whole, inputs)
    if predicted is not None:
        _check_causal(stages, batches["plain"], predicted)
    if predicted is not None and len(inputs) == 1:
        packed = pack(batches["plain"])
        if keeps_apart(stages, packed):
            batches[PACKED] = packed
        prefixed = add_prefixes(batches["plain"])
        if looks_ahead_in_prefixes(stages, prefixed):
            batches[PREFIXED] = prefixed
    count = len(stages.layers.layers)
    cuts = range(1, count) if every_cut else (count // 2,)
    splits = [range(count), *((0, cut) for cut in cuts)]
    differences = {name: compare(stages, batch, splits, f"a {name} batch") for name, batch in batches.items()}
    return Verification(
        batches=tuple(differences),
        difference=max(differences.values()),
        blocks=len(stages.layers.blocks),
        parameters=stages.whole.num_parameters(),
        version=transformers.__version__,
        ignores_padding=ignores_padding(stages, batches["plain"], inputs, predicted),
    )


def small_stages(
    build: Build,
    config: PreTrainedConfig,
    inputs: InputSizes,
    layers: ModelLayers,
    bounds: Sequence[int] = MAX_PARAMETERS,
) -> ComparedStages:
    """Return a small model that has every kind of layer of the model, with the first number of parameters possible.

    Arguments: see `verify`. Raises LayersError if there is none.
    """
    kinds = {_kind(layer) for layer in layers.layers}
    configs = list(small_configs(config, build(config)))
    reason = f"each has more than {max(bounds):,} parameters"
    for bound, small in itertools.product(bounds, configs):
        try:
            skeleton = build(small)
            if skeleton.num_parameters() > bound:
                continue
            with _without_log():
                small_layers = derive(lambda: build(small), inputs)  # noqa: B023  called at once
            if {_kind(layer) for layer in small_layers.layers} != kinds:
                reason = "it has other kinds of layers"
                continue
            stages = ComparedStages(fill_with_random(build(small)), skeleton, small_layers)
            with torch.no_grad():
                stages.run_whole(make_batches(stages.whole, inputs)["plain"])
        except Exception as error:  # raised in transformers' code, by sizes that do not go together
            reason = " ".join(f"{error}".split())
            continue
        return stages
    raise LayersError(f"{type(config).__name__}: no small model to compare could be built: {reason}")


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """Context in which torch logs no operation that fails on fake tensors; the exception says the same."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


def _kind(layer: LayerSpec) -> Hashable:
    """Return what tells layers apart, besides parameters."""
    replicated = frozenset((name, how.kind) for name, how in layer.replicated.items())
    return frozenset(layer.inputs), replicated, frozenset(layer.origins.items()), layer.outputs, layer.returns


def _check_causal(stages: ComparedStages, batch: InputTensors, predicted: str) -> None:
    """Raise LayersError if the logits of a token depend on later tokens of the input that is predicted."""
    changed = batch[predicted].clone()
    changed[:, -1] = changed[:, 0]
    with torch.no_grad():
        before = stages.run_whole(batch)
        after = stages.run_whole(batch | {predicted: changed})
    if not torch.allclose(before[:, :-1], after[:, :-1], rtol=APART, atol=APART):
        model = stages.whole
        is_encoder = getattr(model.config, "is_decoder", None) is False
        remedy = 'set "is_decoder": true in config.json' if is_encoder else "train it for another task"
        raise LayersError(
            f"{type(model).__name__} attends to later tokens, so it cannot learn to predict the next; {remedy}"
        )


def pack(batch: InputTensors) -> InputTensors:
    """Return the batch with two documents per sequence, the first longer by one token in each further sequence."""
    ids = next(iter(batch.values()))
    lengths = DOCUMENT + torch.arange(len(ids))[:, None]
    return batch | {DOCUMENTS: (torch.arange(ids.shape[1]) >= lengths).long()}


def keeps_apart(stages: ComparedStages, packed: InputTensors) -> bool:
    """Whether the logits of documents are those of each document alone."""
    (name,) = packed.keys() - {DOCUMENTS}
    with torch.no_grad():
        together = stages.run_whole(packed)
        for row, documents in enumerate(packed[DOCUMENTS]):
            for document in documents.unique():
                within = documents == document
                alone = stages.run_whole({name: packed[name][row : row + 1, within]})
                if not torch.allclose(together[row : row + 1, within], alone, rtol=APART, atol=APART):
                    return False
    return True


def add_prefixes(batch: InputTensors) -> InputTensors:
    """Return the batch with a prefix per sequence, longer by one token in each further sequence."""
    ids = next(iter(batch.values()))
    lengths = DOCUMENT + torch.arange(len(ids))[:, None]
    return batch | {PREFIXES: (torch.arange(ids.shape[1]) >= lengths).long() * NO_PREFIX}


def looks_ahead_in_prefixes(stages: ComparedStages, prefixed: InputTensors) -> bool:
    """Whether each token of a prefix depends on the last two of the prefix, and no token on later ones outside it."""
    (name,) = prefixed.keys() - {PREFIXES}
    is_prefix = prefixed[PREFIXES] != NO_PREFIX
    ids, places = prefixed[name], torch.arange(is_prefix.shape[1])
    stop = is_prefix.sum(1, keepdim=True)
    in_prefix, after = ((places >= first) & (places < first + 2) for first in (stop - 2, stop + 2))
    with torch.no_grad():
        logits = stages.run_whole(prefixed)
        others = (stages.run_whole(prefixed | {name: torch.where(x, ids.roll(1, 1), ids)}) for x in (in_prefix, after))
        seen_in_prefix, seen_after = ((other - logits).abs().amax(-1) > APART for other in others)
    return bool(seen_in_prefix[is_prefix].all()) and not bool(seen_after[places < stop + 2].any())


def fill_with_random(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the parameters and add noise to the stored buffers, in place."""
    generator = torch.Generator().manual_seed(0)
    names = parameter_names(model)
    for name, param in list(model.named_parameters()):
        value = torch.randn(param.shape, generator=generator, dtype=param.dtype)
        if param.dim() >= 2:
            value *= param.shape[-1] ** -0.5
        else:
            value = 0.1 * value + ("bias" not in name)
        new = nn.Parameter(value, requires_grad=param.requires_grad)
        set_tied_parameter(model, names[name], new)
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in stored and buffer.is_floating_point():
            noise = 0.1 * torch.rand(buffer.shape, generator=generator, dtype=buffer.dtype)
            buffer.copy_(buffer * (1 + noise) if buffer.any() else noise)  # the zeros of a mask stay zeros
    return model


def make_batches(model: PreTrainedModel, inputs: InputSizes) -> dict[str, InputTensors]:
    """Return the batches that the model's forward takes, by name. All are longer than the sliding windows."""
    accepted = inspect.signature(model.forward).parameters
    sizes = {"batch": ROWS, "sequence": LENGTH, "target": LENGTH - WINDOW // 2}
    shapes = {name: [sizes[dim] for dim in dims] for name, dims in inputs.items()}
    tokens = {name: _random_ids(model, shape) for name, shape in shapes.items() if name.endswith("input_ids")}
    masks = {name: torch.ones(shape, dtype=torch.long) for name, shape in shapes.items() if name not in tokens}
    found = {"plain": tokens | masks}
    mask_names = {name: name.replace("input_ids", "attention_mask") for name in tokens}
    if accepted.keys() >= {*mask_names.values()}:
        padded = [pair for name, ids in tokens.items() for pair in _padded(model, name, mask_names[name], ids)]
        found["padded"] = tokens | masks | dict(padded)
    return found


def _random_ids(model: PreTrainedModel, shape: Sequence[int]) -> Tensor:
    """Return tokens with one end of sequence per row, which classifiers look for, and no other special token."""
    config = model.config.get_text_config()
    special = {value for key, value in vars(config).items() if key.endswith("_token_id") and isinstance(value, int)}
    ordinary = torch.tensor([token for token in range(config.vocab_size) if token not in special])
    ids = ordinary[torch.randint(len(ordinary), tuple(shape), generator=torch.Generator().manual_seed(1))]
    if isinstance(end := getattr(config, "eos_token_id", None), int):
        ids[:, shape[1] // 2] = end
    return ids


def _padded(model: PreTrainedModel, name: str, mask_name: str, ids: Tensor) -> list[tuple[str, Tensor]]:
    """Return ids of which the last row ends early, and their mask, with the names of both."""
    mask = torch.ones_like(ids)
    mask[-1, -(ids.shape[1] // 4) :] = 0
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    return [(name, ids.masked_fill(mask == 0, padding or 0)), (mask_name, mask)]
