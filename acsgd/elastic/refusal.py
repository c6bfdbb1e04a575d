"""Why a host cannot take part in a run, and what to do, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

REMEDIES = {
    "run directory": "give all hosts the same log.dir, in a file system that they share",
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
