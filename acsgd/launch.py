"""How this process was started: its rank and its place on the host, from torchrun's environment."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """The process's rank and its place on the host. Default: a run of one process."""

    rank: int = 0
    local_rank: int = 0
    """Rank within this host."""
    world_size: int = 1
    local_world_size: int = 1
    """Number of processes of the run on this host."""
    under_torchrun: bool = False
    """Whether torchrun started this process."""
    error_file: str = ""
    """File whose content torchrun prints if this process fails; empty = none."""

    @classmethod
    def from_env(cls) -> Launch:
        """Read torchrun's environment variables. The only place in the package that reads the environment.

        Raises SystemExit with a sentence if one of them is not a number.
        """
        env = os.environ
        return cls(
            rank=_number("RANK", 0),
            local_rank=_number("LOCAL_RANK", 0),
            world_size=_number("WORLD_SIZE", 1),
            local_world_size=_number("LOCAL_WORLD_SIZE", 1),
            under_torchrun="TORCHELASTIC_RUN_ID" in env,
            error_file=env.get("TORCHELASTIC_ERROR_FILE", ""),
        )

    @property
    def is_one_host(self) -> bool:
        """Whether all processes of the run are on this host."""
        return self.world_size == self.local_world_size


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        print(f"error: {variable}={text} in the environment is not a number; start with torchrun", file=sys.stderr)
        raise SystemExit(2)
    return int(text)
