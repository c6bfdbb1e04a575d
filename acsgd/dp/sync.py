"""How replicas agree: the protocol of a data-parallel mode, and gradients gathered into buckets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from acsgd.dp.exchange.peers import Peers
from acsgd.errors import RunError
from acsgd.meter import Meter
from acsgd.optim.base import LocalStep, SecondMoments
from acsgd.shards.weights import Weight, WeightState


class GradSync(Protocol):
    """Agreement of the replicas on one stage. Gradients are those of the masters, in fp32.

    They may agree on gradients, so that all make the same step, or on weights, after each has made steps of its own.
    """

    meter: Meter

    def local_step(self, step: int) -> LocalStep | None:
        """Return how each replica makes this step on its own gradients; None = they are summed, the step is common."""
        ...

    def begin(self, step: int, scale: float = 1.0) -> None:
        """Forget the gradients of the last step; step `step`, counted from 0, begins. scale: of its gradients."""
        ...

    def grad_made(self, weight: Weight, *, complete: bool) -> None:
        """Take note that a backward has added to one gradient; complete: for the last time in this step."""
        ...

    def reduce(self) -> None:
        """Start what is left to exchange: every gradient of the stage is complete."""
        ...

    def wait(self) -> None:
        """Block until every gradient is the sum over the replicas, unless the step is local."""
        ...

    def after_step(self, step: int, moments: SecondMoments) -> None:
        """Take note that the optimizer has made step `step`; moments: of the stage's weights, may be changed."""
        ...

    def shared(self) -> Mapping[str, Tensor] | None:
        """Return what all replicas have in common where each has weights of its own: fp32 by key, not copied.

        It is what is evaluated and saved as the model; None = the masters are. All replicas call it together.
        """
        ...

    def state_dict(self) -> WeightState:
        """Return what this replica remembers between steps (error feedback is training state), not copied."""
        ...

    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        """Take over what the replicas of a run remembered, one entry each; there may have been more or fewer.

        The masters have been set to the saved model before.
        """
        ...


class Mode(Protocol):
    """A data-parallel mode, chosen by spec; a frozen dataclass."""

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the agreement of this replica with its peers on one stage's weights; alone, it has nothing to do."""
        ...


class Memoryless:
    """A mode whose every step is complete in itself."""

    def local_step(self, step: int) -> None:
        """All replicas make the same step."""

    def after_step(self, step: int, moments: SecondMoments) -> None:
        """Nothing is left to do."""

    def shared(self) -> None:
        """All replicas have the same weights."""

    def state_dict(self) -> WeightState:
        """Nothing is remembered."""
        return {}

    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        """Raise RunError if there is something to remember: what the replicas owe each other would be lost."""
        refuse_others(saved)


def refuse_others(saved: Sequence[WeightState], known: Collection[str] = ()) -> None:
    """Raise RunError if replicas remembered anything under a name that is not among `known`."""
    names = {name for state in saved for name in state} - set(known)
    if names:
        raise RunError(
            f"the checkpoint holds {sorted(names)} of another data-parallel mode, which this one would lose; "
            "go on in the mode that saved it (dp.mode in its config.toml)"
        )


class Unsummed:
    """What agreements have in common that leave each replica its own gradients."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.meter = Meter()
        self.weights = tuple(weights)

    def begin(self, step: int, scale: float = 1.0) -> None:
        for weight in self.weights:
            weight.master.grad = None

    def grad_made(self, weight: Weight, *, complete: bool) -> None:
        pass

    def reduce(self) -> None:
        pass

    def wait(self) -> None:
        pass


class Alone(Unsummed, Memoryless):
    """The only replica agrees with itself."""
