"""Fine-tune a Hugging Face model over pipeline stages x replicas.

    torchrun --nproc-per-node 4 train.py examples/gpt2.toml                    # stages and replicas as in the file
    torchrun --nproc-per-node 4 train.py examples/gpt2.toml --pp.stages 4      # one pipeline of 4 stages
    torchrun --nproc-per-node 4 -m acsgd RUN.toml                              # installed, without a checkout
    python train.py examples/gpt2.toml --pp.stages 1                           # one process; also: acsgd train RUN.toml
    python train.py --help                                                     # every option with its default

Flags override the file. The run directory (log.dir) gets config.toml, metrics.jsonl, logs/ and checkpoints/. The same
command, with any number of processes, resumes from the newest checkpoint. SIGINT, SIGTERM, SIGUSR1 and SIGHUP (the
terminal was closed) stop the run after the current step, in an evaluation or a wait for streamed data, and save it.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from acsgd.config.options import Config
from acsgd.config.run_file import parse
from acsgd.elastic.worker import run_elastic
from acsgd.failures.failures import RunContext, report_failure
from acsgd.failures.report import report_startup_error
from acsgd.failures.signals import StopSignals, starting
from acsgd.groups import clone_store, connect, open_store
from acsgd.io.files.cache import TIMEOUT_S
from acsgd.launch import Launch
from acsgd.notes import print_note
from acsgd.run.lock.lock import RunLock, leases_of
from acsgd.run.plan.job import Job, prepare, with_local_checkpoint
from acsgd.run.setup.auto import Chosen, choose_hosts, choose_options, chooses_hosts
from acsgd.run.setup.build import open_transports
from acsgd.run.setup.directories import check_room, find_run_disks, open_disks
from acsgd.run.setup.inputs import open_inputs
from acsgd.run.setup.measured import find_transports
from acsgd.train import train


def main(argv: list[str], launch: Launch, *, prog: str, end: Callable[[int], None]) -> None:
    """Run a training job from its command line: prepare it, connect the ranks, train.

    prog: name of the command; end: see `report_failure`. Raises ReportedError after a failure.
    """
    if launch.daemon:
        _run_elastic(argv, launch, prog, end)
        return
    with report_startup_error(launch), starting(launch, end):
        store = open_store(launch)
        store_of_failures = clone_store(store, launch)
    with contextlib.ExitStack() as stack, report_failure(store_of_failures, launch, end) as context:
        config = parse(argv, prog=prog, is_main=launch.rank == 0)
        run(config, launch, store, context, stack, end)


def _run_elastic(argv: list[str], launch: Launch, prog: str, end: Callable[[int], None]) -> None:
    """Run a training job of which hosts may join and leave: to failure reports, this process is alone."""
    alone = replace(launch, rank=0, world_size=1)
    with report_failure(dist.HashStore(), alone, end) as context:
        config = with_local_checkpoint(parse(argv, prog=prog, is_main=launch.local_rank == 0))
        run_elastic(config, launch, context, end)
    sys.stdout.flush()
    end(0)  # threads that were left behind in interrupted waits would abort an orderly end


def run(
    config: Config,
    launch: Launch,
    store: dist.Store,
    context: RunContext,
    stack: contextlib.ExitStack,
    end: Callable[[int], None],
) -> None:
    """Prepare a run, connect its ranks, and train. context: receives what failure reports need.

    stack: receives what must outlive a failure report. end: see `main`.
    """
    context.run_dir = Path(config.log.dir)
    signals = context.signals = stack.enter_context(StopSignals(end))
    job = prepare(with_local_checkpoint(config), launch)
    context.timeout_s = config.run.timeout
    timeout, several = timedelta(seconds=config.run.timeout), not launch.is_one_host
    job, placed = _order_hosts(job, timeout, store)
    groups = stack.enter_context(
        connect(
            job.topology,
            timeout=timeout,
            store=store,
            several_hosts=several,
            domain=job.domain,
            divides=job.config.dp.shard != "none",
            connections=job.config.run.connections,
            congestion=job.config.run.congestion,
        )
    )
    transports = find_transports(job, groups)
    job, chosen = choose_options(job, launch, groups, transports)
    groups, notes = open_transports(job, groups, transports)
    disks = find_run_disks(job, groups, host=socket.gethostname())
    lock = stack.enter_context(RunLock(leases_of(job, disks.log, disks.checkpoints)))
    context.cleanup = lock.release  # before the first lease is acquired: from then on, any rank may fail
    lock.acquire(groups, config.run.timeout)
    for note in [*notes, *check_room(job, groups, disks.checkpoints), *open_disks(job, groups, disks)]:
        if launch.rank == 0:
            print_note(note)
    can_be_elastic = disks.checkpoints.is_shared and (config.dp.shard == "none" or job.divides_in_domains)
    if launch.rank == 0 and not launch.is_one_host and can_be_elastic:
        print_note("hosts may join and leave this run if it is started with torchrun --rdzv-backend acsgd")
    inputs = open_inputs(job, groups, disks)
    groups.wait_for_all("opening the inputs", timeout_s=TIMEOUT_S)  # as long as another host may tokenize

    def on_start() -> None:
        context.end_set_up()
        context.start_training()

    with groups.naming_lost_ranks():
        train(job, inputs, groups, lock, on_start=on_start, signals=signals, chosen=[*placed, *chosen])


def _order_hosts(job: Job, timeout: timedelta, store: dist.Store) -> tuple[Job, list[Chosen]]:
    """Return the job with the order of hosts that pp.hosts=auto takes, measured over groups that are closed again."""
    if not chooses_hosts(job):
        return job, []
    with connect(job.topology, timeout=timeout, store=dist.PrefixStore("hosts", store)) as groups:
        job, choice = choose_hosts(job, groups)
    return job, [choice]
