"""Step time of a tied head on a limited link, predicted by the simulator of schedules, without training:

    .venv/bin/python -m benchmarks.pipeline.tied_time

The model, its tokens and the rate of the link are those of network.py on two stages, which measures the same: the time
of uncompressed activations and rows on the link is --ratio times the compute. All times are relative to the compute,
so the rate itself does not matter. Sizes are those of the codecs, and of entropy-coded rows those that pp.compress
counts on; packets add 6 %. A forward takes half of a backward,
and a stage as long as its multiplications.

tie         share of the step by which it is longer than with an untied head
ends alone  the same if only the rows of the first micro-batch and the gradients of the last take time, which no
            computation overlaps. The rest is rows of the next few micro-batches, in which frequent tokens occur first,
            and gradients of the last few: they need more than the rate of the link
ends halved the tie if a lossless code halved these two messages
ordered     the tie if the micro-batches of a step were ordered by the rows that they share: those come first, and last,
            that use few rows which the ones before, or after, do not. Sums of gradients would change in rounding
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from acsgd.config.spec import from_spec
from acsgd.pp.schedules.lowering import lower
from acsgd.pp.schedules.rows import RowRoute
from acsgd.pp.schedules.schedules import SCHEDULES
from acsgd.pp.schedules.simulate import Cost, simulate
from acsgd.pp.tied.plan import ROW_RUNGS, RowRung
from benchmarks.pipeline.network_ranks import SEQUENCE, WIDTH, relative_forwards, zipf_tokens

STAGES = 2
PACKETS = 1.06
"""Bytes on the wire per byte of a message."""
FORWARD_BITS, BACKWARD_BITS = 2, 4


def count_rows(tokens: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return how many rows each micro-batch is the first to use, and how many it is the last to use.

    tokens: [M, tokens of a micro-batch].
    """
    uses: dict[int, list[int]] = {}
    for micro, of_micro in enumerate(tokens.tolist()):
        for token in of_micro:
            uses.setdefault(token, []).append(micro)
    micros = range(len(tokens))
    first, last = ([each[end] for each in uses.values()] for end in (0, -1))
    return [first.count(micro) for micro in micros], [last.count(micro) for micro in micros]


def order_by_rows(tokens: torch.Tensor) -> torch.Tensor:
    """Return the micro-batches in turn from the ends of a step, each the one that uses the fewest further rows there.

    tokens: [M, tokens of a micro-batch].
    """
    rows, left = [{*each} for each in tokens.tolist()], {*range(len(tokens))}
    ends, seen = (list[int](), list[int]()), (set[int](), set[int]())
    for turn in range(len(tokens)):
        end = turn % 2
        chosen = min(left, key=lambda micro: (len(rows[micro] - seen[end]), micro))
        left.remove(chosen)
        ends[end].append(chosen)
        seen[end].update(rows[chosen])
    return tokens[[*ends[0], *ends[1][::-1]]]


def compute_cost(vocabulary: int, micros: int) -> Cost:
    """Return the times of forwards and backwards, such that an untied step on a fast link takes 1."""
    per_micro = [each / (micros + STAGES - 1) for each in relative_forwards(STAGES, vocabulary)]
    return Cost([each / 3 for each in per_micro], [each * 2 / 3 for each in per_micro])


class Ties(NamedTuple):
    """Shares of a tie in a step."""

    tie: float
    ends: float
    """Of its ends alone."""
    halved: float
    """With ends of half the size."""


class Prediction:
    """Predicted step times of one schedule and batch. seconds_per_byte: relative to the compute."""

    def __init__(self, schedule: str, tokens: torch.Tensor, vocabulary: int, ratio: float) -> None:
        chosen = from_spec(schedule, SCHEDULES, key="--schedule")
        micros = len(tokens)
        computes = chosen.program(STAGES, micros)
        self._program = lower(computes, routes=[RowRoute(owner=STAGES * chosen.chunks - 1, user=0)])
        self.first, self.last = count_rows(tokens)
        activation = 4 * SEQUENCE * WIDTH
        self._seconds_per_byte = ratio / (micros * activation + sum(self.first) * 4 * WIDTH)
        forward, backward = (self._seconds(activation * bits / 32) for bits in (FORWARD_BITS, BACKWARD_BITS))
        self._cost = replace(compute_cost(vocabulary, micros), message=forward, gradient_message=backward)
        self.untied = float(simulate(lower(computes), self._cost).makespan)

    def step(self, rung: RowRung, first: Sequence[int], last: Sequence[int]) -> float:
        """Return the time of a step whose micro-batches are the first and the last to use so many rows."""
        row_bytes, gradient_bytes = (WIDTH * each for each in rung.element_bytes(WIDTH, torch.float32))
        rows = [self._seconds(count * row_bytes) for count in first]
        gradients = [self._seconds(count * gradient_bytes) for count in last]
        cost = replace(self._cost, rows=rows, row_gradients=gradients)
        return float(simulate(self._program, cost).makespan)

    def tie(self, rung: RowRung) -> Ties:
        """Return the shares of the tie in the step."""
        (first, *others), (*before, last) = self.first, self.last
        zeros = [0] * len(others)
        whole = self.step(rung, self.first, self.last)
        ends = self.step(rung, [first, *zeros], [*zeros, last])
        halved = self.step(rung, [first // 2, *others], [*before, last // 2])
        return Ties(*(1 - self.untied / each for each in (whole, ends, halved)))

    def _seconds(self, size: float) -> float:
        return size * self._seconds_per_byte * PACKETS


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b:lead=6")
    parser.add_argument("--micros", type=int, default=64, help="micro-batches per step")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument(
        "--ratio", type=float, nargs="+", default=[4.0, 2.0, 1.0], help="uncompressed traffic relative to compute"
    )
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/tied_time.json"), help="path of the results")
    return parser.parse_args()


def main() -> None:
    """Predict, print, save."""
    options = parse_arguments()
    tokens = zipf_tokens(options.micros, options.vocabulary)[:, :-1]
    columns = "ratio", "pp.tied", "step", "untied", "tie", "ends alone", "ends halved", "ordered"
    table = Table(*columns, title=f"Times relative to the compute, {options.schedule}")
    results = []
    for ratio in options.ratio:
        prediction, ordered = (
            Prediction(options.schedule, each, options.vocabulary, ratio) for each in (tokens, order_by_rows(tokens))
        )
        for rung in ROW_RUNGS:
            ties = prediction.tie(rung)
            shares = {**ties._asdict(), "ordered": ordered.tie(rung).tie}
            times = {"step": prediction.untied / (1 - ties.tie), "untied": prediction.untied}
            shown = [*(f"{each:.2f}" for each in times.values()), *(f"{each:.1%}" for each in shares.values())]
            table.add_row(f"{ratio:g}", rung.spec, *shown)
            results.append({"ratio": ratio, "tied": rung.spec, **times, **shares})
    console = Console(width=120)
    console.print(table)
    console.print(f"rows by first use: {prediction.first[:8]} ..., {sum(prediction.first)} in all")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
