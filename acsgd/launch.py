"""How this process was started: its rank and its place on the host, from torchrun's environment."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_DAEMON = "ACSGD_DAEMON"
"""Environment variable with the socket of this host's daemon, in an elastic run."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the network interface that gloo uses. Default: that to whose address the host's name
resolves."""
_MESH = "ACSGD_MESH"
"""Environment variable with the virtual address of this host and the socket of its mesh, in a run with a mesh."""
_SECRET = "ACSGD_SECRET"
"""Environment variable with the secret by which the hosts of an elastic run know each other."""


@dataclass(frozen=True)
class Launch:
    """The process's rank and its place on the host. Default: a run of one process."""

    rank: int = 0
    local_rank: int = 0
    """Rank within this host."""
    world_size: int = 1
    local_world_size: int = 1
    """Number of processes of the run on this host."""
    attempt: int = 0
    """How often torchrun of this host has started its workers again (--max-restarts)."""
    under_torchrun: bool = False
    """Whether torchrun started this process."""
    error_file: str = ""
    """File whose content torchrun prints if this process fails; empty = none."""
    rendezvous: tuple[str, int] | None = None
    """Host and port of the store of a run on several hosts."""
    daemon: str = ""
    """Socket of the daemon of this host; empty if the run is not elastic."""
    mesh: tuple[str, str] | None = None
    """Virtual address of this host and socket of its mesh; None in a run without a mesh."""

    @classmethod
    def from_env(cls) -> Launch:
        """Read torchrun's environment variables. The only file in the package that uses the environment.

        Raises SystemExit with a sentence if one of them is not a number, or if this process is one of several that
        srun or mpirun has started in place of torchrun.
        """
        env = os.environ
        _refuse_tasks_of_a_job()
        return cls(
            rank=_number("RANK", 0),
            local_rank=_number("LOCAL_RANK", 0),
            world_size=_number("WORLD_SIZE", 1),
            local_world_size=_number("LOCAL_WORLD_SIZE", 1),
            attempt=_number("TORCHELASTIC_RESTART_COUNT", 0),
            under_torchrun="TORCHELASTIC_RUN_ID" in env,
            error_file=env.get("TORCHELASTIC_ERROR_FILE", ""),
            rendezvous=(env["MASTER_ADDR"], _number("MASTER_PORT", 0)) if "MASTER_ADDR" in env else None,
            daemon=daemon_of(env),
            mesh=_address_and_socket(env.get(_MESH, "")),
        )

    @property
    def is_one_host(self) -> bool:
        """Whether all processes of the run are on this host."""
        return self.world_size == self.local_world_size


def run_secret() -> str | None:
    """Return the secret by which the hosts of an elastic run know each other; None if none is given."""
    return os.environ.get(_SECRET)


_TORCHRUN = f"""\
import os, signal, sys
former = signal.getsignal(signal.SIGINT)  # ignored, if this process was started in the background
if former is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C among the imports ends without a traceback
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main
signal.signal(signal.SIGINT, former)  # from here on, there is something to clean up
try:
    main()
except KeyboardInterrupt:
    sys.exit(128 + signal.SIGINT)
except SignalException as stop:  # the workers have ended; without a traceback
    if {_DAEMON!r} in os.environ:
        raise  # an elastic run has a hook that prints what this host has left
    sys.exit(128 + stop.sigval)
"""


def torchrun(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs torchrun with this Python."""
    return [sys.executable, "-c", _TORCHRUN, *arguments]


def start_torchrun(arguments: Sequence[str]) -> NoReturn:
    """Start torchrun in place of this process."""
    os.execv(sys.executable, torchrun(arguments))


def environment(names: Sequence[str] = ()) -> dict[str, str]:
    """Return the values of some variables of the environment. Raises ValueError for one that is not set."""
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(f"the environment has no variable {missing[0]}; set it, or leave it out")
    return {name: os.environ[name] for name in names}


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with some variables, and this Python's directory first in PATH, for a command."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path, **variables}


def publish_daemon(socket: Path, *, interface: str | None) -> None:
    """Give the workers that this process starts the socket of the daemon, and gloo's network interface.

    interface: as in `set_interface`.
    """
    os.environ[_DAEMON] = str(socket)
    set_interface(interface)


def publish_mesh(address: str, socket: Path) -> None:
    """Give the workers that this process starts the virtual address of this host and the socket of its mesh.

    gloo of a group that does not use this address gets the loopback interface, by which no other host is reached.
    """
    os.environ[_MESH] = f"{address} {socket}"
    os.environ[_INTERFACE] = "lo"


def _address_and_socket(text: str) -> tuple[str, str] | None:
    address, _, socket = text.partition(" ")
    return (address, socket) if socket else None


def set_interface(interface: str | None) -> None:
    """Set the network interface of gloo. None leaves the choice to gloo, as does a variable that the user has set."""
    if interface is not None:
        os.environ.setdefault(_INTERFACE, interface)


def gloo_interface() -> str | None:
    """Return the value of GLOO_SOCKET_IFNAME; None if it is not set."""
    return os.environ.get(_INTERFACE)


_VARIABLES = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # each request to a store that has ended would print a stack of C++
    "GLOO_ENABLE_STORE_V2_API": "1",  # a rank gets the addresses of all others of a group in one request
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # streams that share a queue wait for each other, as a send for a receive
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # torch would end a process that has lost a peer, without a sentence
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # threads of torch would use a store that has been closed
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def set_variables() -> None:
    """Set what torch reads when it is imported, and gloo, NCCL and CUDA when they start, unless the user has set it."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)


def daemon_of(environment: Mapping[str, str]) -> str:
    """Return the socket of the daemon in the environment of a worker; empty if that of another process is given."""
    return environment.get(_DAEMON, "")


def forbid_restart() -> None:
    """Let torchrun of this host end after this worker, instead of starting it again: it would fail again."""
    if daemon := os.environ.get(_DAEMON):
        with contextlib.suppress(OSError):  # torchrun has ended already
            _forbidden(Path(daemon)).touch()


def is_restart_forbidden(daemon: Path) -> bool:
    """Return whether a worker has called `forbid_restart`. daemon: the socket of the daemon."""
    return _forbidden(daemon).exists()


def _forbidden(daemon: Path) -> Path:
    return daemon.with_suffix(".failed")


_LAUNCHERS = (
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpiexec", "PMI_SIZE", "PMI_RANK"),
    ("mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    ("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
)
"""What starts several processes, and its variables for their number and for the number of this one."""


def refuse_several_processes(command: str) -> None:
    """Raise SystemExit with a sentence if this process is one of several, of which each would run the whole command."""
    if _number("WORLD_SIZE", 1) > 1:
        if _number("RANK", 0) == 0:
            print(f"error: {command} runs in one process; start it without torchrun", file=sys.stderr)
        raise SystemExit(2)
    _refuse_tasks_of_a_job()


def _refuse_tasks_of_a_job() -> None:
    """Raise SystemExit if this process is one of several without ranks, of which none would know of the others."""
    for name, size, rank in _LAUNCHERS:
        if "RANK" not in os.environ and _number(size, 1) > 1:
            if _number(rank, 0) == 0:
                print(
                    f"error: {name} has started {os.environ[size]} processes, each would do everything alone; start "
                    f"one or, to train or evaluate, let {name} start torchrun, once per host (slurm/train.sbatch does)",
                    file=sys.stderr,
                )
            raise SystemExit(2)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        print(f"error: {variable}={text} in the environment is not a number; start with torchrun", file=sys.stderr)
        raise SystemExit(2)
    return int(text)
