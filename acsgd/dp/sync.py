"""Interface between the training loop and data-parallel modes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from acsgd.dp.exchange.peers import Peers
from acsgd.errors import RunError
from acsgd.meter import Meter
from acsgd.optim.base import Capability, LocalStep, SecondMoments
from acsgd.shards.weights import Weight, WeightState


class GradSync(Protocol):
    """Synchronization of one stage over its replicas. Gradients are those of the fp32 master weights.

    A mode either reduces gradients, so that all replicas apply the same update, or lets each replica make local steps
    and synchronizes the weights afterwards.
    """

    meter: Meter

    def local_step(self, step: int) -> LocalStep | None:
        """Return how the optimizer makes step `step` on local gradients; None = gradients are all-reduced."""
        ...

    def begin_step(self, step: int, scale: float = 1.0) -> None:
        """Clear the gradients and start step `step`, counted from 0. scale: loss scale of its gradients."""
        ...

    def grad_ready(self, weight: Weight, *, is_final: bool) -> None:
        """Handle a gradient that a backward pass has accumulated into; is_final: no other backward pass follows."""
        ...

    def reduce(self) -> None:
        """Start the remaining exchanges. Called once all gradients of the stage are final."""
        ...

    def wait(self) -> None:
        """Wait for the gradient reduction. No-op in local steps."""
        ...

    def after_step(self, step: int, moments: SecondMoments) -> None:
        """Handle the end of optimizer step `step`. moments: those of the stage's weights; may be changed in place."""
        ...

    def global_weights(self) -> Mapping[str, Tensor] | None:
        """Return the weights to evaluate and save where replicas have local weights: fp32 by key, not copied.

        None = the master weights are equal on all replicas. Collective: all replicas call it together.
        """
        ...

    def state_dict(self) -> WeightState:
        """Return this replica's state, such as residuals, not copied."""
        ...

    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        """Restore from the saved states of all replicas. The number of replicas may have changed.

        The master weights must have been restored before.
        """
        ...


class Mode(Protocol):
    """A data-parallel mode, chosen by a spec string; a frozen dataclass."""

    @property
    def requires(self) -> frozenset[Capability]:
        """Optimizer capabilities that this mode uses."""
        ...

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the synchronization of one stage's weights with the other replicas."""
        ...


class Memoryless:
    """A mode whose every step is complete in itself."""

    def local_step(self, step: int) -> None:
        """All replicas make the same step."""

    def after_step(self, step: int, moments: SecondMoments) -> None:
        """Nothing is left to do."""

    def global_weights(self) -> None:
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

    def begin_step(self, step: int, scale: float = 1.0) -> None:
        for weight in self.weights:
            weight.master.grad = None

    def grad_ready(self, weight: Weight, *, is_final: bool) -> None:
        pass

    def reduce(self) -> None:
        pass

    def wait(self) -> None:
        pass


class Alone(Unsummed, Memoryless):
    """The only replica agrees with itself."""
