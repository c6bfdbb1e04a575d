"""Cost per rank of what all ranks do together, by the number of ranks, and a model of it for more:

    .venv/bin/python -m benchmarks.runs.ranks [--sizes 2 4 8 16 32 64] [--json runs/benchmarks/ranks.json]

Ranks are processes of this host that compute nothing: counts, which no load changes, and CPU time, which varies with
it. No times, which depend on the number of cores.

report  the exchange of reports at the end of a step, directly between all ranks and by rows: see `gather_rounds`.
        Wakes are those of all threads of a rank: it has waited, and goes on
text    an exchange of texts of --text bytes, each another one, through the store, as savers make
wait    the same, for whose last rank the others wait for --wait seconds
start   opening the groups of pipelines of --stages ranks, until the first message

Polls are requests to the store that find that a key is not there yet: as many as a rank waits long. The bytes of the
store are those of keys and values, sent and received.

The model is a least-squares fit of the CPU time of a report to a constant, the messages that a rank sends, and the
number of ranks, whose numbers it reads. That of the store is the CPU time of its process per request, all measured
requests together, times those of all ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import operator
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from acsgd.comm.store import NONE
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
FORMS = "direct", "rows"
NEVER, ALWAYS = 0, 10**6
"""Numbers of ranks up to which reports are sent directly, for the form "rows" and for the form "direct"."""


class Cost(NamedTuple):
    """Mean over the ranks, of one exchange."""

    cpu_ms: float
    """CPU time of a rank, all threads."""
    wakes: float
    requests: float
    """Requests to the store, without polls."""
    polls: float
    store_bytes: float


class CountedStore:
    """A store that counts requests."""

    def __init__(self, store: dist.Store) -> None:
        self.requests = self.polls = self.nbytes = 0
        self._store = store

    def has_extended_api(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            result = method(*args)
            is_poll = result is False or result == NONE.encode()
            self.requests += not is_poll
            self.polls += is_poll
            self.nbytes += sum(map(_size, (*args, result)))
            return result

        return counted


def _size(value: object) -> int:
    """Return the bytes of a key or a value, or of several."""
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(value) if isinstance(value, (str, bytes)) else 0


class Meter:
    """What this process does, from one reading to the next."""

    def __init__(self, store: CountedStore) -> None:
        self._store = store
        self._begin = self._now()

    def start(self) -> None:
        self._begin = self._now()

    def read(self, rounds: int = 1) -> Cost:
        return Cost(*((now - begin) / rounds for begin, now in zip(self._begin, self._now(), strict=True)))

    def _now(self) -> Cost:
        wakes = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        return Cost(1e3 * time.process_time(), wakes, self._store.requests, self._store.polls, self._store.nbytes)


def be_rank(rank: int, size: int, port: int, options: argparse.Namespace) -> dict[str, Cost]:
    """Return the costs of one rank."""
    set_variables()
    torch.set_num_threads(1)
    topology = Topology.of(rank, size, min(size, options.stages))
    store = CountedStore(dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT))
    all_costs, meter = Meter(store), Meter(store)
    with connect(topology, timeout=TIMEOUT, store=cast(dist.Store, store)) as groups:
        costs = {"start": meter.read()}
        for form, most in zip(FORMS, (ALWAYS, NEVER), strict=True):
            with mock.patch.object(report, "MAX_DIRECT_ON_HOST", most):
                _exchange_reports(groups, topology, 1)  # whose messages open connections
                meter.start()
                _exchange_reports(groups, topology, options.rounds)
                costs[form] = meter.read(options.rounds)
        text = random.Random(rank).randbytes(options.text // 2).hex()
        _exchange_texts(groups, text, 1)
        meter.start()
        _exchange_texts(groups, text, options.rounds // 4)
        costs["text"] = meter.read(options.rounds // 4)
        meter.start()
        if rank == size - 1:
            time.sleep(options.wait)
        groups.all_gather_text("late", "", timeout_s=TIMEOUT.total_seconds())
        costs["wait"] = meter.read()
        _exchange_texts(groups, "", 1)  # nobody leaves before the costs are read
        costs["all"] = all_costs.read()
    return costs


def _exchange_reports(groups: Groups, topology: Topology, rounds: int) -> None:
    for _ in range(rounds):
        StepExchange(groups, topology, STEP_FIELDS).exchange(dict.fromkeys(STEP_FIELDS, 1.0))


def _exchange_texts(groups: Groups, text: str, rounds: int) -> None:
    for _ in range(rounds):
        groups.all_gather_text("benchmark", text, timeout_s=TIMEOUT.total_seconds())


def measure(size: int, options: argparse.Namespace) -> dict[str, Cost]:
    """Return the mean costs of the ranks of a run, and, as CPU time of "store", that of the store per request."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    with ProcessPoolExecutor(size, mp_context=context) as pool:
        begin = time.process_time()  # this process, in which the store is, does nothing else
        ranks = [pool.submit(be_rank, rank, size, server.port, options) for rank in range(size)]
        costs = [each.result() for each in ranks]
        store_ms = 1e3 * (time.process_time() - begin)
    means = {
        name: Cost(*(sum(of_name) / size for of_name in zip(*(each[name] for each in costs), strict=True)))
        for name in costs[0]
    }
    return means | {"store": Cost(store_ms / size / (means["all"].requests + means["all"].polls), 0, 0, 0, 0)}


def traffic(form: str, size: int) -> tuple[float, float]:
    """Return the messages that a rank sends for its report, the mean over the ranks, and the bytes."""
    if form == "direct":
        return size - 1.0, (size - 1.0) * len(STEP_FIELDS) * NUMBER_BYTES
    rounds = [each for rank in range(size) for each in gather_rounds(rank, size, NEVER)]
    sent = [len(message.ranks) for each in rounds for message in each.sent]
    return len(sent) / size, sum(sent) * len(STEP_FIELDS) * NUMBER_BYTES / size


def fit(measured: dict[int, dict[str, Cost]]) -> Callable[[str, int], float]:
    """Return the CPU time of a report, ms, by its form and the number of ranks."""

    def terms(form: str, size: int) -> list[float]:
        return [1.0, traffic(form, size)[0], float(size)]  # every rank reads the numbers of all

    keys = [(form, size) for size in measured for form in FORMS]
    inputs = torch.tensor([terms(*key) for key in keys], dtype=torch.float64)
    times = torch.tensor([[measured[size][form].cpu_ms] for form, size in keys], dtype=torch.float64)
    used = [0, 1, 2]
    while min(factors := torch.linalg.lstsq(inputs[:, used], times).solution[:, 0].tolist()) < 0:
        del used[factors.index(min(factors))]  # nothing takes negative time
    return lambda form, size: sum(map(operator.mul, factors, (terms(form, size)[term] for term in used)))


def report_lines(measured: dict[int, dict[str, Cost]]) -> Iterator[Sequence[str]]:
    """Yield the rows of the table of reports."""
    for size, costs in measured.items():
        of_form = [[*_report(form, size, costs[form].cpu_ms), f"{costs[form].wakes:.1f}"] for form in FORMS]
        yield [str(size), *itertools.chain(*of_form)]
    predict = fit(measured)
    for size in MODELLED:
        of_form = [[*_report(form, size, predict(form, size)), ""] for form in FORMS]
        yield [f"{size}, modelled", *itertools.chain(*of_form)]


def _report(form: str, size: int, cpu_ms: float) -> list[str]:
    messages, nbytes = traffic(form, size)
    return [f"{messages:.1f}", f"{nbytes / 1e3:.1f}", f"{cpu_ms:.2f}"]


def store_lines(measured: dict[int, dict[str, Cost]]) -> Iterator[Sequence[str]]:
    """Yield the rows of the table of the store; in the last ones, requests are those of the most ranks measured."""
    for size, costs in measured.items():
        start, text, wait = costs["start"], costs["text"], costs["wait"]
        of_start = [start.requests, start.polls, start.store_bytes / 1e3, start.cpu_ms]
        of_text = [
            text.requests,
            text.store_bytes / 1e3,
            text.cpu_ms,
            wait.requests + wait.polls,
            wait.store_bytes / 1e3,
        ]
        yield [str(size), *(f"{each:.1f}" for each in [*of_start, *of_text]), f"{1e3 * costs['store'].cpu_ms:.0f}", ""]
    costs = measured[max(measured)]
    requests = costs["start"].requests, costs["text"].requests
    for ranks in MODELLED:
        start_s, text_s = (ranks * each * costs["store"].cpu_ms / 1e3 for each in requests)
        yield [f"{ranks}, modelled", *[""] * 10, f"{start_s:.2f}, {text_s:.2f}"]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/ranks.json"), help="where the numbers go")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=40, help="exchanges of reports; a quarter as many of texts")
    parser.add_argument("--wait", type=float, default=5.0, help="time that the last rank is late, seconds")
    parser.add_argument("--text", type=int, default=200, help="length of a rank's text, bytes")
    parser.add_argument("--stages", type=int, default=4)
    options = parser.parse_args()
    console, measured = Console(width=160), dict[int, dict[str, Cost]]()
    for size in options.sizes:
        measured[size] = measure(size, options)
        console.print(size, measured[size], highlight=False)
    columns = "messages", "kB", "CPU, ms", "wakes"
    _print(console, "Report", [f"{form}: {each}" for form in FORMS for each in columns], report_lines(measured))
    names = [
        *("start: requests", "polls", "kB", "CPU, ms", "text: requests", "kB", "CPU, ms"),
        *(f"wait of {options.wait:g} s: requests", "kB", "store: us per request", "s per start, text"),
    ]
    _print(console, "Store", names, store_lines(measured))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({size: {k: v._asdict() for k, v in c.items()} for size, c in measured.items()}))


def _print(console: Console, title: str, columns: Sequence[str], rows: Iterator[Sequence[str]]) -> None:
    table = Table(title=title)
    for name in ("ranks", *columns):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
