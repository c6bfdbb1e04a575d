"""Cost per rank of what all ranks do together, by the number of ranks, and a model of it for more:

    .venv/bin/python -m benchmarks.runs.ranks [--sizes 2 4 8 16 32 64] [--json runs/benchmarks/ranks.json]

Ranks are processes of this host that compute nothing: CPU time and numbers of messages and requests, not times, which
depend on the number of cores.

report  the exchange of reports at the end of a step, directly between all ranks and by rows: see `gather_rounds`
text    an exchange of texts through the store, as savers make; and a wait of --wait seconds for the last rank
start   opening the groups of pipelines of --stages ranks, until the first message

The model is a least-squares fit of the CPU time of a report to a constant, the messages that a rank sends, and the
number of ranks, whose numbers it reads.
"""

from __future__ import annotations

import argparse
import json
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from acsgd.comm.store import StoreClient
from acsgd.groups import Groups, connect
from acsgd.launch import set_variables
from acsgd.run import report
from acsgd.run.report import STEP_FIELDS, StepExchange, gather_rounds
from acsgd.topology import Topology

TIMEOUT = timedelta(hours=1)
PRELOAD = ["acsgd.groups", "acsgd.run.report"]
MODELLED = (128, 256, 512, 1000)
"""Numbers of ranks that the model is shown for."""
NUMBER_BYTES = 8
NEVER, ALWAYS = 0, 10**6
"""Numbers of ranks up to which reports are sent directly, for the form "rows" and for the form "direct"."""


class Cost(NamedTuple):
    """Mean over the ranks, of one exchange."""

    cpu_ms: float
    """CPU time of a rank, all threads."""
    requests: float
    """Requests to the store, without polls."""
    polls: float
    """Requests that found that a key is not there yet: as many as the rank waits long."""


class Meter:
    """CPU time of this process and its requests to the store, from one reading to the next."""

    def __init__(self) -> None:
        self.requests = self.polls = 0
        self._begin = 0.0
        call = StoreClient._call

        def counted(client: StoreClient, function: Callable[[], Any]) -> Any:
            result = call(client, function)
            self.requests += result is not False
            self.polls += result is False
            return result

        mock.patch.object(StoreClient, "_call", counted).start()

    def start(self) -> None:
        self.requests, self.polls, self._begin = 0, 0, time.process_time()

    def read(self, rounds: int = 1) -> Cost:
        cpu_ms = 1e3 * (time.process_time() - self._begin)
        return Cost(*(each / rounds for each in (cpu_ms, self.requests, self.polls)))


def be_rank(rank: int, size: int, port: int, options: argparse.Namespace) -> dict[str, Cost]:
    """Return the costs of one rank."""
    set_variables()
    torch.set_num_threads(1)
    meter, stages = Meter(), min(size, options.stages)
    topology = Topology.of(rank, size, stages)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    meter.start()
    with connect(topology, timeout=TIMEOUT, store=store) as groups:
        costs = {"start": meter.read()}
        for form, most in (("direct", ALWAYS), ("rows", NEVER)):
            with mock.patch.object(report, "MAX_DIRECT_RANKS", most):
                _exchange_reports(groups, topology, 1)  # whose messages open connections
                meter.start()
                _exchange_reports(groups, topology, options.rounds)
                costs[form] = meter.read(options.rounds)
        _exchange_texts(groups, 1)
        meter.start()
        _exchange_texts(groups, options.rounds // 4)
        costs["text"] = meter.read(options.rounds // 4)
        meter.start()
        if rank == size - 1:
            time.sleep(options.wait)
        groups.all_gather_text("late", "", timeout_s=TIMEOUT.total_seconds())
        costs["wait"] = meter.read()
        _exchange_texts(groups, 1)  # nobody leaves before the costs are read
    return costs


def _exchange_reports(groups: Groups, topology: Topology, rounds: int) -> None:
    for _ in range(rounds):
        StepExchange(groups, topology, STEP_FIELDS).exchange(dict.fromkeys(STEP_FIELDS, 1.0))


def _exchange_texts(groups: Groups, rounds: int) -> None:
    for _ in range(rounds):
        groups.all_gather_text("benchmark", 200 * "x", timeout_s=TIMEOUT.total_seconds())


def measure(size: int, options: argparse.Namespace) -> dict[str, Cost]:
    """Return the mean costs of the ranks of a run."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    with ProcessPoolExecutor(size, mp_context=context) as pool:
        ranks = [pool.submit(be_rank, rank, size, server.port, options) for rank in range(size)]
        costs = [each.result() for each in ranks]
    return {
        name: Cost(*(sum(of_name) / size for of_name in zip(*(each[name] for each in costs), strict=True)))
        for name in costs[0]
    }


def traffic(form: str, size: int) -> tuple[float, float]:
    """Return the messages that a rank sends for its report, the mean over the ranks, and the bytes."""
    if form == "direct":
        return size - 1.0, (size - 1.0) * len(STEP_FIELDS) * NUMBER_BYTES
    with mock.patch.object(report, "MAX_DIRECT_RANKS", NEVER):
        rounds = [each for rank in range(size) for each in gather_rounds(rank, size)]
    sent = [len(message.ranks) for each in rounds for message in each.sent]
    return len(sent) / size, sum(sent) * len(STEP_FIELDS) * NUMBER_BYTES / size


def fit(measured: dict[int, dict[str, Cost]]) -> Callable[[str, int], float]:
    """Return the CPU time of a report, ms, by its form and the number of ranks."""

    def terms(form: str, size: int) -> list[float]:
        return [1.0, traffic(form, size)[0], float(size)]  # every rank reads the numbers of all

    keys = [(form, size) for size in measured for form in ("direct", "rows")]
    inputs = torch.tensor([terms(*key) for key in keys], dtype=torch.float64)
    times = torch.tensor([[measured[size][form].cpu_ms] for form, size in keys], dtype=torch.float64)
    factors = torch.linalg.lstsq(inputs, times).solution[:, 0].tolist()
    return lambda form, size: sum(map(operator.mul, factors, terms(form, size)))


def lines(measured: dict[int, dict[str, Cost]]) -> Iterator[Sequence[str]]:
    """Yield the rows of the table."""
    for size, costs in measured.items():
        reports = [text for form in ("direct", "rows") for text in _report(form, size, costs[form].cpu_ms)]
        others = [costs["text"].requests, costs["wait"].polls, costs["start"].requests, costs["start"].polls]
        yield [str(size), *reports, f"{costs['text'].cpu_ms:.2f}", *(f"{each:.1f}" for each in others)]
    predict = fit(measured)
    for size in MODELLED:
        reports = [text for form in ("direct", "rows") for text in _report(form, size, predict(form, size))]
        yield [f"{size}, modelled", *reports, *[""] * 5]


def _report(form: str, size: int, cpu_ms: float) -> tuple[str, str]:
    return f"{traffic(form, size)[0]:.1f}", f"{cpu_ms:.2f}"


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/ranks.json"), help="where the numbers go")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=40, help="exchanges of reports; a quarter as many of texts")
    parser.add_argument("--wait", type=float, default=5.0, help="time that the last rank is late, seconds")
    parser.add_argument("--stages", type=int, default=4)
    options = parser.parse_args()
    console, measured = Console(width=160), dict[int, dict[str, Cost]]()
    for size in options.sizes:
        measured[size] = measure(size, options)
        console.print(size, measured[size], highlight=False)
    table = Table(title="Cost per rank")
    for name in (
        *("ranks", "direct: messages", "CPU, ms", "rows: messages", "CPU, ms"),
        *("text: CPU, ms", "requests", f"wait of {options.wait:g} s: polls", "start: requests", "polls"),
    ):
        table.add_column(name, justify="right")
    for line in lines(measured):
        table.add_row(*line)
    console.print(table)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({size: {k: v._asdict() for k, v in c.items()} for size, c in measured.items()}))


if __name__ == "__main__":
    main()
