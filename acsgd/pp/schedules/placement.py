"""Which rank of a pipeline holds which stages."""

from typing import NamedTuple


class Placement(NamedTuple):
    """Stages dealt to the ranks of a pipeline in turn: stage s lies on rank s % ranks."""

    ranks: int
    """Ranks of the pipeline."""
    stages: int
    """Stages of the model; `ranks` or a multiple of it."""

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        return stage % self.ranks

    def stages_of(self, rank: int) -> range:
        """Return the stages that a rank holds, in ascending order."""
        return range(rank, self.stages, self.ranks)
