"""Participants of the step boundary that only elastic runs have: joins beside training, and the pause before a view."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence

from acsgd.dp.modes import redundant_steps
from acsgd.elastic.control import Control
from acsgd.elastic.state.joins import JoiningRank, StateSource
from acsgd.elastic.state.transfer import align_domain
from acsgd.io.data.batches import AHEAD
from acsgd.notes import print_note
from acsgd.optim.ownership import Ownership
from acsgd.run.report import MICROS, Report, StepField, StepSummary, by_rank, by_replica, in_grid, on_all, on_any
from acsgd.run.session import Session
from acsgd.run.setup.continued import admit_observers
from acsgd.run.step.checkpointing import Checkpointing
from acsgd.run.step.hooks import LoopState, StepHook
from acsgd.run.step.run import STOP

STOPS = STOP.reduced(on_all)
"""Whether all ranks have received a stop signal: one concerns one host alone, which leaves, and the others train on."""
PAUSE = StepField("pause", on_any)
"""Whether this rank was asked to stop at the end of the step, for the next view."""
JOINS = StepField("joins", by_replica)
"""Whether this rank has not got the state of all of its layers yet."""
WANTED = StepField("wanted", by_rank)
"""Layer whose state after the step this rank requests, 1 + its index in the model; 0 = no one."""


class BackgroundJoin(StepHook):
    """Transfers of state to ranks that join, beside training. Their replicas are idle until they have all of it.

    transfers: those in which this rank takes part; None if there are none. begun_at: number of completed steps at the
    start of the view, whose reports were those of another one. ahead: number of steps whose micro-batches are dealt
    when a replica ceases to be idle. Observers cease to be idle together, and take part in the exchanges from the first
    step in which they have some.
    """

    fields = (JOINS, WANTED)

    def __init__(
        self, session: Session, transfers: StateSource | JoiningRank | None, begun_at: int, ahead: int = AHEAD
    ) -> None:
        self._session = session
        self._transfers = transfers
        self._begun_at = begun_at
        self._lacking: Sequence[int] = ()
        """Ranks that had not all of their state in the last step of this view."""
        self._idle = deque[Collection[int]](maxlen=ahead + 1)
        """The idle replicas after the last steps."""

    def report(self, state: LoopState) -> Report:
        if not isinstance(self._transfers, JoiningRank):
            return {}
        # in redundant steps nothing is exchanged by which this rank could keep up with a layer that it has
        is_redundant = state.progress.step < redundant_steps(self._session.job.plugins.mode)
        wanted = None if is_redundant else self._transfers.wanted
        return {JOINS: self._transfers.is_pending, WANTED: 0 if wanted is None else 1 + wanted}

    def after_step(self, state: LoopState) -> None:
        assert state.summary is not None
        if state.progress.step > self._begun_at:
            joining = [replica for replica, is_joining in enumerate(state.summary[JOINS]) if is_joining]
            self._lacking = [rank for rank, joins in enumerate(state.summary[JOINS.reduced(by_rank)]) if joins]
            # together: an observer that is left could not follow the others when their number changes
            state.idle = joining and list(self._session.peers.observers or joining)
            self._idle.append(state.idle)
            if len(self._idle) == self._idle.maxlen:
                self._admit(self._idle[0])

    def before_next(self, state: LoopState) -> None:
        """Send or load state after a step. Raises RunError if a connection fails."""
        assert state.summary is not None
        if self._transfers is not None:
            self._transfers.after_step([int(layer) - 1 if layer else None for layer in state.summary[WANTED]])

    def at_return(self, state: LoopState) -> None:
        self._idle.clear()
        self._admit(state.idle)  # the micro-batches are dealt again
        if isinstance(self._transfers, JoiningRank):
            self._transfers.restart(self._lacking)

    def _admit(self, idle: Collection[int]) -> None:
        """Let the observers take part in the exchanges, unless they are idle."""
        peers = self._session.peers
        if peers.observers and not idle:
            key = peers.state_key
            admit_observers(self._session)
            align_domain(self._session, key)


PROGRESS_S = 10.0
"""Time between two lines about the state that arrives, seconds."""


class JoinProgress(StepHook):
    """Prints how far a host has joined, up to the first step in which its replica has micro-batches.

    run: name of the run; started_at: when torchrun of the host was started, a time.monotonic().
    """

    def __init__(self, run: str, started_at: float) -> None:
        self._run = run
        self._started_at = self._printed_at = started_at
        self._joining: JoiningRank | None = None
        self._replica = 0
        self._has_state = self._is_spare = self._is_over = False

    def enter_view(self, replica: int, received_bytes: int, transfers: StateSource | JoiningRank | None) -> None:
        """Note the replica of this rank in a view, and the state that it has received, or receives beside training."""
        self._replica = replica
        self._joining = transfers if isinstance(transfers, JoiningRank) else None
        if self._joining is None:
            self._note_state(received_bytes)

    def wait_as_spare(self, reason: str | None = None) -> None:
        """Note that this rank has no part in a view. reason: why nobody has, if it is given."""
        if not self._is_spare:
            self._print("waiting as a spare" if reason is None else f"waiting for hosts ({reason})")
        self._is_spare = True

    def before_next(self, state: LoopState) -> None:
        assert state.summary is not None
        if self._joining is not None and not self._joining.is_pending:
            self._note_state(self._joining.received().nbytes)
            self._joining = None
        elif self._joining is not None and time.monotonic() - self._printed_at >= PROGRESS_S:
            layers, of_layers, nbytes = self._joining.received()
            self._print(f"{layers} of {of_layers} layers ({nbytes / 1e6:.1f} MB) are here")
        if not self._is_over and sum(state.summary[MICROS][self._replica]) > 0:
            self._print(f"first step ({state.progress.step})")
            self._is_over = True

    def _note_state(self, received_bytes: int) -> None:
        if not self._has_state:
            self._print(f"all state ({received_bytes / 1e6:.1f} MB) is here" if received_bytes else "all state is here")
        self._has_state = True

    def _print(self, text: str) -> None:
        self._printed_at = time.monotonic()
        print_note(f"run {self._run}: {text} after {self._printed_at - self._started_at:.1f} s")


class Pause(StepHook):
    """Ends the loop after a step for the next view, when the daemon of a host requests it.

    before: summary with which this view begins, if there is one: the reports of another view, which may have had other
    ranks.
    """

    fields = (PAUSE,)

    def __init__(
        self,
        control: Control,
        checkpointing: Checkpointing,
        ownership: Ownership,
        num_steps: int,
        before: StepSummary | None = None,
    ) -> None:
        self._control = control
        self._checkpointing = checkpointing
        self._holders = ownership.holders
        self._num_steps = num_steps
        self._before = before

    def report(self, state: LoopState) -> Report:
        # a save takes longer than others should wait
        return {PAUSE: self._control.pause_requested and not self._checkpointing.is_saving}

    def after_step(self, state: LoopState) -> None:
        assert state.summary is not None
        if state.summary is not self._before:
            state.save_is_due |= needs_checkpoint(state.summary, self._holders)

    def before_next(self, state: LoopState) -> None:
        assert state.summary is not None
        if state.summary[PAUSE] and state.progress.step < self._num_steps and not state.is_stopped:
            self._checkpointing.finish_save(wait=needs_checkpoint(state.summary, self._holders))
            state.is_paused = True


def needs_checkpoint(summary: StepSummary, holders: Sequence[Sequence[int]]) -> bool:
    """Return whether the run pauses, and the ranks that leave then are the only ones with the state of some stages.

    summary: of a step of this view. holders: replicas that hold the same state, see `Ownership.holders`.
    """
    if not summary[PAUSE]:
        return False
    stops, joins = summary[STOP.reduced(in_grid)], summary[JOINS.reduced(in_grid)]
    leaves = [[stop or joins for stop, joins in zip(*rows, strict=True)] for rows in zip(stops, joins, strict=True)]
    of_stages = [zip(*(leaves[replica] for replica in replicas), strict=True) for replicas in holders]
    return any(all(ranks) for stages in of_stages for ranks in stages)
