"""How a host takes part in a run, or why it is refused: the sentence and the remedy for each difference."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from acsgd.elastic.host.register import DiskRegister
from acsgd.elastic.membership.effects import Timing
from acsgd.elastic.membership.messages import Host, Setup
from acsgd.elastic.membership.plan import make_plan
from acsgd.elastic.membership.preparation import HISTORY
from acsgd.elastic.membership.views import Membership

DEFAULT_TIMING = Timing()


@dataclass(frozen=True)
class DaemonOptions:
    """What torchrun of this host was given."""

    run: str
    """Name of the run, torchrun's --rdzv-id."""
    address: str
    """host:port at which other hosts reach this one."""
    endpoints: Sequence[str]
    """Addresses of daemons that a newcomer contacts; in a run with a mesh, of those that are known so far."""
    secret: bytes
    min_hosts: int
    max_hosts: int
    timing: Timing = DEFAULT_TIMING
    """Without the limits that are options of the run."""

    def timing_of(self, setup: Setup) -> Timing:
        """Return the timing with the limits of the run."""
        return replace(self.timing, silence_s=setup.silence_s, hang_s=setup.hang_s)


def open_membership(me: Host, options: DaemonOptions, setup: Setup, disk: DiskRegister) -> Membership:
    """Return the membership of a host that joins. setup: of its workers.

    Raises OSError; ValueError for files that are no views.
    """
    return Membership(
        me,
        endpoints=options.endpoints,
        min_hosts=options.min_hosts,
        max_hosts=options.max_hosts,
        planner=partial(
            make_plan,
            cuts=setup.cuts,
            min_replicas=setup.min_replicas,
            max_replicas=setup.max_replicas,
            equal_micros=setup.equal_micros,
        ),
        setup=setup.parts,
        newest=disk.newest(),
        force=setup.force,
        timing=options.timing_of(setup),
        now=time.monotonic(),
    )


REMEDIES = {
    HISTORY: "its log.dir is of another run, or of one that continued without it by elastic.force; keep the directory "
    "with the steps that count, and move the other one away",
    "model": "give all hosts the same model",
    "data": "give all hosts the same data",
    "versions": "install the same versions of torch and transformers on all hosts",
    "code": "install the same version of acsgd on all hosts",
}
"""What the user can do, by the name of the part that differs. All other names are options of the run."""
OPTIONS = "start it with the same run file and the same flags"


def refusal(run: str, parts: Sequence[str]) -> str:
    """Return why a host is refused. parts: names of what differs from the other hosts."""
    remedies = dict.fromkeys(REMEDIES.get(part, OPTIONS) for part in parts)
    return f"run {run}: this host differs from the others in {' and '.join(parts)}; {'; '.join(remedies)}"
