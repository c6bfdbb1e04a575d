"""Tasks: what a model is trained for, which determines its head, its inputs and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from acsgd.layers.derive import derive
from acsgd.layers.description import ModelLayers
from acsgd.layers.skeleton import set_parameter, weights_on_meta
from acsgd.layers.verify import Verification, verify

IGNORED = -100
"""Label of positions without a loss."""
UNTIED = "untied_weights"
"""Field of a config with the names of parameters that the model's class ties, but whose values differ in the files of
the model: T5 1.1 and FLAN-T5 have a head of their own, and transformers ties the head of every T5."""


@dataclass(frozen=True)
class Task:
    """What a model is trained for."""

    name: str
    auto_class: Any
    """transformers' class that builds the model with its head."""
    inputs: Mapping[str, tuple[str, ...]]
    """Integer inputs of forward by name, each with the names of its sizes: "batch", "sequence" or "target"."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """Returns the loss summed over the labels, from the logits and the labels."""
    predicted: str | None = None
    """Input whose next token the logits predict; they must not depend on later tokens."""
    has_new_head: bool = False
    """Whether models are trained with a new head: the files of a pretrained one may lack it, or hold another one."""

    def build(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Build the model, in training mode, with parameters on the meta device, which need no memory."""
        with weights_on_meta():
            model: PreTrainedModel = self.auto_class.from_config(config)
        for name in getattr(config, UNTIED, ()):
            set_parameter(model, name, nn.Parameter(model.get_parameter(name).detach()))
        return model.train()

    def layers(self, config: PreTrainedConfig) -> ModelLayers:
        """Derive the layers of the model. Raises LayersError with the reason if it cannot be divided into layers."""
        return derive(lambda: self.build(config), self.inputs)

    def verify(self, config: PreTrainedConfig, layers: ModelLayers) -> Verification:
        """Compare a model run layer by layer with the whole model, on a small scale. Raises LayersError if they differ.

        layers: derived from `config`.
        """
        return verify(self.build, config, self.inputs, layers, predicted=self.predicted)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy summed over the target tokens, in fp32. logits: [B, T, V]; labels: [B, T]."""
    return nn.functional.cross_entropy(
        logits.view(-1, logits.shape[-1]).float(), labels.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task("lm", AutoModelForCausalLM, {"input_ids": ("batch", "sequence")}, token_loss, predicted="input_ids"),
    )
}
"""Tasks by name."""
