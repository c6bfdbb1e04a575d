"""The ways to send rows of tied tables, among which pp.compress chooses, with what each takes in this pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from acsgd.pp.tied.plan import RowRung
from acsgd.pp.wire.coder import TensorSpec
from acsgd.pp.wire.ladder import measure_codec
from acsgd.run.report import Report, StepField, StepSummary, highest_by_replica
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


class RowTable(NamedTuple):
    """What a rank knows of the tables of which it sends or gets rows."""

    width: int
    """Elements of a row; 0 = it has none."""
    times: list[RowTimes]
    """By way."""


class RowWays:
    """The ways to send rows of a pipeline; `rungs` is empty without a choice.

    session: of this rank. micros: number of micro-batches of a step.
    """

    fields = (FIRST_ROWS, ALL_ROWS)

    def __init__(self, session: Session, chooser: Chooser, micros: int) -> None:
        self.rungs = session.job.plugins.row_rungs if chooser.row_routes else ()
        self._session, self._chooser, self._micros = session, chooser, micros
        rank_of = chooser.placement.rank_of
        self._ranks = [(rank_of(owner), rank_of(user)) for owner, user in chooser.row_routes]
        self._table = RowTable(0, [])
        self._elements = [(0.0, 0.0)] * session.job.topology.replicas
        """By replica, those of the first micro-batches and all of the last step."""

    def report(self) -> Report:
        """Return what this rank reports of the last step."""
        return dict(zip(self.fields, self._session.pipeline.ties.elements, strict=True))

    def record(self, summary: StepSummary) -> None:
        """Record what all ranks have reported."""
        self._elements = [*zip(summary[FIRST_ROWS], summary[ALL_ROWS], strict=True)]

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
        (first, total), ways = self._elements[replica], []
        per_micro, groups = total / self._micros, self._micros / self._session.job.programs.width
        for rung, times in zip(self.rungs, self._table.times, strict=True):
            rows, gradients = rung.element_bytes(self._table.width, self._session.job.shapes.dtype)
            seconds = rows * down_s, gradients * up_s, *times
            ways.append(RowWay(rung.loss_cost, *(per_micro * each for each in seconds)))
        power = math.log(total / first) / math.log(groups) if first and groups > 1 else 1.0
        return RowTraffic(tuple(ways), self._micros, power)

    def codec_s(self, replica: int, rank: int, way: int) -> float:
        """Return the time of the codecs of a rank for the rows of a micro-batch."""
        times, per_micro = self._table.times[way], self._elements[replica][1] / self._micros
        own = (times.owner_s * (owner == rank) + times.user_s * (user == rank) for owner, user in self._ranks)
        return per_micro * sum(own)

    def _time(self, rung: RowRung, width: int, dtype: torch.dtype) -> RowTimes:
        if not width or rung == self.rungs[0]:
            return RowTimes(0.0, 0.0)
        shape, streams = (MEASURED_ROWS, width), self._session.job.streams
        rows = measure_codec(rung.how.rows, [TensorSpec(shape, dtype)], streams)
        gradients = measure_codec(rung.how.gradients, [TensorSpec(shape, torch.float32)], streams)
        seconds = rows.encode_s + gradients.decode_s, rows.decode_s + gradients.encode_s
        return RowTimes(*(each / math.prod(shape) for each in seconds))
