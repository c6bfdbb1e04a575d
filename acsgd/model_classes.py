"""Classes of models, which determine head, inputs and labels: language models, classifiers, encoder-decoders.

Commands that read manifests or data need their names; torch and transformers, which take seconds, are imported to build
a model.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from acsgd.layers.description import ModelLayers, Verification

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

TOKEN_TYPES = "token_type_ids"
"""Input with the type of each token: 0 in the first text of a pair, 1 in the second."""
IGNORED = -100
"""Label of positions without a loss."""
UNTIED = "untied_weights"
"""Field of a config with the names of parameters that the model's class ties, but whose values differ in the files of
the model: T5 1.1 and FLAN-T5 have a head of their own, and transformers ties the head of every T5."""

LogitsLoss: TypeAlias = "Callable[[Tensor, Tensor, float], Tensor]"
"""Function of logits, labels and label smoothing (Szegedy et al. 2015, arXiv:1512.00567, section 7) that returns the
loss summed over the labels, fp32."""


@dataclass(frozen=True)
class ModelClass:
    """A class of models with the same kind of head."""

    name: str
    """Name in manifests."""
    auto_name: str
    """Name of `auto_class`."""
    inputs: Mapping[str, tuple[str, ...]]
    """Integer inputs of forward by name, each with the names of its sizes: "batch", "sequence" or "target". Of a model:
    `inputs_of`."""
    labels: tuple[str, ...]
    """Names of the sizes of the labels; a task may add axes of its own behind them."""
    loss: LogitsLoss
    """Usual loss."""
    peft_type: str
    """Name in PEFT."""
    predicted: str | None = None
    """Input whose next token the logits predict; they must not depend on later tokens."""
    has_new_head: bool = False
    """Whether models are trained with a new head: the files of a pretrained one may lack it, or hold another one."""
    has_one_output: bool = False
    """Whether the head has one output, whatever the config says."""

    @property
    def auto_class(self) -> Any:
        """transformers' class that builds the model with its head."""
        import transformers

        return getattr(transformers, self.auto_name)

    def inputs_of(self, config: PreTrainedConfig) -> Mapping[str, tuple[str, ...]]:
        """Return the inputs that a model takes: TOKEN_TYPES, too, if it has an embedding of them that labels need."""
        has_types = (getattr(config.get_text_config(), "type_vocab_size", 0) or 0) > 1
        if self.labels != ("batch",) or not has_types:
            return self.inputs
        model_class = self.auto_class._model_mapping.get(type(config), None)
        if model_class is None or TOKEN_TYPES not in inspect.signature(model_class.forward).parameters:
            return self.inputs
        return {**self.inputs, TOKEN_TYPES: ("batch", "sequence")}

    def has_sdpa(self, config: PreTrainedConfig) -> bool:
        """Return whether the model can use torch's attention."""
        model_class = self.auto_class._model_mapping.get(type(config), None)
        return bool(getattr(model_class, "_supports_sdpa", True))

    def build(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Build the model, in training mode, with parameters on the meta device, which need no memory."""
        from torch import nn

        from acsgd.layers.skeleton import set_parameter, weights_on_meta

        with weights_on_meta(), _without_advice():
            model: PreTrainedModel = self.auto_class.from_config(config)
        for name in getattr(config, UNTIED, ()):
            set_parameter(model, name, nn.Parameter(model.get_parameter(name).detach()))
        return model.train()

    def build_in(self, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        """Build the model as `build` does, in a dtype; its buffers are computed in fp32, as from_pretrained does.

        Computed in bf16, the rotary tables of GPT-J are wrong.
        """
        import torch

        from acsgd.layers.skeleton import set_buffer

        config = copy.deepcopy(config)
        config.dtype = torch.float32
        exact = self.build(config)
        if dtype == torch.float32:
            return exact
        config.dtype = dtype
        model = self.build(config)
        for name, buffer in exact.named_buffers():
            set_buffer(model, name, buffer.to(model.get_buffer(name).dtype))
        return model

    def layers(self, config: PreTrainedConfig) -> ModelLayers:
        """Derive the layers of the model. Raises LayersError with the reason if it cannot be divided into layers."""
        from acsgd.layers.derive import derive

        return derive(lambda: self.build(config), self.inputs_of(config))

    def verify(self, config: PreTrainedConfig, layers: ModelLayers) -> Verification:
        """Compare a model run layer by layer with the whole model, on a small scale. Raises LayersError if they differ.

        layers: derived from `config`.
        """
        from acsgd.layers.verify import verify

        return verify(self.build, config, self.inputs_of(config), layers, predicted=self.predicted)


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Context in which transformers logs only errors.

    Constructors give advice in every build, on every rank. It is for other uses, or an error of acsgd gives it, too, as
    to add is_decoder=True to a BERT.
    """
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy summed over the labels. logits: [..., C]; labels: [...], classes or IGNORED."""
    from torch.nn import functional

    return functional.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def squared_error(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the squared error summed over the labels. logits: [B, 1]; labels: [B], numbers, or IGNORED.

    Nothing is smoothed.
    """
    errors = logits.squeeze(-1).float() - labels.float()
    return errors.square().masked_fill(labels == IGNORED, 0.0).sum()


_TOKENS = {"input_ids": ("batch", "sequence")}
_TEXT = {**_TOKENS, "attention_mask": ("batch", "sequence")}
_PAIR = {**_TEXT, "decoder_input_ids": ("batch", "target")}

MODEL_CLASSES: Mapping[str, ModelClass] = {
    each.name: each
    for each in (
        ModelClass(
            "lm",
            "AutoModelForCausalLM",
            _TOKENS,
            ("batch", "sequence"),
            cross_entropy,
            peft_type="CAUSAL_LM",
            predicted="input_ids",
        ),
        ModelClass(
            "classification",
            "AutoModelForSequenceClassification",
            _TEXT,
            ("batch",),
            cross_entropy,
            peft_type="SEQ_CLS",
            has_new_head=True,
        ),
        ModelClass(
            "regression",
            "AutoModelForSequenceClassification",
            _TEXT,
            ("batch",),
            squared_error,
            peft_type="SEQ_CLS",
            has_new_head=True,
            has_one_output=True,
        ),
        ModelClass(
            "seq2seq",
            "AutoModelForSeq2SeqLM",
            _PAIR,
            ("batch", "target"),
            cross_entropy,
            peft_type="SEQ_2_SEQ_LM",
            predicted="decoder_input_ids",
        ),
    )
}
"""Classes of models by name."""
