"""Interface between the training loop and data-parallel modes, and its implementation for a single replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from torch import Tensor

from acsgd.comm.waits import Meter
from acsgd.dp.peers import Peers
from acsgd.dp.resize import ReplicaState, check_names, fold
from acsgd.optim.base import Capability, LocalStep, SecondMoments
from acsgd.shards.weights import Weight, WeightState

Exchanges = Literal["gradients", "updates", "nothing"]
"""What replicas exchange.

gradients  All replicas step on the sum of the gradients of all, whichever has computed which part of it.
updates    Replicas make steps on their own gradients; all apply the same updates to the global weights.
nothing    Replicas make steps on their own gradients.
"""


class GradSync:
    """Synchronization of one stage over its replicas. Gradients are those of the fp32 master weights.

    A mode either reduces gradients, so that all replicas apply the same update, or lets each replica make local steps
    and synchronizes the weights afterwards. The base class exchanges nothing and has no state.
    """

    def __init__(self) -> None:
        self.meter = Meter()

    def local_step(self, step: int) -> LocalStep | None:
        """Return how the optimizer makes step `step` on local gradients; None = gradients are all-reduced."""
        return None

    def begin_step(self, step: int, scale: float = 1.0) -> None:
        """Clear the gradients and start step `step`, counted from 0. scale: loss scale of its gradients."""
        raise NotImplementedError

    def grad_ready(self, weight: Weight, *, is_final: bool) -> None:
        """Handle a gradient that a backward pass has accumulated into; is_final: no other backward pass follows."""

    def backward_done(self, *, is_last: bool) -> None:
        """Handle the end of a backward pass. is_last: whether it is the last of the step."""

    def reduce(self) -> None:
        """Start the remaining exchanges. Called once all gradients of the stage are final."""

    def wait(self) -> None:
        """Wait for the gradient reduction. No-op in local steps."""

    def commit(self) -> None:
        """Apply what this step has received from other replicas to weights and residuals.

        Called after `wait`, once all ranks have reported the step. Until then a step has changed gradients alone, so
        that it can be run again if a rank fails.
        """

    def exchanges_after(self, step: int) -> bool:
        """Return whether the weights after step `step` depend on an exchange that follows it.

        If not, this replica can complete the step alone, by `after_step` without `exchange`.
        """
        return False

    def exchanges_without_update(self, step: int) -> bool:
        """Return whether an exchange follows step `step` even if its update is skipped."""
        return False

    @property
    def has_buckets(self) -> bool:
        """Whether gradients of the present step are stored in buffers that exist between steps, too."""
        return False

    def exchange(self, step: int, moments: SecondMoments) -> None:
        """Exchange with the other replicas what follows optimizer step `step`, if anything does.

        Changes nothing that lasts, so that it can be run again if a replica fails. moments: those of the stage's
        weights.
        """

    def after_step(self, step: int, moments: SecondMoments) -> None:
        """Apply what `exchange` has received to weights, residuals and, in place, moments. Does not communicate.

        Without `exchange` before, if `exchanges_after` is false: complete the step without other replicas.
        """

    def share_parts(self) -> None:
        """Send the parts that this replica owns of the weights, where it owns parts, and receive those of the others.

        Collective: all replicas call it together, once their parts have changed.
        """

    def global_weights(self) -> Mapping[str, Tensor] | None:
        """Return the weights to evaluate and save where replicas have local weights: fp32 by key, not copied.

        Those that this replica owns, or their parts. None = the master weights are equal on all replicas. Collective:
        all replicas call it together.
        """
        return None

    def state_dict(self) -> WeightState:
        """Return this replica's tensors of the mode's `states`, not copied."""
        return {}

    def take_state(self) -> WeightState:
        """Return `state_dict` for a sync of the same weights with other replicas; this one is not used any more.

        Loads the global weights into the master weights, as `load_state_dict` needs. May be called between the
        optimizer step and `after_step`, and more than once.
        """
        return self.state_dict()

    def load_layer(self, weights: Sequence[Weight], common: WeightState) -> None:
        """Load some global weights, which the masters hold, and `common`, their state that all replicas have."""

    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        """Restore from the saved states of all replicas. The number of replicas may have changed.

        The master weights must have been restored before. Raises RunError if another mode saved the states.
        """
        check_names((), saved)


class Mode(Protocol):
    """A data-parallel mode, chosen by a spec string; a frozen dataclass."""

    @property
    def requires(self) -> frozenset[Capability]:
        """Optimizer capabilities that this mode uses."""
        ...

    @property
    def exchanges(self) -> Exchanges:
        """What replicas exchange, at least after some initial steps."""
        ...

    @property
    def states(self) -> Sequence[ReplicaState]:
        """The state that each of several replicas keeps between steps. Names must not depend on the options."""
        ...

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the synchronization of one stage's weights with the other replicas."""
        ...


class SingleReplicaSync(GradSync):
    """Gradient sync for a single replica: no communication.

    Restores the states of several replicas by folding them into its weights and into its next gradients.
    """

    def __init__(self, weights: Sequence[Weight], states: Sequence[ReplicaState] = ()) -> None:
        """states: those of the mode with several replicas."""
        super().__init__()
        self._states = states
        self._weights = tuple(weights)
        self._residuals: WeightState = {}
        """Residuals of restored replicas, until the next step has added them to its gradients."""

    def begin_step(self, step: int, scale: float = 1.0) -> None:
        self._scale = scale
        for weight in self._weights:
            weight.master.grad = None

    def reduce(self) -> None:
        for by_key in self._residuals.values():
            for weight in self._weights:
                if weight.key in by_key:
                    residual, grad = by_key[weight.key].view_as(weight.master) * self._scale, weight.master.grad
                    weight.master.grad = residual if grad is None else grad + residual

    def after_step(self, step: int, moments: SecondMoments) -> None:
        self._residuals = {}

    def state_dict(self) -> WeightState:
        return {name: dict(by_key) for name, by_key in self._residuals.items()}

    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        check_names(self._states, saved)
        self._residuals = fold(self._states, saved, self._weights)
