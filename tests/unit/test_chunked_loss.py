"""Laws of the loss in chunks of positions: it is that of all positions, and logits of all of them never exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import nan
from typing import Any

import pytest
import torch
from lib.direct import SEQUENCE, build_stages
from lib.models import TINY, dropout_of, tiny_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, PreTrainedConfig

from acsgd.layers.description import Head
from acsgd.optim.ownership import OwnedWeights, Ownership
from acsgd.pp import Action, Op
from acsgd.pp.chunked_loss import HeadUse, chunked_loss
from acsgd.pp.nan_probe import NaNProbe
from acsgd.pp.recompute import Recompute
from acsgd.pp.stage import MicroBatch, Stage
from acsgd.streams import LOGITS_AT_ONCE
from acsgd.tasks import TASKS

SEQUENCES, VOCABULARY, LENGTH = 4, 96, 10
MICRO = MicroBatch(0, 0, 0, tuple(range(SEQUENCES)))
TOKENS = torch.randint(VOCABULARY, (SEQUENCES, SEQUENCE), generator=torch.Generator().manual_seed(1))


def config_of(family: str) -> PreTrainedConfig:
    """Return a config with dropout, if the family has it; gemma2's forward caps the logits after the head."""
    if family == "gemma2":
        shape = TINY["llama"] | {"head_dim": 8, "final_logit_softcapping": 2.0}
        return AutoConfig.for_model("gemma2", vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **shape)
    return tiny_config(family, vocab_size=VOCABULARY, **dropout_of(family))


@contextmanager
def chunks_of(length: int | None) -> Iterator[None]:
    """Context in which the logits of `length` positions are made at a time; None = of all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadUse, "chunk_length", lambda self, hidden, at_once: length or hidden.shape[1])
        yield


def train(stage: Stage, *, split: bool = False) -> Mapping[str, Tensor]:
    """Return the loss of a forward, the gradients of its backward, and the loss of an evaluation."""
    labels = TOKENS.roll(-1, 1)
    labels[0, : 2 * LENGTH] = labels[:, -1] = -100  # all those of a chunk of a sequence, too
    loss = stage.forward(MICRO, {"input_ids": TOKENS}, {}, labels)["loss"]
    if split:
        stage.backward_input(0, None, scale=0.5)
        stage.backward_weight(0, last=True)
    else:
        stage.backward(0, None, last=True, scale=0.5)
    with stage.evaluating():
        evaluated = stage.evaluate(MICRO, {"input_ids": TOKENS}, {}, labels)["loss"]
    gradients = {weight.key: weight.master.grad for weight in stage.weights if weight.master.grad is not None}
    return {"loss": loss, "evaluated": evaluated, **gradients}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("family", "split", "options"),
    [
        ("gpt2", False, {"label_smoothing": 0.1}),
        ("gpt2", False, {"mask_per_sample": True}),
        ("llama", False, {"dtype": torch.bfloat16}),
        ("gemma2", True, {}),
    ],
)
def test_loss_and_gradients_are_those_of_all_positions(
    family: str, split: bool, options: dict[str, Any], recompute: bool
) -> None:
    results = []
    for length in (None, LENGTH):
        (stage,) = build_stages(config_of(family), [range(8)], recompute=Recompute(int(recompute)), **options)
        with chunks_of(length):
            results.append(train(stage, split=split))
    whole, parts = results
    assert whole.keys() == parts.keys()
    assert len(whole) == 2 + len(stage.weights)
    # sums in another order: each is off by some roundings of its largest summand
    rounding = 2.0**-8 if "dtype" in options else 2.0**-20
    for name, expected in whole.items():
        torch.testing.assert_close(
            parts[name], expected, rtol=rounding, atol=rounding * expected.abs().max().item(), msg=name
        )


@pytest.mark.parametrize("recompute", [False, True])
def test_no_tensor_has_the_logits_of_all_positions(recompute: bool) -> None:
    largest = []
    for length in (None, LENGTH):
        (stage,) = build_stages(config_of("llama"), [range(8)], recompute=Recompute(int(recompute)))
        with chunks_of(length), _Rows(VOCABULARY) as rows:
            train(stage)
        largest.append(rows.most)
    assert largest == [SEQUENCES * SEQUENCE, SEQUENCES * LENGTH]


def test_chunks_are_made_if_the_logits_are_large_and_larger_than_the_gradients_of_the_head() -> None:
    def length(positions: int, classes: int, weights: Sequence[int] = ()) -> int:
        use = HeadUse(classes, tuple(torch.empty(size, device="meta") for size in weights))
        return use.chunk_length(torch.empty(2, positions, 1, device="meta"), LOGITS_AT_ONCE)

    assert length(1024, LOGITS_AT_ONCE // 2048) == 1024
    assert length(1024, LOGITS_AT_ONCE // 1024) == 512
    assert length(1024, LOGITS_AT_ONCE // 1024, [LOGITS_AT_ONCE]) == 512
    assert length(1024, LOGITS_AT_ONCE // 1024, [2 * LOGITS_AT_ONCE]) == 1024
    assert length(2048, LOGITS_AT_ONCE // 1024, [3 * LOGITS_AT_ONCE]) == 768
    assert length(3, LOGITS_AT_ONCE) == 1


def test_sums_over_chunks_neither_overflow_before_they_are_scaled_nor_share_memory() -> None:
    """Of fp16, whose largest number is 65504; two weights have the same tensor as their gradient."""
    hidden = torch.ones(1, 100, 1, dtype=torch.float16, requires_grad=True)
    weights = [torch.zeros(1, dtype=torch.float16, requires_grad=True) for _ in range(2)]

    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        return ((hidden + (weights[0] + weights[1])) * 1000).float().sum()

    total = chunked_loss(loss, hidden, torch.zeros(1, 100), LENGTH, weights, value_only=False)
    (total * 2.0**-10).backward()
    assert [weight.grad for weight in weights] == [100_000 * 2.0**-10] * 2


def test_finding_out_what_a_head_uses_draws_no_random_numbers() -> None:
    head = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, VOCABULARY))
    before = torch.get_rng_state()
    use = HeadUse.of(head, torch.ones(2, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert (use.classes, {*use.weights}) == (VOCABULARY, {*head.parameters()})


def test_a_gradient_that_is_not_finite_belongs_to_the_backward() -> None:
    (stage,) = build_stages(config_of("llama"), [range(8)])
    head = stage.composed.model.get_submodule("lm_head")
    head.register_forward_hook(lambda module, inputs, output: output.register_hook(lambda grad: grad * nan) and None)
    with (
        NaNProbe({0: stage}, OwnedWeights(stage.weights, Ownership(0, 1)), [0]) as probe,
        probe.during(Action(Op.F, 0, 0)),
        chunks_of(LENGTH),
    ):
        stage.forward(MICRO, {"input_ids": TOKENS}, {}, TOKENS)
    assert probe.first is not None
    assert (probe.first.phase, probe.first.tensor) == ("backward", "gradient of the output of lm_head")


def test_a_loss_of_another_kind_is_computed_of_all_positions() -> None:
    class Pairs(type(TASKS["lm"])):  # type: ignore[misc]
        def loss(self, hidden: Tensor, head: Head, labels: Tensor, label_smoothing: float) -> Tensor:
            assert hidden.shape[1] == SEQUENCE
            return head(hidden).float().logsumexp(1).sum()

    (stage,) = build_stages(config_of("llama"), [range(8)])
    stage.head_loss.criterion = Pairs()
    with chunks_of(LENGTH):
        train(stage)
    assert TASKS["seq2seq"].sums_positions
    assert not TASKS["classification"].sums_positions


class _Rows(TorchDispatchMode):
    """Watches the tensors that operations return for rows of one length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self.most = 0
        """Largest number of rows in one floating-point tensor; rows of weights do not count."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape[-1:] == (self._length,):
                self.most = max(self.most, leaf.numel() // self._length)
        return result
