"""What keeps a host or a link from training is found, and named with what to type."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from lib.patience import wait_until

from acsgd import host_memory
from acsgd.commands.doctor import forecast as forecasts
from acsgd.commands.doctor import host, links
from acsgd.commands.doctor.command import DoctorCommand
from acsgd.commands.doctor.forecast import Workload, forecast, measure_speed
from acsgd.commands.doctor.host import Diagnosis, check_host
from acsgd.commands.doctor.links import Doctor, MeasuredLink, diagnose, measure
from acsgd.streams import Streams
from acsgd.versions import installed_versions
from tests.lib.ports import free_port

SECRET = b"secret"
Break = Callable[[pytest.MonkeyPatch, Path], None]
FACTS = {"code": "a", "torch": "2", "transformers": "5"}


def _old_package(patch: pytest.MonkeyPatch, path: Path) -> None:
    (path / "transformers-4.40.0.dist-info").mkdir()
    (path / "transformers-4.40.0.dist-info" / "METADATA").write_text("Name: transformers\nVersion: 4.40.0\n")
    patch.syspath_prepend(path)


def _cgroup(name: str, content: str) -> Break:
    def limit(patch: pytest.MonkeyPatch, path: Path) -> None:
        (path / name).write_text(content)
        patch.setattr(host_memory, "CGROUPS", path)
        patch.setattr(os, "getloadavg", lambda: (3.0, 0, 0))

    return limit


def _driver(patch: pytest.MonkeyPatch, path: Path) -> None:
    (path / "version").write_text("NVRM version: 1\n")
    patch.setattr(host, "DRIVER", path / "version")
    patch.setattr("torch.version.cuda", None)
    patch.setattr("torch.cuda.is_available", lambda: False)


def _full(patch: pytest.MonkeyPatch, path: Path) -> None:
    patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=2**40, free=2**20))


def _no_inodes(patch: pytest.MonkeyPatch, path: Path) -> None:
    found = os.statvfs(path)
    fields = {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}
    patch.setattr(os, "statvfs", lambda _: SimpleNamespace(**{**fields, "f_files": 1000, "f_favail": 3}))


def _no_links(patch: pytest.MonkeyPatch, path: Path) -> None:
    patch.setattr(host, "missing_operations", lambda _: ["hard links"])


def _slow_disk(patch: pytest.MonkeyPatch, path: Path) -> None:
    fsync = os.fsync
    patch.setattr(os, "fsync", lambda file: (time.sleep(1.2), fsync(file)))


def _past(patch: pytest.MonkeyPatch, path: Path) -> None:
    patch.setattr(time, "time", lambda: 1e9)


def _few_files(patch: pytest.MonkeyPatch, path: Path) -> None:
    patch.setattr(resource, "getrlimit", lambda _: (256, 4096))


def _alone(patch: pytest.MonkeyPatch, path: Path) -> None:
    stats = psutil.net_if_stats()
    patch.setattr(psutil, "net_if_stats", lambda: {"lo": stats["lo"]})


def _other_users(patch: pytest.MonkeyPatch, path: Path) -> None:
    users = {0: "root", 33: "www-data", 1999: "alice", 65_534: "nobody", 1_234_567: "bob", os.getuid(): "me"}
    found = [{"uids": SimpleNamespace(real=user), "username": name} for user, name in users.items()]
    listed = [SimpleNamespace(info=info) for info in (*found, {"uids": None, "username": None})]
    patch.setattr(psutil, "process_iter", lambda _: listed)


HOST_FAULTS: list[tuple[Break, str, str, str]] = [
    (_old_package, "error", "versions", 'transformers 4.40.0 is installed, acsgd needs >=5.0; pip install "transfo'),
    (_driver, "error", "device", "is built for the CPU alone; install a build of torch with CUDA"),
    (_cgroup("memory.max", str(2**30)), "error", "memory", "of the 1.0 GiB that this container may use are available"),
    (_cgroup("cpu.max", "50000 100000"), "warning", "processors", "0.5 processors, load 3.0; other programs"),
    (_few_files, "warning", "open files", "a process may open 256 files, runs need 1024; ulimit -n 1024"),
    (_full, "error", "disk", "0.0 of 1024.0 GiB free; make room"),
    (_no_inodes, "error", "disk", "can take no more files (df -i)"),
    (_no_links, "warning", "disk", "is on a file system without hard links; runs work there"),
    (_slow_disk, "warning", "disk", "MB/s; saves will be slow"),
    (
        _past,
        "error",
        "clock",
        "it is 2001-09-09 01:46 UTC on this host, before acsgd was installed; set the clock: timed",
    ),
    (_other_users, "warning", "users", "processes of alice, bob, who can connect to the ports that runs"),
    (_other_users, "warning", "users", "can have runs with a mesh, until: nft delete table inet acsgd"),
    (_alone, "warning", "addresses", "no network interface is up but loopback"),
]


def test_a_good_host_has_no_error(tmp_path: Path) -> None:
    found = list(check_host(tmp_path / "runs" / "new", None))
    assert [each for each in found if each.level == "error"] == []
    subjects = {"versions", "device", "memory", "processors", "disk", "clock", "users", "addresses", "interface"}
    assert subjects <= {each.subject for each in found}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("fault", "level", "subject", "text"), HOST_FAULTS, ids=[each[3][:30] for each in HOST_FAULTS])
def test_a_fault_of_a_host_is_named(
    fault: Break, level: str, subject: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fault(monkeypatch, tmp_path)
    found = [each for each in check_host(tmp_path, None) if each.subject == subject and each.level != "ok"]
    assert [each.level for each in found] == [level]
    assert text in found[0].sentence()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    [found] = host.check_disk(tmp_path / "file")
    assert (found.level, found.sentence()) == ("error", f"{tmp_path / 'file'} is not a directory; give another log.dir")
    if Path("/proc/self").exists():  # not even root can write there
        [found] = host.check_disk(Path("/proc/self/runs"))
        assert found.level == "error"


@pytest.mark.parametrize(("name", "problem"), [("none0", "is not one of this host"), ("lo", "is down")])
def test_an_interface_that_cannot_be_used_is_named(name: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"lo": psutil.net_if_stats()["lo"]._replace(isup=False)}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    [found] = host.check_interface(name)
    text = f"GLOO_SOCKET_IFNAME={name}, but {name} {problem}; give one of lo, or unset it"
    assert (found.level, found.sentence()) == ("error", text)


@pytest.fixture
def doctor() -> Iterator[Doctor]:
    with contextlib.closing(Doctor(0, SECRET, FACTS)) as listening:
        yield listening


def test_a_link_is_measured(doctor: Doctor) -> None:
    link = measure(f"127.0.0.1:{doctor.port}", SECRET, 0.1)
    assert link.sent is not None
    assert link.received is not None
    assert min(link.sent, link.received) > 1e6
    assert abs(link.clock_s) <= link.delay_s + 0.1
    [found] = diagnose(link, FACTS, {"127.0.0.1"})
    assert found.level in ("ok", "warning")
    [translated] = diagnose(link, FACTS, {"10.0.0.1"})
    assert "it sees this host as 127.0.0.1, so a router translates addresses" in translated.text


GOOD = MeasuredLink("b:1", FACTS, 5000, 0.02, 0.0, 1e8, 1e8, 0.0)


def test_few_losses_matter_where_the_delay_is_long() -> None:
    [found] = diagnose(dataclasses.replace(GOOD, delay_s=0.001, loss=0.01), FACTS, set())
    assert found.level == "ok"


@pytest.mark.parametrize(
    ("changed", "level", "text"),
    [
        ({"facts": {**FACTS, "torch": "3"}}, "error", "torch differs: 2 here, 3 there; install the same versions"),
        ({"facts": {**FACTS, "code": "b"}}, "error", "source code of acsgd differs: a here, b there; install the same"),
        ({"clock_s": 86400.0}, "error", "its clock is 86,400 s ahead; set both clocks: timedatectl set-ntp true"),
        ({"clock_s": -60.0}, "warning", "its clock is 60 s behind; set both clocks"),
        ({"loss": 0.05}, "warning", "5.0% lost; the link loses packets: look at Wi-Fi"),
        ({"loss": 0.01}, "warning", "1.0% lost; TCP slows down at each loss: try --run.congestion bbr"),
        ({"received": 2e6}, "warning", "2.0 Mbit/s back, 0.0% lost; use a mode for slow links"),
        (
            {"sent": None},
            "error",
            "small messages pass, but large ones to it do not arrive; a firewall or router",
        ),
        (
            {"received": None, "segment": 1200},
            "error",
            "segments have at most 1200 bytes: a router drops larger packets",
        ),
    ],
)
def test_a_fault_of_a_link_is_named(changed: dict[str, object], level: str, text: str) -> None:
    link = MeasuredLink(**{**{name: getattr(GOOD, name) for name in GOOD.__dataclass_fields__}, **changed})  # type: ignore[arg-type]
    found = [each for each in diagnose(link, FACTS, set()) if each.level != "ok"]
    assert [each.level for each in found] == [level]
    assert text in found[0].sentence()


@pytest.mark.parametrize(
    ("sees", "sees_port", "is_reached", "level", "text"),
    [
        ("10.0.0.1", "5000", True, "ok", "open: others see this host by its own address"),
        ("10.0.0.1", "5000", False, "warning", "but a firewall keeps them out; others cannot dial this host: forward"),
        ("1.2.3.4", "6000", True, "ok", "one-to-one: others see this host as 1.2.3.4, and reach it there"),
        ("1.2.3.4", "6000", False, "warning", "a router that changes ports; others see this host as 1.2.3.4"),
        ("1.2.3.4", "5000", False, "warning", "a router that keeps ports; others see this host as 1.2.3.4"),
        ("1.2.3.4", "6000", None, "ok", "whether others can dial this host: add --listen PORT"),
    ],
)
def test_the_router_between_is_named(sees: str, sees_port: str, is_reached: bool | None, level: str, text: str) -> None:
    link = dataclasses.replace(GOOD, facts={**FACTS, "sees": sees, "sees_port": sees_port})
    [found] = links.diagnose_router([link], {"10.0.0.1"}, is_reached=is_reached)
    assert found.level == level
    assert text in found.sentence()


@pytest.mark.parametrize(
    ("ports", "text"),
    [
        ([(5000, "6000"), (5001, "6001")], "symmetric: a router that maps each connection to another port"),
        ([(5000, "5000"), (5001, "6001")], "a router that changes ports"),
        ([(5000, "5000"), (5001, None)], "a router that keeps ports"),
        ([(5000, None)], "a router; others see this host as 1.2.3.4"),
    ],
)
def test_the_kind_of_a_router_is_said_of_what_was_seen(ports: list[tuple[int, str | None]], text: str) -> None:
    """A peer of an earlier version does not report the port that it sees."""
    measured = [
        dataclasses.replace(GOOD, own_port=own, facts={"sees": "1.2.3.4", **({"sees_port": seen} if seen else {})})
        for own, seen in ports
    ]
    [found] = links.diagnose_router(measured, {"10.0.0.1"}, is_reached=False)
    assert found.text.startswith(text)


@pytest.mark.parametrize(
    ("changed", "mbit", "text"),
    [
        ({}, 1e6, "gradients 0.0032 s at 1e+06 Mbit/s; about 6 s a step, as the run file is"),
        ({}, 1000, "gradients 3.2 s at 1e+03 Mbit/s; about 7.6 s a step with --dp.mode allreduce:dtype=bf"),
        ({}, 100, "gradients 32 s at 100 Mbit/s; about 6.2 s a step with --dp.mode cocktail_grad"),
        ({"mode": "cocktail_grad:bits=2"}, 10, "3.2e+02 s at 10 Mbit/s; about 7.7 s a step with --dp.mode cocktail"),
        ({"mode": "cocktail"}, 10, "gradients 3.2e+02 s at 10 Mbit/s; about 7.7 s a step, as the run file is"),
        ({"mode": "cocktail:random=0.05"}, 10, "about 7.7 s a step, as the run file is"),
        ({"mode": "diloco:inner=500"}, 10, "about 6.6 s a step, as the run file is"),
        ({"mode": "local"}, 10, "about 6 s a step, as the run file is"),
        ({"mode": "cocktail"}, 1e6, "about 6 s a step, as the run file is"),
        ({"stages": 2}, 1000, "2% of it idle, activations 0.49 s at 1e+03 Mbit/s; about 6.6 s a step, as the run file"),
        ({"stages": 2}, 100, "activations 4.9 s at 100 Mbit/s; about 7.4 s a step with --pp.forward fixpoint:bits=8"),
        ({"stages": 2}, 5, "about 31 s a step with --pp.forward delta:step=1.5 --pp.backward fixpoint:bits=8"),
        ({"stages": 2, "dtype": torch.bfloat16}, 100, "activations 2.5 s at 100 Mbit/s; about 8.6 s a step, as the r"),
        (
            {"stages": 2, "forward": "delta:bits=4", "backward": "fixpoint:bits=8"},
            5,
            "about 31 s a step with --pp.forward delta:step=1.5",
        ),
        (
            {"stages": 2, "forward": "delta:step=2", "backward": "fixpoint:bits=4"},
            10,
            "about 12 s a step, as the run file is",
        ),
    ],
)
def test_the_time_of_a_step_is_forecast(changed: dict[str, Any], mbit: float, text: str) -> None:
    """By the formulas of docs/choose.md: 6 x 1e8 x 2e4 operations on two hosts that do 1e12 per second.

    What the run file compresses at least as much as advised stays.
    """
    work = Workload(100_000_000, 100_000_000, 1, 40, (1, 500, 768), torch.float32)
    [found] = forecast(dataclasses.replace(work, **changed), 2, mbit * 1e6, 1e12)
    assert f"computation {'6.2' if 'stages' in changed else '6'} s on 2 hosts" in found.text
    assert text in found.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_speed_is_that_of_products_in_the_dtype_of_the_run(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecasts, "MEASURED_S", 0.01)
    monkeypatch.setattr(forecasts, "CPU_MATRIX", 64)
    products = list[torch.dtype]()
    matmul = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda x, y: products.append(x.dtype) or matmul(x, y))
    assert measure_speed("cpu", dtype) > 0
    assert {*products} == {dtype}


def _check_link(address: str, secret: str, monkeypatch: pytest.MonkeyPatch) -> list[Diagnosis]:
    monkeypatch.setenv("ACSGD_SECRET", secret)
    return list(DoctorCommand(connect=address, seconds=0.1)._check_link(address)[0])


@contextlib.contextmanager
def _silent() -> Iterator[socket.socket]:
    """Open a server whose backlog is full, so that further connections get no answer."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        yield server


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("secret", "{} has another secret; give all hosts the same ACSGD_SECRET"),
        ("name", "the name no-host.invalid has no address; correct it, or give an address"),
        ("refused", "nothing listens at {}; start acsgd doctor --listen {port} there"),
        (
            "silent",
            "{} does not answer (no packet came back); let firewall and router of that host pass TCP",
        ),
        ("program", "another program than acsgd doctor answers at {}; give another port"),
        ("version", "{} has another version of acsgd; install the same version"),
    ],
)
def test_a_host_that_does_not_answer_is_named(
    fault: str, text: str, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "CONNECT_S", 0.5)
    port = doctor.port
    with contextlib.ExitStack() as stack:
        if fault == "refused":
            port = free_port()
        elif fault in ("silent", "program"):
            server = stack.enter_context(_silent() if fault == "silent" else socket.create_server(("127.0.0.1", 0)))
            port = server.getsockname()[1]
            if fault == "program":
                threading.Thread(target=_answer_http, args=(server,), daemon=True).start()
        elif fault == "version":
            monkeypatch.setattr(links, "PROTOCOL", links.PROTOCOL + 1)
            lines = links._Lines.send
            monkeypatch.setattr(
                links._Lines,
                "send",
                lambda self, m: lines(self, {**m, "protocol": 1} if "nonce" in m and "acsgd" in m else m),
            )
        address = f"{'no-host.invalid' if fault == 'name' else '127.0.0.1'}:{port}"
        [found] = _check_link(address, "other" if fault == "secret" else SECRET.decode(), monkeypatch)
    assert found.level == "error"
    assert found.sentence().startswith(text.format(address, port=port))


def _answer_http(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        connection.recv(100)


def test_a_client_without_the_secret_gets_nothing(doctor: Doctor) -> None:
    with socket.create_connection(("127.0.0.1", doctor.port)) as client:
        lines = links._Lines(client)
        assert lines.receive().keys() == {"acsgd", "protocol", "nonce"}
        lines.send({"nonce": "0", "proof": "0" * 64})
        assert lines.receive() == {"refused": True}
        with contextlib.suppress(ConnectionError):  # it has closed the connection
            lines.send({"do": "time"})
            assert lines.receive() == {}


def test_hosts_that_hold_connections_do_not_keep_others_out(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(2 * links.MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", doctor.port)))
        monkeypatch.setattr(links, "CONNECT_S", 0.5)  # of those that are accepted from now on
        doctor._slots = threading.BoundedSemaphore(links.MAX_CONNECTIONS)
        for _ in range(3 * links.MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", doctor.port)))

        def is_served() -> bool:
            with (
                contextlib.suppress(links.PeerError),
                links.DoctorClient(f"127.0.0.1:{doctor.port}", SECRET) as peer,
            ):
                return peer.facts["torch"] == "2"
            return False

        wait_until(is_served)


def test_a_peer_dials_back(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACSGD_SECRET", SECRET.decode())
    monkeypatch.setattr("acsgd.commands.doctor.command.installed_versions", lambda: FACTS)
    with contextlib.closing(Doctor(0, SECRET, FACTS)) as mine:
        command = DoctorCommand(listen=mine.port, seconds=0.1)
        [*_, found] = command._check_link(f"127.0.0.1:{doctor.port}")[0]
        assert found == Diagnosis(
            "ok", f"link from 127.0.0.1:{doctor.port}", f"it reaches this host at 127.0.0.1:{mine.port}"
        )
    monkeypatch.setattr(links, "CONNECT_S", 0.3)
    with _silent() as silent:
        command = DoctorCommand(listen=1, announce=f"127.0.0.1:{silent.getsockname()[1]}", seconds=0.1)
        [*_, found] = command._check_link(f"127.0.0.1:{doctor.port}")[0]
    assert found.level == "error"
    assert "does not answer (no packet came back)" in found.text
    command = DoctorCommand(listen=mine.port, seconds=0.1)
    [*_, found] = command._check_link(f"127.0.0.1:{doctor.port}")[0]
    assert found.level == "error"
    assert f"it does not reach this host at 127.0.0.1:{mine.port}: nothing listens" in found.text


def test_the_command_prints_and_ends_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        DoctorCommand(json=True).run()
    assert not ended.value.code
    report = json.loads(capsys.readouterr().out)
    assert report["links"] == []
    assert {"level", "subject", "text", "remedy"} == {*report["diagnoses"][0]}
    (tmp_path / "run.toml").write_text("[optim]\nsteps = 'many'\n")
    with pytest.raises(SystemExit) as ended:
        DoctorCommand(tmp_path / "run.toml").run()
    assert ended.value.code == 1
    assert "error" in capsys.readouterr().out
    monkeypatch.delenv("ACSGD_SECRET", raising=False)
    with pytest.raises(ValueError, match="doctors of several hosts need a secret: set ACSGD_SECRET"):
        DoctorCommand(connect="127.0.0.1:1").run()


def test_facts_are_equal_where_the_code_is() -> None:
    assert installed_versions() == installed_versions()
    assert installed_versions().keys() == FACTS.keys()


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_of_a_process_is_what_the_least_of_its_control_groups_allows(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "cgroup" / "job_1" / "step_0"
    of_memory = own if version == 2 else tmp_path / "cgroup" / "memory" / "job_2" / "step_0"
    own.mkdir(parents=True)
    of_memory.mkdir(parents=True, exist_ok=True)
    limit, used = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    no_limit, cached = ("max", "") if version == 2 else (f"{2**63 - 4096}", "inactive_file 1\ntotal_")
    of_version_1 = "memory:/job_2/step_0" if version == 1 else "cpu:/"
    for file, content in (
        (tmp_path / "own", f"3:pids:/other\n4:{of_version_1}\n0::/job_1/step_0\n"),
        (of_memory / f"memory.{limit}", f"{no_limit}\n"),
        (own / "memory.swap.max", "1024\n"),
        (own / "cpu.max", "max 100000\n"),
        (own.parent / "cpu.max", "25000 100000\n"),
        (of_memory.parent / f"memory.{limit}", f"{2**30}\n"),
        (of_memory.parent / f"memory.{used}", f"{2**29 + 4096}\n"),
        (of_memory.parent / "memory.stat", f"anon 1\n{cached}inactive_file 4096\n"),
        (tmp_path / f"memory.{limit}", "1\n"),  # outside of what shows control groups
    ):
        file.write_text(content)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2**40, available=2**39))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=2**20))
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "OWN_CGROUP", tmp_path / "own")
    assert host_memory.host_memory() == (2**30, 2**29, 1024, True)
    assert host_memory.usable_processors() == 0.25
    assert Streams(torch.device("cpu")).memory_bytes() == 2**30 + 1024
    (tmp_path / "own").unlink()  # as where there is no Linux
    assert host_memory.host_memory() == (2**40, 2**39, 2**20, False)
