"""Checks of one host: versions, GPUs, memory, processors, disk, clock, users, addresses, and the interface of gloo."""

from __future__ import annotations

import importlib.metadata
import ipaddress
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from packaging.requirements import Requirement

from acsgd.comm.addresses import VIRTUAL, find_interface
from acsgd.errors import explain
from acsgd.host_memory import host_memory, usable_processors
from acsgd.io.files.atomic import missing_operations

Level = Literal["ok", "warning", "error"]

GIB = 2**30
DRIVER = Path("/proc/driver/nvidia/version")
"""File that the NVIDIA driver makes on Linux."""
MIN_GIB = 2.0
"""Memory and disk room below which even a small run fails, GiB."""
WRITTEN_BYTES = 2**25
"""Size of the file by which the disk is measured."""
SLOW_DISK = 30e6
"""Bytes per second below which saves take noticeably long."""
MIN_INODES = 1000
MIN_FILES = 1024
"""Number of open files that a run needs: connections, caches, logs."""
DAY_S = 86400.0
FIRST_PERSON = 1000
"""Smallest id of a user who is no service of the system: UID_MIN of Linux's login.defs."""
OTHER_SERVICES = range(60_000, 1 << 16)
"""Ids of further services, and of nobody. People have larger ones, too, where LDAP or Active Directory gives them."""


@dataclass(frozen=True)
class Diagnosis:
    """What one check has found."""

    level: Level
    """"error": training will fail; "warning": it will be slow or surprise."""
    subject: str
    """What was checked."""
    text: str
    """What was found, a clause."""
    remedy: str = ""
    """What to type or change; empty if nothing."""

    def sentence(self) -> str:
        """Return text and remedy."""
        return f"{self.text}; {self.remedy}" if self.remedy else self.text


def check_host(directory: Path, interface: str | None) -> Iterator[Diagnosis]:
    """Yield what the checks of this host find.

    directory: in which runs will be saved; need not exist. interface: see `check_interface`.
    """
    checks: list[tuple[str, Callable[[], Iterator[Diagnosis]]]] = [
        ("versions", check_versions),
        ("device", check_devices),
        ("memory", check_memory),
        ("processors", check_processors),
        ("open files", check_open_files),
        ("disk", lambda: check_disk(directory)),
        ("clock", check_clock),
        ("users", check_users),
        ("addresses", check_addresses),
        ("interface", lambda: check_interface(interface)),
    ]
    for subject, check in checks:
        try:
            yield from check()
        except (OSError, psutil.Error) as error:  # such as a container without /proc or /sys
            yield Diagnosis("warning", subject, f"cannot be checked ({explain(error) or error})")


def check_versions() -> Iterator[Diagnosis]:
    """Compare what is installed with what acsgd requires."""
    found = [f"Python {platform.python_version()}"]
    for text in importlib.metadata.requires("acsgd") or ():
        required = Requirement(text)
        if required.marker is not None and not required.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(required.name)
        except importlib.metadata.PackageNotFoundError:
            yield Diagnosis("error", "versions", f"{required.name} is not installed", f'pip install "{required}"')
            continue
        if not required.specifier.contains(version, prereleases=True):
            text = f"{required.name} {version} is installed, acsgd needs {required.specifier}"
            yield Diagnosis("error", "versions", text, f'pip install "{required}"')
        if required.name in ("torch", "transformers"):
            found.append(f"{required.name} {version}")
    yield Diagnosis("ok", "versions", f"acsgd {importlib.metadata.version('acsgd')}, {', '.join(found)}")


def check_devices() -> Iterator[Diagnosis]:
    """Find the GPUs, or why torch finds none."""
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            try:
                yield _describe_gpu(torch, index)
            except RuntimeError as error:  # another process has all of it, or the only right to it
                text = f"GPU {index} cannot be used ({str(error).splitlines()[0]})"
                yield Diagnosis("error", "device", text, "nvidia-smi shows which processes use it")
        return
    if not DRIVER.exists():
        yield Diagnosis("ok", "device", "no NVIDIA driver: trains on the CPU")
        return
    driver = DRIVER.read_text().partition("\n")[0]
    if torch.version.cuda is None:
        text = f"this host has an NVIDIA driver ({driver}), but torch {torch.__version__} is built for the CPU alone"
        yield Diagnosis("error", "device", text, "install a build of torch with CUDA")
        return
    try:
        torch.cuda.init()
        reason = "no GPU is visible; see CUDA_VISIBLE_DEVICES"
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
    text = f"torch {torch.__version__} for CUDA {torch.version.cuda} finds no GPU: {reason}"
    yield Diagnosis("error", "device", text, f"install a driver for it, or a build of torch for this one ({driver})")


def _describe_gpu(torch: Any, index: int) -> Diagnosis:
    free, total = torch.cuda.mem_get_info(index)
    name = f"GPU {index}, {torch.cuda.get_device_name(index)}, has {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < 0.8 * total:
        return Diagnosis("warning", "device", name, "nvidia-smi shows which processes use the rest")
    return Diagnosis("ok", "device", name)


def check_memory() -> Iterator[Diagnosis]:
    """Compare the memory that is available, also to this container, with what a small run needs."""
    memory = host_memory()
    whole = f"{memory.total / GIB:.1f} GiB"
    of = f"the {whole} that this container may use" if memory.is_limited else whole
    text = f"{memory.available / GIB:.1f} GiB of {of} are available"
    if memory.available < MIN_GIB * GIB:
        yield Diagnosis("error", "memory", text, "end other programs, or give the container more")
    else:
        yield Diagnosis("ok", "memory", text)


def check_processors() -> Iterator[Diagnosis]:
    """Compare the load with the processors that this process may use."""
    usable, load = usable_processors(), os.getloadavg()[0]
    text = f"{usable:g} processors, load {load:.1f}"
    if load > usable + 1:
        yield Diagnosis("warning", "processors", text, "other programs slow down training here; end them")
    else:
        yield Diagnosis("ok", "processors", text)


def check_open_files() -> Iterator[Diagnosis]:
    """Look at the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < MIN_FILES:  # -1: no limit
        remedy = f"ulimit -n {MIN_FILES}" if hard < 0 or hard >= MIN_FILES else "raise it in /etc/security/limits.conf"
        yield Diagnosis("warning", "open files", f"a process may open {soft} files, runs need {MIN_FILES}", remedy)


def check_disk(directory: Path) -> Iterator[Diagnosis]:
    """Look at room, rights, operations and speed of the file system on which runs are saved."""
    directory = next(each for each in (directory.absolute(), *directory.absolute().parents) if each.exists())
    if not directory.is_dir():
        yield Diagnosis("error", "disk", f"{directory} is not a directory", "give another log.dir")
        return
    usage = shutil.disk_usage(directory)
    text = f"{directory} has {usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if usage.free < MIN_GIB * GIB:
        yield Diagnosis("error", "disk", text, "make room, or give another log.dir")
        return
    if os.statvfs(directory).f_files > 0 and os.statvfs(directory).f_favail < MIN_INODES:
        yield Diagnosis("error", "disk", f"{directory} can take no more files (df -i)", "remove files")
        return
    try:
        speed = _write_speed(directory)
        missing = missing_operations(directory)
    except OSError as error:
        yield Diagnosis("error", "disk", f"{directory} cannot be written ({error.strerror})", "give another log.dir")
        return
    text = f"{text}, and takes {speed / 1e6:,.0f} MB/s"
    if speed < SLOW_DISK:
        yield Diagnosis("warning", "disk", text, "saves will be slow; give a log.dir on another disk")
    else:
        yield Diagnosis("ok", "disk", text)
    if missing:
        text = f"{directory} is on a file system without {' and '.join(missing)}"
        yield Diagnosis("warning", "disk", text, "runs work there; the start of a run says what differs")


def _write_speed(directory: Path) -> float:
    """Return how fast a file reaches the disk, bytes per second. Raises OSError."""
    content = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=directory) as file:
        began = time.perf_counter()
        for _ in range(WRITTEN_BYTES // len(content)):
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return WRITTEN_BYTES / max(time.perf_counter() - began, 1e-6)


def check_clock() -> Iterator[Diagnosis]:
    """Compare the clock with the files of this package, which are older."""
    now, written = time.time(), Path(__file__).stat().st_mtime
    shown = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    if now < written - DAY_S:
        text = f"it is {shown} on this host, before acsgd was installed"
        yield Diagnosis("error", "clock", text, "set the clock: timedatectl set-ntp true")
    else:
        yield Diagnosis("ok", "clock", shown)


def check_users() -> Iterator[Diagnosis]:
    """Look for other people who use this host: programs such as gloo and torch's store accept connections of theirs."""
    found = [process.info for process in psutil.process_iter(["uids", "username"])]
    users = {each["uids"].real: each["username"] for each in found if each["uids"] is not None}
    people = {user for user in users if user >= FIRST_PERSON and user not in OTHER_SERVICES}
    if names := ", ".join(sorted(users[user] for user in people - {os.getuid()})):
        text = f"processes of {names}, who can connect to the ports that runs open on this host, at loopback addresses"
        remedy = (
            f"train in a container; or keep them from a run with a mesh, as root: nft '{mesh_rule(os.getuid())}' (then "
            "only this user of the host can have runs with a mesh, until: nft delete table inet acsgd)"
        )
        yield Diagnosis("warning", "users", text, remedy)
    else:
        yield Diagnosis("ok", "users", "no process of another person is seen")


def mesh_rule(user: int) -> str:
    """Return commands of nftables by which a user alone can connect to virtual addresses of a mesh on this host.

    To all of them: a host draws its address when it starts. With the rules of two users, neither could connect.
    """
    return (
        "add table inet acsgd; add chain inet acsgd output { type filter hook output priority 0; }; "
        f"add rule inet acsgd output ip daddr {VIRTUAL}0.0/16 meta l4proto tcp meta skuid != {user} "
        "reject with tcp reset"
    )


def check_addresses() -> Iterator[Diagnosis]:
    """List the addresses of this host, and say which hosts can reach them."""
    addresses = [
        (name, ipaddress.ip_address(each.address.partition("%")[0]))
        for name, stats in psutil.net_if_stats().items()
        if stats.isup
        for each in psutil.net_if_addrs().get(name, ())
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]
    others = [(name, address) for name, address in addresses if not address.is_loopback and not address.is_link_local]
    if not others:
        text = "no network interface is up but loopback: only processes of this host can train together"
        yield Diagnosis("warning", "addresses", text, "ip link shows the interfaces")
        return
    text = ", ".join(f"{address} ({name})" for name, address in others)
    if not any(address.is_global for _, address in others):
        text += "; none is public: hosts of other networks cannot dial this one, unless a port is forwarded to it"
    yield Diagnosis("ok", "addresses", text)


def check_interface(interface: str | None) -> Iterator[Diagnosis]:
    """Look at the network interface that gloo will use. interface: value of GLOO_SOCKET_IFNAME; None = not set."""
    stats = psutil.net_if_stats()
    if interface is None:
        found = find_interface(socket.gethostname(), ())
        yield Diagnosis("ok", "interface", f"gloo will use {found or 'that of the host name'}")
        return
    for name in (each.strip() for each in interface.split(",")):
        problem = "is not one of this host" if name not in stats else "" if stats[name].isup else "is down"
        if problem:
            text = f"GLOO_SOCKET_IFNAME={interface}, but {name} {problem}"
            yield Diagnosis("error", "interface", text, f"give one of {', '.join(sorted(stats))}, or unset it")
            return
    yield Diagnosis("ok", "interface", f"gloo uses {interface}, as GLOO_SOCKET_IFNAME says")
