"""Faults of hosts, links and routers that are injected in network namespaces are found and named by acsgd doctor."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lib.processes import CONTEXT, WAIT_S, started

from acsgd.commands.doctor.command import DoctorCommand
from acsgd.commands.doctor.links import Doctor
from acsgd.versions import installed_versions
from benchmarks.common import netlab

PORT, MAPPED = 29400, 41000
THERE = f"{netlab.address(1)}:{PORT}"
SECRET = "the secret of both hosts"


@dataclass
class Scene:
    """Two hosts. The first one is examined, and its links to the second one, on which a doctor listens."""

    network: netlab.Lab
    directory: Path
    """Current directory of the first host."""
    stack: ExitStack
    first: str
    """Namespace of the first host."""
    command: dict[str, Any] = field(default_factory=lambda: {"connect": THERE})
    """Options of its command."""
    environment: dict[str, str] = field(default_factory=lambda: {"ACSGD_SECRET": SECRET})
    second: dict[str, Any] = field(default_factory=dict)
    """What differs on the second host, see `_answer`."""
    open_files: int = 1024

    def ip(self, namespace: str, *commands: str) -> None:
        for command in commands:
            netlab.run(f"ip -n {namespace} {command}")

    def firewall(self, host: int, hook: str, rule: str) -> None:
        """Add a rule for packets of a host: hook: input or output."""
        inside = f"ip netns exec {self.network.namespaces[host]} nft add"
        netlab.run(f"{inside} table ip wall")
        netlab.run(f"{inside} chain ip wall {hook} {{ type filter hook {hook} priority 0 ; }}")
        netlab.run(f"{inside} rule ip wall {hook} {rule}")

    def mount(self, options: str) -> None:
        """Let the current directory of the first host be on a file system of its own."""
        netlab.run(f"mount -t tmpfs -o {options} tmpfs {self.directory}")
        self.stack.callback(netlab.run, f"umount -l {self.directory}")


def large_packets(scene: Scene) -> None:
    scene.ip(scene.network.center, "link set port1 mtu 1250")
    for namespace in scene.network.namespaces:
        scene.ip(namespace, "link set eth0 gso_max_segs 1")  # packets as on a real cable


def behind_router(scene: Scene, way: str, ports: Mapping[int, int] | None = None) -> None:
    """Put the first host behind a router. way: in which it chooses ports, as nft calls it."""
    router = scene.stack.enter_context(netlab.behind_router(scene.network, 0, ports or {}))
    scene.first = router.namespace
    scene.command["listen"] = PORT
    inside = f"ip netns exec {scene.network.namespaces[0]} nft"
    netlab.run(f"{inside} flush chain ip nat out")
    netlab.run(f"{inside} add rule ip nat out oifname eth0 masquerade {way}")


Injection = Callable[[Scene], object]
DROP = f"tcp dport {PORT} drop"
FAULTS: dict[str, tuple[Injection, str, str]] = {
    "large packets": (large_packets, "error", "unless segments have at most 1200 bytes: a router drops larger packets"),
    "large messages there": (
        lambda scene: scene.firewall(0, "output", "ip length > 300 drop"),
        "error",
        "small messages pass, but large ones to it do not arrive",
    ),
    "large messages back": (
        lambda scene: scene.firewall(1, "output", "ip length > 600 drop"),
        "error",
        "large ones from it do not arrive",
    ),
    "slow link": (lambda scene: scene.network.limit(3), "warning", "use a mode for slow links"),
    "slow way back": (
        lambda scene: netlab.run(
            f"tc -n {scene.network.namespaces[1]} qdisc replace dev eth0 root tbf rate 3mbit burst 5kb latency 200ms"
        ),
        "warning",
        "use a mode for slow links",
    ),
    "loss": (
        lambda scene: scene.firewall(1, "input", "numgen random mod 100 < 8 drop"),
        "warning",
        "the link loses packets: look at Wi-Fi",
    ),
    "cut off": (lambda scene: scene.network.cut(1), "error", f"{THERE} does not answer"),
    "no route": (lambda scene: scene.network.block(0, 1), "error", f"{THERE} does not answer"),
    "firewall there": (lambda scene: scene.firewall(1, "input", DROP), "error", "(no packet came back); let firewall"),
    "firewall here": (lambda scene: scene.firewall(0, "output", DROP), "error", f"{THERE} does not answer"),
    "firewall that refuses": (
        lambda scene: scene.firewall(1, "input", f"tcp dport {PORT} reject with icmp type admin-prohibited"),
        "error",
        f"{THERE} does not answer",
    ),
    "nothing listens": (lambda scene: scene.second.update(port=PORT + 1), "error", f"nothing listens at {THERE}"),
    "another program": (lambda scene: scene.second.update(program=True), "error", "another program than acsgd doctor"),
    "another secret": (lambda scene: scene.second.update(secret="other"), "error", f"{THERE} has another secret"),
    "another code": (
        lambda scene: scene.second.update(facts={"code": "changed"}),
        "error",
        "source code of acsgd differs",
    ),
    "another torch": (lambda scene: scene.second.update(facts={"torch": "1.0"}), "error", "torch differs"),
    "clock of a day": (lambda scene: scene.second.update(ahead_s=86400.0), "error", "its clock is 86,4"),
    "clock of a minute": (lambda scene: scene.second.update(ahead_s=-60.0), "warning", "s behind; set both clocks"),
    "firewall for this port": (
        lambda scene: (scene.firewall(0, "input", DROP), scene.command.update(listen=PORT)),
        "error",
        f"it does not reach this host at {netlab.address(0)}:{PORT}",
    ),
    "announced elsewhere": (
        lambda scene: scene.command.update(listen=PORT, announce=f"{netlab.address(1)}:{PORT + 7}"),
        "error",
        f"it does not reach this host at {netlab.address(1)}:{PORT + 7}: nothing listens",
    ),
    "router that keeps ports": (lambda scene: behind_router(scene, ""), "warning", "a router that keeps ports"),
    "router that changes ports": (
        lambda scene: behind_router(scene, "fully-random"),
        "warning",
        "a router that changes ports",
    ),
    "port mapped to another host": (
        lambda scene: (
            behind_router(scene, "", {MAPPED: PORT + 5}),
            scene.command.update(announce=f"{netlab.address(0)}:{MAPPED}"),
        ),
        "error",
        f"it does not reach this host at {netlab.address(0)}:{MAPPED}: nothing listens",
    ),
    "interface down": (
        lambda scene: (
            scene.environment.update(GLOO_SOCKET_IFNAME="eth0"),
            scene.ip(scene.first, "link set eth0 down"),
        ),
        "error",
        "GLOO_SOCKET_IFNAME=eth0, but eth0 is down",
    ),
    "no interface": (
        lambda scene: scene.ip(scene.first, "link del eth0"),
        "warning",
        "no network interface is up but loopback",
    ),
    "interface of another name": (
        lambda scene: scene.environment.update(GLOO_SOCKET_IFNAME="ib0"),
        "error",
        "but ib0 is not one of this host",
    ),
    "name without an address": (
        lambda scene: scene.command.update(connect="no-host.invalid:1"),
        "error",
        "the name no-host.invalid has no address",
    ),
    "small disk": (lambda scene: scene.mount("size=4m"), "error", "make room, or give another log.dir"),
    "no inodes": (lambda scene: scene.mount("size=8g,nr_inodes=200"), "error", "can take no more files (df -i)"),
    "disk that cannot be written": (lambda scene: scene.mount("size=8g,ro"), "error", "cannot be written (Read-only"),
    "few open files": (lambda scene: setattr(scene, "open_files", 200), "warning", "a process may open 200 files"),
    "wrong run file": (
        lambda scene: (
            (scene.directory / "run.toml").write_text("[optim]\nsteps = 'many'\n"),
            scene.command.update(run_file=scene.directory / "run.toml"),
        ),
        "error",
        "optim.steps",
    ),
}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    try:
        netlab.check(needs_tun=False, needs_nat=True)
    except RuntimeError as error:
        pytest.skip(str(error))
    (directory := tmp_path / "first").mkdir()
    with netlab.lab(hosts=2) as network, ExitStack() as stack:
        yield Scene(network, directory, stack, network.namespaces[0])


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.processes
def test_a_fault_is_found_and_named(fault: str, scene: Scene, tmp_path: Path) -> None:
    inject, level, text = FAULTS[fault]
    inject(scene)
    is_listening = CONTEXT.Event()
    with started(_answer, scene.network.namespaces[1], is_listening, **scene.second):
        assert is_listening.wait(WAIT_S)
        report = tmp_path / "report"
        command = (scene.first, scene.directory, scene.environment, scene.open_files, scene.command, report)
        with started(_examine, *command) as first:
            while not report.exists():
                assert first.is_alive()
                time.sleep(0.05)
            found = json.loads(report.read_text())["diagnoses"]
    sentences = {f"{each['text']}; {each['remedy']}": each["level"] for each in found}
    assert [each for each, its in sentences.items() if text in each and its == level], sentences


def _answer(
    namespace: str,
    is_listening: Any,
    *,
    port: int = PORT,
    secret: str = SECRET,
    facts: Mapping[str, str] | None = None,
    ahead_s: float = 0.0,
    program: bool = False,
) -> None:
    """Be the second host. facts: those that differ; program: whether another one than a doctor listens."""
    netlab.enter(namespace)
    now = time.time
    time.time = lambda: now() + ahead_s
    if program:
        import socket

        server = socket.create_server(("0.0.0.0", port))
        is_listening.set()
        while True:
            server.accept()[0].sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
    with contextlib.closing(Doctor(port, secret.encode(), {**installed_versions(), **(facts or {})})):
        is_listening.set()
        time.sleep(WAIT_S)


def _examine(
    namespace: str,
    directory: Path,
    environment: Mapping[str, str],
    open_files: int,
    command: Mapping[str, Any],
    report: Path,
) -> None:
    """Be the first host, until killed: a doctor that listens goes on."""
    netlab.enter(namespace)
    os.chdir(directory)
    os.environ.update(environment)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    with contextlib.redirect_stdout(printed := _Report(report)), contextlib.suppress(SystemExit):
        DoctorCommand(**{"seconds": 0.5, "json": True, **command}).run()
    printed.flush()
    time.sleep(WAIT_S)


class _Report(io.StringIO):
    """Output that becomes a file once it has a whole line."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def write(self, text: str) -> int:
        written = super().write(text)
        if "\n" in text:
            (partial := self._path.with_suffix(".partial")).write_text(self.getvalue())
            partial.rename(self._path)
        return written
