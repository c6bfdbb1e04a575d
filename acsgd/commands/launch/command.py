"""The command `acsgd launch`: start a run by torchrun on this host, on several hosts over ssh, or under Slurm."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import tyro

from acsgd.comm.addresses import LOOPBACK, join_address
from acsgd.commands.invite import WorkerOptions
from acsgd.commands.launch.hosts import Remote, RemoteLaunch, log_of
from acsgd.commands.launch.supervisor import TorchrunJob
from acsgd.config.checks import check
from acsgd.config.options import Config
from acsgd.config.ranges import COUNT, Range
from acsgd.config.run_file import parse, with_run_options
from acsgd.launch import environment, start_torchrun
from acsgd.notes import print_note

MODES = {
    "hosts": ("address", "ssh", "dir", "python", "env"),
    "slurm": ("nodes", "sbatch"),
}
"""Options that only one way to launch uses."""
SAVE_S = 10.0
"""Of the grace time, what is left to the processes around torchrun, seconds."""
MAX_HOSTS = 1024
"""Maximum number of hosts of an elastic run."""


@dataclass(frozen=True)
class LaunchCommand(WorkerOptions):
    """Start a run: by torchrun on this host, on --hosts over ssh, or on nodes of --slurm.

    Prints the torchrun lines that it uses. Options of the run may follow, as in training: acsgd launch RUN.toml
    --hosts a,b --pp.stages 2. Ctrl-C stops the run, which saves; a second one ends it at once.
    """

    run_file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.toml")]
    """Run file."""
    hosts: str | None = None
    """Hosts, comma-separated, as ssh knows them: a,user@b. The first one has rank 0."""
    slurm: str | None = None
    """Partition of Slurm to which the run is submitted; returns at once."""
    nodes: Annotated[int, COUNT] | None = None
    """With --slurm: number of nodes. Default: 1."""
    sbatch: str | None = None
    """With --slurm: command that submits, with options such as "sbatch --time 4:00:00 --gres gpu:4". At the time limit
    the run saves and is submitted again. Default: sbatch."""
    elastic: bool = False
    """Whether the run continues without a host that is lost."""
    env: str | None = None
    """With --hosts: names of variables of this environment that they get, comma-separated, such as HF_TOKEN."""
    grace: Annotated[int, Range(SAVE_S, 10**6, above=True)] = 120
    """Time in which a run that is stopped saves, seconds; under Slurm it is stopped as long before its time limit."""
    address: str | None = None
    """With --hosts: name or address of the first host for the others. Default: that by which ssh reaches it."""
    ssh: str | None = None
    """With --hosts: command that connects, such as "ssh -p 2222". Default: ssh."""
    dir: str | None = None
    """With --hosts: working directory there. Default: the path of this one."""
    python: str | None = None
    """With --hosts: Python there. Default: the path of this one."""

    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Self:
        """Read the options of the command, and those of the run among them."""
        command, overrides = with_run_options(cls, argv, prog="acsgd launch")
        return dataclasses.replace(command, overrides=overrides)

    def run(self) -> None:
        """Run the command. Raises ValueError for invalid options, before anything is started."""
        self.check()
        if self.hosts is not None and self.slurm is not None:
            raise ValueError("--hosts and --slurm are two ways to start a run; remove one of them")
        for mode, names in MODES.items():
            for name in names:
                if getattr(self, mode) is None and getattr(self, name) is not None:
                    raise ValueError(f"--{name} is of a launch with --{mode}; remove it, or give --{mode}")
        if self.elastic and self.hosts is None and self.slurm is None:
            raise ValueError("--elastic is of several hosts; give --hosts or --slurm, or start acsgd host")
        config = parse([str(self.run_file), *self.overrides], prog="acsgd launch", is_main=False)
        check(config)
        variables = environment([name for name in (self.env or "").split(",") if name])
        if self.slurm is not None:
            self._submit(config, self.slurm)
        elif self.hosts is not None:
            self._run_on_hosts(config, variables)
        else:
            arguments = ["--standalone", *self._processes(), "-m", "acsgd", str(self.run_file), *self.overrides]
            print_note(f"torchrun {shlex.join(arguments)}")
            start_torchrun(arguments)

    def _submit(self, config: Config, partition: str) -> None:
        from acsgd.commands.launch.slurm import submission, submit  # imports torch

        command, variables = submission(
            config,
            partition,
            nodes=self.nodes or 1,
            grace_s=self.grace,
            save_s=self.grace - SAVE_S,
            elastic=self.elastic,
            sbatch=self.sbatch or "sbatch",
        )
        submit([*command, self.nproc, str(self.run_file), *self.overrides], variables, Path(config.log.dir) / "logs")

    def _run_on_hosts(self, config: Config, variables: dict[str, str]) -> None:
        remote = Remote(self.ssh or "ssh", self.dir or os.getcwd(), self.python or sys.executable)
        if not (words := shlex.split(remote.ssh)) or shutil.which(words[0]) is None:
            raise ValueError(f"--ssh={remote.ssh} is no command of this host; install ssh, or give another")
        logs = Path(config.log.dir) / "logs"
        with RemoteLaunch(_names(self.hosts or ""), remote, logs, may_lack=self.elastic) as launch:
            launch.connect()
            arguments = self._elastic(launch, variables) if self.elastic else self._static(launch)
            for host, each in zip(launch.hosts, arguments, strict=True):
                shown = shlex.join([*each, "-m", "acsgd", str(self.run_file), *self.overrides])
                print_note(f"{host.name}: torchrun {shown}")
            print_note(f"what each host prints: {log_of(logs, '*')}")
            content, options = self.run_file.read_text(), [*self.overrides]
            launch.run(
                [TorchrunJob(each, content, options, variables, self.grace, secrets.token_hex(8)) for each in arguments]
            )

    def _static(self, launch: RemoteLaunch) -> list[list[str]]:
        """Return the arguments of torchrun for each host: the first has the store at which all meet."""
        number, address, port = len(launch.hosts), self._addresses(launch)[0], launch.hosts[0].port
        return [
            ["--nnodes", str(number), "--node-rank", str(rank), *self._processes()]
            + ["--master-addr", address, "--master-port", str(port)]
            for rank in range(number)
        ]

    def _elastic(self, launch: RemoteLaunch, variables: dict[str, str]) -> list[list[str]]:
        """Return the arguments of torchrun for each host. The first three are those at which the hosts meet.

        Adds the secret of the run to the variables.
        """
        variables.setdefault("ACSGD_SECRET", secrets.token_hex(16))
        addresses = zip(self._addresses(launch), launch.hosts, strict=True)
        endpoints = [join_address(address, host.port or 0) for address, host in addresses][:3]
        arguments = ["--nnodes", f"{len(launch.hosts)}:{MAX_HOSTS}", *self._processes(), "--max-restarts", "3"]
        arguments += ["--rdzv-backend", "acsgd", "--rdzv-endpoint", ",".join(endpoints)]
        return [[*arguments, "--rdzv-id", f"launch-{secrets.token_hex(4)}"]] * len(launch.hosts)

    def _processes(self) -> list[str]:
        return ["--nproc-per-node", self.nproc, "--shutdown-timeout", f"{self.grace - SAVE_S:g}"]

    def _addresses(self, launch: RemoteLaunch) -> list[str]:
        """Return the addresses of the first hosts. Raises ValueError if one is a loopback address, and others not."""
        found = [launch.remote.address(host.name) for host in launch.hosts]
        if self.address is not None:
            found[0] = self.address
        own = [host.name for host, address in zip(launch.hosts, found, strict=True) if address in LOOPBACK]
        if own and len(own) < len(found):
            raise ValueError(
                f"--hosts has {own[0]}, which is a loopback address, which the others do not reach; give one that "
                "they reach" + (", or give --address" if own[0] == launch.hosts[0].name else "")
            )
        return found


def _names(text: str) -> list[str]:
    """Return the hosts of --hosts. Raises ValueError for one that is no host, or is there twice."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not re.fullmatch(r"[\w.:@\[\]%][\w.:@\[\]%-]*", name):
            raise ValueError(f"--hosts={text} must be names of hosts, comma-separated, as a,user@b")
        if names.count(name) > 1:
            raise ValueError(f"--hosts names {name} twice; give each once, and its processes: --nproc")
    return names
