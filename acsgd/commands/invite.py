"""The commands `acsgd host` and `acsgd join`, which start an elastic run and invite other hosts, and `acsgd net`.

The first two start torchrun with the rendezvous backend of acsgd, in place of this process, and print its command line.
The secret of the run is in a file that only this user can read. An invitation on a command line is seen by other users
of the host until torchrun starts; one in a file is not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import tyro

from acsgd.comm.addresses import DEFAULT_PORT, EVERYWHERE, check_announced, join_address, listen, own_address
from acsgd.commands.invitation import (
    VERSION,
    Invitation,
    private_file,
    secret_file,
    write_privately,
)
from acsgd.config.options import Config
from acsgd.config.ranges import COUNT_OR_NONE, PORT, out_of_range
from acsgd.config.run_file import parse, to_toml
from acsgd.launch import start_torchrun
from acsgd.notes import print_note

DEVICES = ("auto", "cpu", "gpu", "xpu")
"""Values of --nproc-per-node of torchrun that are no numbers: one process per processor, or device of a kind."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The processes of a host."""

    nproc: str = "auto"
    """Number of processes on a host, --nproc-per-node of torchrun; "auto": one per GPU, or per processor."""

    def check(self) -> None:
        """Raise ValueError for the first option that is out of its range, or that torchrun would refuse."""
        for error in out_of_range(self):
            raise ValueError(f"--{error}")
        if self.nproc not in DEVICES and not re.fullmatch(r"[1-9]\d*", self.nproc):
            raise ValueError(f"--nproc={self.nproc} must be a number of processes, or one of {', '.join(DEVICES)}")


@dataclass(frozen=True, kw_only=True)
class ElasticWorkerOptions(WorkerOptions):
    """The processes of a host of an elastic run."""

    restarts: Annotated[int, COUNT_OR_NONE] = 3
    """How often a failed worker of this host starts again, --max-restarts of torchrun."""


@dataclass(frozen=True)
class HostCommand(ElasticWorkerOptions):
    """Start an elastic run on this host, and print the line by which others join it.

    Starts torchrun in place of this process. A run that is started again has the same invitation.
    """

    run_file: tyro.conf.Positional[Path]
    """RUN.toml with the options of the run."""
    port: Annotated[int, PORT] = DEFAULT_PORT
    """Port at which this host is reached first."""
    address: str | None = None
    """Name or address of this host for the others. Default: that by which it reaches other networks."""
    announce: str | None = None
    """Address host:port at which others reach this host if it is not --address and --port, as of a mapped port."""
    mesh: Literal["auto", "true", "false"] = "auto"
    """Whether connections between hosts are encrypted and need one port each; "auto": if an address is public."""
    hosts: str = "1:8"
    """Lowest and highest number of hosts, --nnodes of torchrun; training starts with the lowest."""

    def run(self) -> None:
        """Run the command. Raises ValueError for invalid options, or a port that is taken."""
        self.check()
        lowest, _, highest = self.hosts.partition(":")
        if not re.fullmatch(r"\d+(:\d+)?", self.hosts) or not 0 < int(lowest) <= int(highest or lowest):
            raise ValueError(f"--hosts={self.hosts} must be a number of hosts, or the lowest and highest, as 1:8")
        config = _with_directories(parse([str(self.run_file)], prog="acsgd host", is_main=False))
        if self.announce is not None and self.mesh == "false":
            raise ValueError(
                f"--announce {self.announce} is of a mesh, which --mesh false turns off; remove one of them"
            )
        if self.announce is not None:
            check_announced(self.announce)
        if (address := self.address or own_address()) is None:
            raise ValueError("this host has no address at which others could reach it; give one with --address")
        # what is announced may enter by any interface, as the mapped port of a container
        listening = self.address or (address if self.announce is None else EVERYWHERE)
        _check_listening(listening, self.port, "--port or --address")
        run, secret = _secret_of(config)
        invitation = Invitation(
            run=run,
            secret=secret,
            endpoints=(self.announce or join_address(address, self.port),),
            hosts=self.hosts,
            mesh="true" if self.announce is not None else self.mesh,
            options=_options(dataclasses.replace(config, elastic=dataclasses.replace(config.elastic, force=False))),
            version=VERSION,
        )
        text = invitation.encode()
        write_privately(private_file(f"{run}.invitation"), text)  # for acsgd fetch
        print(f"Others join with\n\n    acsgd join {text}\n", flush=True)
        place = [f"announce={self.announce}", f"listen={join_address(listening, self.port)}"] if self.announce else []
        own = dataclasses.replace(invitation, options=_options(config))  # elastic.force is of this host, and this start
        _start(own, self.nproc, self.restarts, place)


@dataclass(frozen=True)
class JoinCommand(ElasticWorkerOptions):
    """Join an elastic run with the invitation that `acsgd host` printed. Ctrl-C leaves it again.

    Gets model and data that this host lacks from hosts of the run. Starts torchrun in place of this process.
    """

    invitation: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="INVITATION")]
    """The invitation, or a file with it, which stays out of the shell's history. It holds the secret of the run: send
    it to those alone who may join."""
    announce: str | None = None
    """In a mesh: host:port at which others reach this host, or "none" if it has no port. Default: --port of this host,
    or a free one."""
    port: Annotated[int, PORT] | None = None
    """In a mesh: port at which this host listens. Default: that of --announce, which a container may map to another."""

    def run(self) -> None:
        """Run the command. Raises ValueError for invalid options, or a damaged invitation or one of another version."""
        self.check()
        if self.announce not in (None, "none"):
            check_announced(self.announce)
        is_text = not os.path.isfile(self.invitation)
        invitation = Invitation.open(self.invitation)
        given = {"--announce": self.announce, "--port": self.port}
        given = {option: value for option, value in given.items() if value is not None}
        if given and not invitation.has_mesh:
            (option, value), *_ = given.items()
            raise ValueError(
                f"{option} {value} is of a mesh, which the run does not have; remove it, or start the run "
                "with acsgd host --mesh true"
            )
        if self.announce == "none" and self.port is not None:
            raise ValueError("--announce none is of a host without a port; remove it, or --port")
        place = [f"announce={self.announce}"] if self.announce is not None else []
        if self.port is not None:  # what is announced may enter by any interface
            listening = EVERYWHERE if self.announce is not None else own_address() or EVERYWHERE
            _check_listening(listening, self.port, "--port")
            place.append(f"listen={join_address(listening, self.port)}")
        path = private_file(f"{invitation.run}.invitation")
        if not invitation.is_known:
            write_privately(secret_file(invitation.run), invitation.secret)
            write_privately(path, invitation.encode())
        if not is_text:
            from acsgd.commands.members import get_inputs  # imports torch

            run_file = private_file(f"{invitation.run}.toml")
            write_privately(run_file, invitation.options)
            get_inputs(invitation, parse([str(run_file)], prog="acsgd join", is_main=False))
            _start(invitation, self.nproc, self.restarts, place)
        # again, without the secret on the command line, which other users of this host can see
        arguments = ["join", str(path), "--nproc", self.nproc, "--restarts", str(self.restarts)]
        arguments += [str(word) for option in given.items() for word in option]
        os.execv(sys.executable, [sys.executable, "-m", "acsgd.cli", *arguments])


@dataclass(frozen=True)
class NetCommand:
    """Replace the secret of a running run with a mesh: acsgd net rotate [RUN].

    All hosts that are connected get the new secret, and the file of the secret is replaced on each. Who has only the
    old secret is out.
    """

    action: tyro.conf.Positional[Literal["rotate"]]
    """rotate: replace the secret."""
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None
    """Id of the run, --rdzv-id. Default: the only one on this host."""

    def run(self) -> None:
        """Run the command. Raises ValueError if the run is not here, or a host cannot take part."""
        from acsgd.mesh.mesh import rotate  # imports cryptography

        print(rotate(self.name))


def _check_listening(host: str, port: int, options: str) -> None:
    """Raise ValueError if this host cannot listen at an address. options: by which another is given."""
    try:
        listen(host, port).close()
    except OSError as error:
        strerror = str(error.strerror).partition(" (")[0]  # Python adds the address
        raise ValueError(
            f"{join_address(host, port)} cannot be listened on ({strerror}); give another {options}, or end the "
            "program that listens there"
        ) from None


def _start(invitation: Invitation, nproc: str, restarts: int, place: Sequence[str]) -> NoReturn:
    """Start torchrun in place of this process. place: settings of --rdzv-conf for where this host is in a mesh."""
    run_file = private_file(f"{invitation.run}.toml")
    write_privately(run_file, invitation.options)
    arguments = ["--nnodes", invitation.hosts, "--nproc-per-node", nproc, "--max-restarts", str(restarts)]
    arguments += ["--rdzv-backend", "acsgd", "--rdzv-endpoint", ",".join(invitation.endpoints)]
    settings = [*([] if invitation.mesh == "auto" else [f"mesh={invitation.mesh}"]), *place]
    arguments += ["--rdzv-conf", ",".join([*settings, f"secret={secret_file(invitation.run)}"])]
    arguments += ["--rdzv-id", invitation.run, "-m", "acsgd", str(run_file)]
    print_note(f"torchrun {shlex.join(arguments)}")
    start_torchrun(arguments)


def _secret_of(config: Config) -> tuple[str, str]:
    """Return id and secret of the run in a run directory; new ones the first time."""
    name = Path(config.log.dir).name
    path = private_file(f"{name}-{hashlib.sha256(config.log.dir.encode()).hexdigest()[:8]}.run")
    if not path.exists():
        write_privately(path, f"{name}-{secrets.token_hex(4)}")
    file = secret_file(run := path.read_text())
    if not file.exists():
        write_privately(file, secrets.token_hex(16))
    return run, file.read_text().strip()


def _options(config: Config) -> str:
    """Return the options of a run as TOML, without those that have their defaults."""
    lines = to_toml(config).split("\n")
    defaults = {
        section.name: {field.name: field.default for field in dataclasses.fields(getattr(config, section.name))}
        for section in dataclasses.fields(config)
    }
    kept, section = list[str](), ""
    for line in lines:
        if line.startswith("["):
            section = line[1:-1]
            kept.append(line)
        elif line and getattr(getattr(config, section), key := line.partition(" = ")[0]) != defaults[section][key]:
            kept.append(line)
    return "\n".join(kept) + "\n"


def _with_directories(config: Config) -> Config:
    """Return the options with absolute directories, which are the same for every host."""
    log = dataclasses.replace(config.log, dir=str(Path(config.log.dir).expanduser().resolve()))
    checkpoint = config.checkpoint
    if checkpoint.dir is not None:
        checkpoint = dataclasses.replace(checkpoint, dir=str(Path(checkpoint.dir).expanduser().resolve()))
    return dataclasses.replace(config, log=log, checkpoint=checkpoint)
