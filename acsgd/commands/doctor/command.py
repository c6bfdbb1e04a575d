"""The command `acsgd doctor`: what would keep this host, or its links to others, from training."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import tyro

from acsgd.comm.addresses import check_announced, join_address, parse_endpoints
from acsgd.commands.doctor.host import Diagnosis, check_host
from acsgd.commands.doctor.links import (
    DIAL_S,
    Doctor,
    DoctorClient,
    MeasuredLink,
    PeerError,
    diagnose,
    diagnose_router,
    measure,
)
from acsgd.commands.invitation import PREFIX, Invitation
from acsgd.config.ranges import PORT, Range, out_of_range
from acsgd.launch import gloo_interface, run_secret
from acsgd.versions import installed_versions

MARKS = {"ok": "ok", "warning": "[yellow]warning[/]", "error": "[bold red]error[/]"}


@dataclass(frozen=True)
class DoctorCommand:
    """Find what would keep this host, or its links to others, from training, and say what to type.

    Start it with --listen on one host, and with --connect on the others, with the same ACSGD_SECRET. Exits with 1 if
    training would fail, unless it listens.
    """

    run_file: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN.toml|INVITATION]")] = None
    """RUN.toml, whose options are checked, and whose log.dir; or a file with an invitation, whose run is looked for,
    too."""
    listen: Annotated[int, PORT] | None = None
    """Port on which the doctors of other hosts are answered, until Ctrl-C."""
    connect: str | None = None
    """Hosts on which a doctor listens, comma-separated: "hostA:29400,[fd00::2]:29400". Measures the links to them."""
    announce: str | None = None
    """Address host:port at which others reach --listen. Default: the address that they see, with that port."""
    seconds: Annotated[float, Range(0, 10, above=True)] = 2.0
    """Time for which data is sent in each direction of a link."""
    json: bool = False
    """Print JSON in place of a table."""

    def run(self) -> None:
        """Run the command."""
        for error in out_of_range(self):
            raise ValueError(f"--{error}")
        if self.announce is not None and self.listen is None:
            raise ValueError("--announce is the address of --listen; give --listen PORT, too")
        if self.announce is not None:
            check_announced(self.announce)
        with contextlib.ExitStack() as stack:
            if self.listen is not None:
                stack.enter_context(contextlib.closing(self._answer(self.listen)))
            of_run = self
            if (invitation := self._invitation()) is not None:
                run_file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="acsgd-"))) / "run.toml"
                run_file.write_text(invitation.options)
                of_run = dataclasses.replace(self, run_file=run_file)
            diagnoses, links = list(of_run._check_host()), list[MeasuredLink]()
            diagnoses += [] if invitation is None else [_check_run(invitation)]
            dialed = list[Diagnosis]()
            for address in parse_endpoints(self.connect) if self.connect is not None else ():
                found, link = self._check_link(address)
                diagnoses += found
                links += [link] if link else []
                dialed += [each for each in found if link and each.subject == _from(address)]
            is_reached = any(each.level == "ok" for each in dialed) if dialed else None
            diagnoses += diagnose_router(links, _own_addresses(), is_reached=is_reached)
            diagnoses += of_run._forecast(links)
            self._print(diagnoses, links)
            if self.listen is not None:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # which is no error here
                print(f"answering other hosts on port {self.listen}, until Ctrl-C", file=sys.stderr, flush=True)
                signal.pause()
        sys.exit(any(each.level == "error" for each in diagnoses))

    def _check_host(self) -> Iterator[Diagnosis]:
        directory = Path.cwd()
        if self.run_file is not None:
            from acsgd.config.run_file import parse

            try:
                config = parse([str(self.run_file)], prog="acsgd doctor", is_main=False)
            except ValueError as error:
                yield Diagnosis("error", "run", f"{self.run_file}: {error}")
            else:
                directory = Path(config.log.dir)
                yield Diagnosis("ok", "run", f"{self.run_file}: its options are valid")
        yield from check_host(directory, gloo_interface())

    def _invitation(self) -> Invitation | None:
        """Return the invitation that is given in place of a run file. Raises ValueError if it is no use."""
        if str(self.run_file).startswith(PREFIX):
            raise ValueError(
                "an invitation holds the secret of the run, and other users of this host see what is typed: put it "
                "into a file, and give that"
            )
        with contextlib.suppress(OSError, UnicodeDecodeError):  # which `_check_host` names
            if self.run_file is not None and self.run_file.read_text().startswith(PREFIX):
                return Invitation.open(str(self.run_file))
        return None

    def _check_link(self, address: str) -> tuple[Sequence[Diagnosis], MeasuredLink | None]:
        """Measure a link; return what was found, and the figures if the host was reached."""
        try:
            link = measure(address, _secret(), self.seconds)
        except PeerError as error:
            return [Diagnosis("error", f"link to {address}", str(error), error.remedy)], None
        return [*diagnose(link, installed_versions(), _own_addresses()), *self._dial_back(address)], link

    def _forecast(self, links: Sequence[MeasuredLink]) -> Iterator[Diagnosis]:
        """Say how long a step of the run takes on this host and those at the measured links."""
        rates = [min(link.sent, link.received) for link in links if link.sent and link.received]
        if self.run_file is None or not rates:
            return
        from acsgd.commands.doctor.forecast import Workload, forecast, measure_speed
        from acsgd.config.run_file import parse

        try:
            config = parse([str(self.run_file)], prog="acsgd doctor", is_main=False)
            work = Workload.of(config)
            yield from forecast(work, len(rates) + 1, min(rates), measure_speed(config.run.device, work.dtype))
        except ValueError as error:
            yield Diagnosis("warning", "forecast", f"not possible: {error}")

    def _dial_back(self, address: str) -> Iterator[Diagnosis]:
        """Let a peer connect to this host, if it listens."""
        if self.listen is None:
            return
        subject = _from(address)
        try:
            with DoctorClient(address, _secret()) as peer:
                mine = self.announce or join_address(peer.facts["sees"], self.listen)
                problem = peer.request("dial", within_s=DIAL_S, address=mine)["problem"]
        except PeerError as error:
            yield Diagnosis("error", subject, str(error), error.remedy)
            return
        if problem:
            remedy = (
                f"let firewall and router pass TCP port {self.listen} to this host, give --announce, or let it dial"
            )
            yield Diagnosis("error", subject, f"it does not reach this host at {mine}: {problem}", remedy)
        else:
            yield Diagnosis("ok", subject, f"it reaches this host at {mine}")

    def _answer(self, port: int) -> Doctor:
        """Begin to answer other hosts. Raises ValueError if the port is taken."""
        try:
            return Doctor(port, _secret(), installed_versions())
        except OSError as error:
            strerror = str(error.strerror).partition(" (")[0]  # Python adds the address
            raise ValueError(f"port {port} cannot be listened on ({strerror}); give another --listen") from None

    def _print(self, diagnoses: Sequence[Diagnosis], links: Sequence[MeasuredLink]) -> None:
        if self.json:
            report = {"diagnoses": [*map(dataclasses.asdict, diagnoses)], "links": [*map(dataclasses.asdict, links)]}
            print(json.dumps(report))
            return
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for each in diagnoses:
            table.add_row(MARKS[each.level], each.subject, escape(each.sentence()))
        Console().print(table)


def _check_run(invitation: Invitation) -> Diagnosis:
    """Look for the hosts of a run, as `acsgd join` does."""
    from acsgd.commands.members import open_members  # imports torch

    subject = f"run {invitation.run}"
    try:
        with open_members(invitation) as members:
            return Diagnosis("ok", subject, f"reached, {', '.join(each.name for each in members)}")
    except ValueError as error:
        return Diagnosis("error", subject, str(error))


def _from(address: str) -> str:
    """Return the subject of a connection that another host has opened."""
    return f"link from {address}"


def _own_addresses() -> set[str]:
    """Return the addresses of this host."""
    return {each.address for some in psutil.net_if_addrs().values() for each in some}


def _secret() -> bytes:
    """Return the secret of the run. Raises ValueError if there is none."""
    if not (secret := run_secret()):
        raise ValueError(
            "doctors of several hosts need a secret: set ACSGD_SECRET to the same text on all hosts, such as one made "
            "by: openssl rand -hex 32"
        )
    return secret.encode()
