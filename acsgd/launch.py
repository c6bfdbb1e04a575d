"""How this process was started: its rank and its place on the host, from torchrun's environment."""

from __future__ import annotations

import os
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
        """Read torchrun's environment variables. The only place in the package that reads the environment."""
        env = os.environ
        return cls(
            rank=int(env.get("RANK", 0)),
            local_rank=int(env.get("LOCAL_RANK", 0)),
            world_size=int(env.get("WORLD_SIZE", 1)),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", 1)),
            under_torchrun="TORCHELASTIC_RUN_ID" in env,
            error_file=env.get("TORCHELASTIC_ERROR_FILE", ""),
        )

    @property
    def is_one_host(self) -> bool:
        """Whether all processes of the run are on this host."""
        return self.world_size == self.local_world_size
