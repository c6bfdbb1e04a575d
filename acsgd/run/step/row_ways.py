"""The ways to send rows of tied tables, among which pp.compress chooses, with what each takes in this pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from acsgd.pp.tied.plan import RowRung
from acsgd.pp.wire.coder import TensorSpec
from acsgd.pp.wire.ladder import measure_codec
from acsgd.run.report import MICROS, Report, StepField, StepSummary, highest_by_replica
from acsgd.run.session import Session
from acsgd.run.step.codec_choice import Chooser, Direction, RowTraffic, RowWay

FIRST_ROWS = StepField("first_row_elements", highest_by_replica)
"""Elements of the rows of the first micro-batches that a rank gets in a step."""
ALL_ROWS = StepField("all_row_elements", highest_by_replica)
MEASURED_ROWS = 64
"""Number of rows whose codecs are timed."""


class RowTimes(NamedTuple):
    """Longest times of the codecs of rows and of their gradients, seconds per element."""

    owner_s: float
    user_s: float


class RowCounts(NamedTuple):
    """Numbers of a step of a replica."""

    first: float
    """Elements of the rows of the first group of micro-batches."""
    total: float
    """Elements of all rows."""
    micros: int
    """Micro-batches."""


class RowTable(NamedTuple):
    """What a rank knows of the tables of which it sends or gets rows."""

    width: int
    """Elements of a row; 0 = it has none."""
    times: list[RowTimes]
    """By way."""


class RowWays:
    """The ways to send rows of a pipeline; `rungs` is empty without a choice.

    session: of this rank.
    """

    fields = (FIRST_ROWS, ALL_ROWS)

    def __init__(self, session: Session, chooser: Chooser) -> None:
        self.rungs = session.job.plugins.row_rungs if chooser.row_routes else ()
        self._session, self._chooser = session, chooser
        rank_of = chooser.placement.rank_of
        self._ranks = [(rank_of(owner), rank_of(user)) for owner, user in chooser.row_routes]
        self._table = RowTable(0, [])
        self._last = [RowCounts(0.0, 0.0, 1)] * session.job.topology.replicas
        """By replica, those of the last step."""

    def report(self) -> Report:
        """Return what this rank reports of the last step."""
        return dict(zip(self.fields, self._session.pipeline.ties.elements, strict=True))

    def record(self, summary: StepSummary) -> None:
        """Record what all ranks have reported."""
        micros = (max(1, int(max(of_ranks))) for of_ranks in summary[MICROS])
        self._last = [*map(RowCounts, summary[FIRST_ROWS], summary[ALL_ROWS], micros)]

    def own_table(self) -> RowTable:
        """Measure the codecs of rows on this rank."""
        width, dtype = self._session.pipeline.ties.width, self._session.job.shapes.dtype
        return RowTable(width, [self._time(rung, width, dtype) for rung in self.rungs])

    def use_tables(self, by_rank: Sequence[RowTable]) -> None:
        """Count on the longest times of any rank."""
        widths, times = zip(*by_rank, strict=True)
        longest = [RowTimes(*map(max, zip(*of_way, strict=True))) for of_way in zip(*times, strict=True)]
        self._table = RowTable(max(widths), longest)

    def traffic(self, replica: int, directions: Sequence[Direction]) -> RowTraffic | None:
        """Return the rows of a step; None without a choice.

        They pass the slowest link of the rank that sends them, or of the rank that receives them.
        """
        if not self.rungs:
            return None
        down_s = up_s = 0.0  # per byte: of rows, of their gradients
        for number, direction in enumerate(directions):
            sender, receiver = self._chooser.ends(number)
            for owner, user in self._ranks:
                if sender == owner or receiver == user:
                    down_s = max(down_s, direction.s_per_byte)
                if sender == user or receiver == owner:
                    up_s = max(up_s, direction.s_per_byte)
        (first, total, micros), ways = self._last[replica], []
        per_micro, groups = total / micros, micros / self._session.job.programs.width
        for rung, times in zip(self.rungs, self._table.times, strict=True):
            rows, gradients = rung.element_bytes(self._table.width, self._session.job.shapes.dtype)
            seconds = rows * down_s, gradients * up_s, *times
            ways.append(RowWay(rung.loss_cost, *(per_micro * each for each in seconds)))
        power = math.log(total / first) / math.log(groups) if first and groups > 1 else 1.0
        return RowTraffic(tuple(ways), micros, power)

    def codec_s(self, replica: int, rank: int, way: int) -> float:
        """Return the time of the codecs of a rank for the rows of a micro-batch."""
        times, last = self._table.times[way], self._last[replica]
        own = (times.owner_s * (owner == rank) + times.user_s * (user == rank) for owner, user in self._ranks)
        return last.total / last.micros * sum(own)

    def _time(self, rung: RowRung, width: int, dtype: torch.dtype) -> RowTimes:
        if not width or rung == self.rungs[0]:
            return RowTimes(0.0, 0.0)
        shape, streams = (MEASURED_ROWS, width), self._session.job.streams
        rows = measure_codec(rung.how.rows, [TensorSpec(shape, dtype)], streams)
        gradients = measure_codec(rung.how.gradients, [TensorSpec(shape, torch.float32)], streams)
        seconds = rows.encode_s + gradients.decode_s, rows.decode_s + gradients.encode_s
        return RowTimes(*(each / math.prod(shape) for each in seconds))
