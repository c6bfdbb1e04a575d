"""Step time and recovery of a run with a mesh, relative to the same run without one; needs root:

    .venv/bin/python -m benchmarks.mesh.steps [--starts 3] [--workers 2] [--json runs/benchmarks/mesh_steps.json]

Two hosts with --workers each are network namespaces, 100 Mbit/s and 20 ms there and back apart. They train a GPT-2 of
2.6 M parameters with a tied embedding in two stages, and in two replicas if each has two workers. Two runs take turns,
one with a mesh and one without: all processes of one are stopped while the other completes a block of steps. Both are
started again after PAIRS pairs of blocks.

exact       dp.mode=allreduce
compressed  dp.mode=cocktail, pp.forward=delta, pp.tied=rows

step time   geometric mean of the ratios of the blocks of a pair, and its 95 % interval over the starts
agents      what the processes of torchrun did per step, on both hosts together; with a mesh they also forward: CPU
            time, time in which a thread could run and had no core, and how often one was woken
recovery    at the end of each start, the second host is killed: from SIGKILL to the next step; and of that the time for
            which training stood still, `recovery_s` in metrics.jsonl. Not with one worker: a stage is lost then
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import secrets
import signal
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common.netlab import lab
from benchmarks.common.small_model import save_blank
from benchmarks.runs.recovery import RUN_FILE
from benchmarks.runs.recovery_cost import NEVER, mean_ratio
from benchmarks.runs.recovery_hosts import Hosts
from tests.lib.forked_torchrun import send

MODES = {
    "exact": ("--dp.mode", "allreduce"),
    "compressed": ("--dp.mode", "cocktail", "--pp.forward", "delta", "--pp.tied", "rows"),
}
NAMES = "ab"
MBIT, DELAY_S = 100.0, 0.01
WARMUP, STEPS, PAIRS = 3, 8, 3
"""Steps before and in a block, and pairs of blocks of a start."""
MAX_RATIO, MAX_ADDED_S = 1.02, 0.2
"""Goals: of the step time, and of the time to the next step after a kill."""


class AgentLoad(NamedTuple):
    """What the processes of torchrun of a run do, in total or per step."""

    cpu_ms: float
    no_core_ms: float
    """Time in which a thread could run, and had no core."""
    wakes: float

    @classmethod
    def of(cls, pids: Sequence[int]) -> AgentLoad:
        """Return the total so far of some processes."""
        sums = [0, 0, 0]
        for thread in (thread for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir()):
            with contextlib.suppress(OSError):  # it has ended
                cpu_ns, no_core_ns, _ = map(int, (thread / "schedstat").read_text().split())
                _, _, rest = (thread / "status").read_text().partition("\nvoluntary_ctxt_switches:")
                sums = [sum(pair) for pair in zip(sums, (cpu_ns, no_core_ns, int(rest.split()[0])), strict=True)]
        return cls(sums[0] / 1e6, sums[1] / 1e6, sums[2])

    def per_step_since(self, before: AgentLoad, steps: int) -> AgentLoad:
        """Return what was done per step since an earlier total."""
        return AgentLoad(*((now - then) / steps for now, then in zip(self, before, strict=True)))


@dataclass
class Comparison:
    """A mode. Lists have one entry per start; pairs are of a run with a mesh and of one without."""

    mode: str
    step_s: list[list[tuple[float, float]]] = field(default_factory=list)
    """Seconds per step of each pair of blocks."""
    agents: list[list[tuple[AgentLoad, AgentLoad]]] = field(default_factory=list)
    """Per step of each pair of blocks."""
    next_step_s: list[tuple[float, float]] = field(default_factory=list)
    recovery_s: list[tuple[float, float]] = field(default_factory=list)


def measure(comparison: Comparison, directory: Path, run_file: Path, workers: int) -> None:
    """Add a start of both runs."""
    directory.mkdir()
    (secret := directory / "secret").touch(0o600)
    secret.write_text(secrets.token_hex(24))
    flags = (*MODES[comparison.mode], "--pp.stages", "2", "--elastic.snapshot", "0", *NEVER)
    with lab(hosts=len(NAMES), delay_s=DELAY_S) as network, contextlib.ExitStack() as stack:
        network.limit(MBIT)
        runs = []
        for name, conf in (("mesh", ("--rdzv-conf", f"mesh=true,secret={secret}")), ("direct", ())):
            flags_of_torchrun = ("--nproc-per-node", str(workers), *conf)
            run = Hosts(
                directory / name,
                run_file,
                "elastic",
                flags,
                torchrun_flags=flags_of_torchrun,
                is_forked=True,
                network=network,
            )
            runs.append(stack.enter_context(run))
            for host in NAMES:
                run.start(host, min_hosts=len(NAMES))
            run.wait_until(lambda run=run: run.watch.last_step >= WARMUP)
            send(signal.SIGSTOP, run.pids(*NAMES))
        blocks = []
        for index in range(PAIRS):
            done = {run: _block(run) for run in runs[:: -1 if index % 2 else 1]}
            blocks.append((done[runs[0]], done[runs[1]]))
        comparison.step_s.append([(mesh[0], direct[0]) for mesh, direct in blocks])
        comparison.agents.append([(mesh[1], direct[1]) for mesh, direct in blocks])
        if workers > 1:
            (mesh, its), (direct, their) = map(_recover, runs)
            comparison.next_step_s.append((mesh, direct))
            comparison.recovery_s.append((its, their))


def _block(run: Hosts) -> tuple[float, AgentLoad]:
    """Continue a run for a block of steps; return the time of one, and what agents do in one."""
    pids = run.pids(*NAMES)
    agents = [*{*pids} - {*run.workers(*NAMES)}]
    send(signal.SIGCONT, pids)
    warm = run.watch.last_step + WARMUP
    run.wait_until(lambda: run.watch.last_step >= warm)
    first, before = run.watch.last_step, AgentLoad.of(agents)
    run.wait_until(lambda: run.watch.last_step >= first + STEPS)
    last, after = run.watch.last_step, AgentLoad.of(agents)
    send(signal.SIGSTOP, pids)
    at = {arrival.line["step"]: arrival.at for arrival in run.watch.steps}
    return (at[last] - at[first]) / (last - first), after.per_step_since(before, last - first)


def _recover(run: Hosts) -> tuple[float, float]:
    """Continue a run, and kill its second host; return the time to the next step, and what its view says."""
    send(signal.SIGCONT, run.pids(*NAMES))
    goal = run.watch.last_step + WARMUP
    run.wait_until(lambda: run.watch.last_step >= goal)
    killed_at = send(signal.SIGKILL, run.pids(NAMES[1]))

    def after() -> tuple[float, float] | None:
        views = [each for each in run.watch.arrivals if each.at > killed_at and each.line.get("event") == "view"]
        steps = [each.at for each in run.watch.arrivals if views and each.is_step and each.at >= views[0].at]
        return (steps[0] - killed_at, views[0].line["recovery_s"]) if steps else None

    run.wait_until(after)
    send(signal.SIGKILL, run.pids(NAMES[0]))
    times = after()
    assert times is not None
    return times


def table(comparisons: Sequence[Comparison]) -> Table:
    """Return a row per mode; the goals are in the last columns."""
    shown = Table(title=f"A run with a mesh and without, {MBIT:g} Mbit/s", title_justify="left")
    for column in ("mode", "step, s", "mesh / direct", "95 % interval", "goal", "next step, s: mesh", "direct"):
        shown.add_column(column)
    shown.add_column("stood still, s: mesh, direct")
    shown.add_column(f"added, s; goal {MAX_ADDED_S:g}")
    for each in comparisons:
        ratios = [statistics.geometric_mean(ours / theirs for ours, theirs in pairs) for pairs in each.step_s]
        low, mean, high = mean_ratio(ratios)
        usual = statistics.median(theirs for pairs in each.step_s for _, theirs in pairs)
        cells = [each.mode, f"{usual:.2f}", f"{mean:.3f}", f"{low:.3f} - {high:.3f}", f"{MAX_RATIO:g}"]
        if each.next_step_s:
            (mesh, direct), still = zip(*each.next_step_s, strict=True), zip(*each.recovery_s, strict=True)
            added = statistics.median(mesh) - statistics.median(direct)
            cells += [_summary(mesh), _summary(direct), ", ".join(map(_summary, still)), f"{added:.2f}"]
        shown.add_row(*cells)
    return shown


def agent_table(comparisons: Sequence[Comparison]) -> Table:
    """Return what agents did per step, with a mesh and without."""
    shown = Table(title="Agents of both hosts, per step: median (range)", title_justify="left")
    for column in ("mode", "CPU, ms: mesh", "direct", "without a core, ms: mesh", "direct", "wakes: mesh", "direct"):
        shown.add_column(column)
    for each in comparisons:
        runs = [*zip(*(pair for start in each.agents for pair in start), strict=True)]  # with a mesh, and without
        loads = [_summary(numbers, ".0f") for numbers in zip(*runs[0], strict=True)]
        direct = [_summary(numbers, ".0f") for numbers in zip(*runs[1], strict=True)]
        shown.add_row(each.mode, *(cell for pair in zip(loads, direct, strict=True) for cell in pair))
    return shown


def _summary(numbers: Sequence[float], form: str = ".2f") -> str:
    return f"{statistics.median(numbers):{form}} ({min(numbers):{form}} - {max(numbers):{form}})"


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=3, help="starts of both runs, of each mode")
    parser.add_argument("--workers", type=int, default=2, help="of each host")
    parser.add_argument(
        "--json", type=Path, default=Path("runs/benchmarks/mesh_steps.json"), help="path of the results"
    )
    options, console = parser.parse_args(), Console(width=140)
    comparisons = [Comparison(mode) for mode in MODES]
    loads = []
    with tempfile.TemporaryDirectory(prefix="mesh-steps-") as scratch:
        directory = Path(scratch)
        (directory / "model").mkdir()
        text = "\n".join(topics.values())
        save_blank(directory / "model", text, vocabulary=4096, sequence=64, hidden=192, blocks=4, heads=3)
        (run_file := directory / "run.toml").write_text(RUN_FILE.format(model=directory / "model"))
        for start in range(options.starts):
            for each in comparisons:
                measure(each, directory / f"{each.mode} {start}", run_file, options.workers)
                loads.append(os.getloadavg()[0])
                console.print(
                    f"start {start + 1}, {each.mode}, load {loads[-1]:.1f}: {each.step_s[-1]}", highlight=False
                )
    console.print(table(comparisons))
    console.print(agent_table(comparisons))
    about: dict[str, object] = {"torch": torch.__version__, "python": platform.python_version()}
    about |= {"cores": os.cpu_count(), "loads": loads, "workers": options.workers}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "comparisons": list(map(asdict, comparisons))}))


if __name__ == "__main__":
    main()
