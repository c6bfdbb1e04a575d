"""Trial of stages: a small model with the flags of a config generates in two, in threads, and as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from acsgd.commands.generation.stages import StageModel, divide
from acsgd.layers.compare import TOLERANCE, ComparedStages
from acsgd.layers.description import LayersError, ModelLayers
from acsgd.layers.small_config import WINDOW
from acsgd.layers.verify import small_stages
from acsgd.model_classes import ModelClass
from acsgd.shards.plan import StageSpec

TOKENS = WINDOW + 4
"""Length of the generated texts: more than sliding windows have."""
LONGEST_WAIT_S = 60.0
"""Longest wait of a stage for the other, seconds."""


def find_difference(model_class: ModelClass, config: PreTrainedConfig, layers: ModelLayers) -> str:
    """Return a sentence on why a model does not generate in stages as in one process; empty if it does.

    Compares the logits of the tokens of greedy decoding, with a padded prompt and an unpadded one.
    """
    try:
        small = small_stages(model_class.build, config, model_class.inputs_of(config), layers)
        specs = divide(small.whole, small.layers, 2)
        skeletons = [model_class.build(small.whole.config) for _ in specs]
        expected = _generate(small.whole.eval())
        wire = _QueueWire()
        with ThreadPoolExecutor(len(specs)) as pool:
            first, last = (pool.submit(_run_stage, small, *each, wire) for each in zip(skeletons, specs, strict=True))
        if isinstance(first.exception(), _OtherFailedError):
            last.result()
        first.result()
        logits = last.result()
    except LayersError as error:
        return str(error)
    except Exception as error:  # raised in transformers' code, in any of its models
        return _refusal(config, " ".join(f"{error!r}".split()))
    difference = max(_difference(one, two) for one, two in zip(logits, expected, strict=True))
    return "" if difference <= TOLERANCE else _refusal(config, f"logits differ by {difference:.2g}")


def _refusal(config: PreTrainedConfig, reason: str) -> str:
    return (
        f"{config.model_type} does not generate in stages as in one process, as a trial with a small model shows "
        f"({reason}); start it without torchrun"
    )


def _run_stage(small: ComparedStages, skeleton: PreTrainedModel, spec: StageSpec, wire: _QueueWire) -> Sequence[Tensor]:
    """Generate with a stage, the first or the last; return the logits of each token."""
    try:
        stage = ComparedStages(small.whole, skeleton, small.layers)
        stage.load(range(*spec))
        model = StageModel(skeleton.eval(), small.layers, spec)
        with model.running():
            return _generate(skeleton, **model.arguments(wire))
    except BaseException:
        wire.close()
        raise


@torch.inference_mode()
def _generate(model: PreTrainedModel, **options: Any) -> Sequence[Tensor]:
    """Return the logits [B, V] of each token that greedy decoding adds to a padded and an unpadded prompt."""
    vocabulary, length = model.config.get_text_config().vocab_size, WINDOW + 2
    ids = (torch.arange(2 * length).reshape(2, length) + 3) % vocabulary
    mask = torch.ones_like(ids)
    mask[1, : length // 2] = 0
    generate: Any = model.generate
    return generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=TOKENS,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        **{"do_sample": False, "num_beams": 1} | options,
    ).logits


def _difference(one: Tensor, two: Tensor) -> float:
    """Return the largest difference of logits, relative to the largest of them, or to 1."""
    finite = two.isfinite()  # some models give -inf to ids without a token
    if not torch.equal(one.isfinite(), finite):
        return float("inf")
    return float((one - two)[finite].abs().max() / two[finite].abs().max().clamp(min=1))


class _OtherFailedError(Exception):
    """The other stage has failed, and sends no more."""


class _QueueWire:
    """Messages between two stages in one process: hidden states to the last one, tokens to the first."""

    def __init__(self) -> None:
        self._hidden: SimpleQueue[Tensor | None] = SimpleQueue()
        self._tokens: SimpleQueue[Tensor | None] = SimpleQueue()

    def begin(self, hidden: Tensor) -> None:
        pass

    def receive_hidden(self) -> Tensor:
        return self._receive(self._hidden)

    def send_hidden(self, hidden: Tensor) -> None:
        self._hidden.put(hidden.clone())

    def receive_tokens(self) -> Tensor:
        return self._receive(self._tokens)

    def send_tokens(self, ids: Tensor) -> None:
        self._tokens.put(ids.clone())

    def close(self) -> None:
        """Let a stage that waits for a message fail at once."""
        self._hidden.put(None)
        self._tokens.put(None)

    @staticmethod
    def _receive(queue: SimpleQueue[Tensor | None]) -> Tensor:
        if (tensor := queue.get(timeout=LONGEST_WAIT_S)) is None:
            raise _OtherFailedError
        return tensor
