"""Hosts with rate-limited links on one machine: one Linux network namespace per host, connected by a switch.

    with lab(hosts=2, delay_s=0.02) as network:
        network.limit(100)                      # Mbit/s, of every host, up and down at once
        enter(network.namespaces[1])            # moves this thread to host 1
        network.cut(1)                          # disconnect host 1; `heal` reconnects it

A host has one interface, eth0, with the address 10.77.0.<host + 1>. Token buckets (tc) limit its outgoing and its
incoming rate. They count whole packets: 1448 bytes of TCP payload per 1500. With `behind_router`, a host is a router,
and the host proper is in a network behind it.

Without delay the switch is a kernel bridge. With delay it is a process that holds the TUN device of every host and
forwards each packet a fixed time after its arrival (many kernels are built without netem); `switch_cpu_s` is its CPU
time. Packets are dropped where too many wait at a limit, and at random if there is a `loss`. It forwards a few
hundred Mbit/s of packets. With `offload`, hosts hand over TCP segments of up to 64 KB, as to network cards that divide
them into packets: it forwards 1 Gbit/s in each direction, and all packets of a segment arrive, wait or are lost
together.

tcp_slow_start_after_idle is off in every namespace. By default TCP resets the congestion window of a connection that
has been idle for some round trips, as happens in every step of a pipeline. On your own hosts: sysctl -w
net.ipv4.tcp_slow_start_after_idle=0. Congestion control is reno, the only one that every kernel offers in a namespace
(bbr adapts to a changed rate much later). Socket buffers are autotuned by the kernel, up to a few MB; 20 ms of delay at
100 Mbit/s need 0.5 MB.

Needs root, iproute2 and, with delay, /dev/net/tun; routers need nftables and conntrack. Nothing outside the namespaces
changes, and they are removed at the end, also after an error or Ctrl-C.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import secrets
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

MTU = 1500
BURST_S = 1 / 250
"""Size of a token bucket, seconds at its rate: one tick of a kernel clock of 250 Hz."""
QUEUE_S = 0.2
"""Queue length at a limit, seconds at its rate; further packets are dropped."""
RATE = struct.Struct("qd")  # message to the switch: host, and bytes per second, 0 = no limit
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR, TUN_F_CSUM, TUN_F_TSO4 = 0x0001, 0x1000, 0x4000, 0x01, 0x02
SEGMENT = struct.Struct("=BBHHHH")  # linux/virtio_net.h, before each packet of a TUN device; the fourth: payload bytes
HEADERS = 52  # bytes of IPv4 and TCP headers with timestamps
LONGEST = SEGMENT.size + (1 << 16)  # of a read: a few bytes more, and the C library maps memory anew for each
PACKETS_PER_TURN = 32
ROUTER, HOME = "192.168.1.1", "192.168.1.2"
"""Addresses of a router and of the host behind it, in their network."""


@dataclass(frozen=True)
class Lab:
    """A running network."""

    namespaces: tuple[str, ...]
    """By host."""
    center: str
    """The namespace of the bridge."""
    switch: subprocess.Popen[bytes] | None
    """The process that delays packets; None where the bridge is the switch."""

    def limit(self, mbit: float | None, host: int | None = None) -> None:
        """Set the rate of a host, by default of each, up and down, in 10**6 bits per second; None = no limit."""
        for each in range(len(self.namespaces)) if host is None else (host,):
            _limit(self.namespaces[each], "eth0", mbit)
            if self.switch is None:
                _limit(self.center, f"port{each}", mbit)
            elif self.switch.stdin is not None:
                self.switch.stdin.write(RATE.pack(each, (mbit or 0) * 1e6 / 8))
                self.switch.stdin.flush()

    def cut(self, host: int) -> None:
        """Take a host off the network. What is on its way is lost; its connections stay until they time out."""
        run(f"ip -n {self.namespaces[host]} link set eth0 down")

    def block(self, host: int, other: int) -> None:
        """Drop all packets between two hosts, until `unblock`."""
        for here, there in ((host, other), (other, host)):
            run(f"ip -n {self.namespaces[here]} route add blackhole {address(there)}/32")

    def unblock(self, host: int, other: int) -> None:
        """Undo `block`."""
        for here, there in ((host, other), (other, host)):
            run(f"ip -n {self.namespaces[here]} route del blackhole {address(there)}/32")

    def heal(self, host: int) -> None:
        """Put a host back on the network."""
        run(f"ip -n {self.namespaces[host]} link set eth0 up")

    def switch_cpu_s(self) -> float:
        """Return the CPU time that the switch has taken so far, in its process; 0 where the bridge is the switch."""
        if self.switch is None:
            return 0.0
        nanoseconds, *_ = Path(f"/proc/{self.switch.pid}/schedstat").read_text().split()
        return int(nanoseconds) / 1e9


@contextlib.contextmanager
def lab(
    *, hosts: int, delay_s: float | Sequence[float] = 0.0, loss: float = 0.0, offload: bool = False
) -> Iterator[Lab]:
    """Create a network without rate limits and remove it at the end; all processes in it must have ended by then.

    delay_s: one-way delay between any two hosts; or that of each host to the switch, of which the delay between two is
    the sum. loss: fraction of packets that are dropped, which needs a delay. offload: whether packets that are delayed
    travel in segments of up to 64 KB. Raises RuntimeError that names what this machine lacks.
    """
    delays_s = [delay_s / 2] * hosts if isinstance(delay_s, (int, float)) else [*delay_s]
    check(needs_tun=any(delays_s))
    name = f"acsgd-{secrets.token_hex(4)}"
    namespaces, center = tuple(f"{name}-host{host}" for host in range(hosts)), f"{name}-center"
    with contextlib.ExitStack() as cleanup:
        for namespace in (*namespaces, center):
            cleanup.callback(_remove, namespace)
            run(f"ip netns add {namespace}")
            run(f"ip -n {namespace} link set lo up")
        switch = None
        if any(delays_s):
            switch = cleanup.enter_context(_started_switch(namespaces, delays_s, loss, offload))
        else:
            _add_bridge(center, namespaces)
        for host, namespace in enumerate(namespaces):
            _configure(namespace, address(host))
        yield Lab(namespaces, center, switch)


@dataclass(frozen=True)
class Router:
    """A host that translates the addresses of one behind it."""

    namespace: str
    """Of the host behind it."""
    _own: str

    def rebind(self) -> None:
        """Forget all translations, as a router that starts again does. Packets of old connections are dropped."""
        run(f"ip netns exec {self._own} conntrack -F")


@contextlib.contextmanager
def behind_router(network: Lab, host: int, ports: Mapping[int, int] = MappingProxyType({})) -> Iterator[Router]:
    """Make a host a router, and add one behind it, in a namespace of its own, that other hosts cannot connect to.

    ports: of the router that lead to the host behind it, such as the mapped port of a container: {41000: 29400}.
    """
    check(needs_tun=False, needs_nat=True)
    own, inner = network.namespaces[host], f"{network.namespaces[host]}-home"
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(_remove, inner)
        run(f"ip netns add {inner}")
        run(f"ip -n {inner} link set lo up")
        run(f"ip -n {inner} link add eth0 mtu {MTU} type veth peer name inside mtu {MTU} netns {own}")
        run(f"ip -n {own} address add {ROUTER}/24 dev inside")
        run(f"ip -n {own} link set inside up")
        _configure(inner, HOME)
        run(f"ip -n {inner} route add default via {ROUTER}")
        with _inside(own):
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
            Path("/proc/sys/net/netfilter/nf_conntrack_tcp_loose").write_text("0")
        rules = [
            "add table ip nat",
            "add chain ip nat in { type nat hook prerouting priority -100 ; }",
            "add chain ip nat out { type nat hook postrouting priority 100 ; }",
            "add rule ip nat out oifname eth0 masquerade fully-random",
            "add chain ip nat pass { type filter hook forward priority 0 ; }",
            "add rule ip nat pass ct state invalid drop",
            *(
                f"add rule ip nat in iifname eth0 tcp dport {port} dnat to {HOME}:{inside}"
                for port, inside in ports.items()
            ),
        ]
        for rule in rules:
            run(f"ip netns exec {own} nft {rule}")
        yield Router(inner, own)


def use_disk(disk: Path, at: Path, hidden: Path) -> None:
    """Let this process and its children see a directory at a path, and nothing in the directory `hidden`."""
    libc = ctypes.CDLL(None, use_errno=True)
    mounts = ((None, "/", MS_REC | MS_PRIVATE), (disk, at, MS_BIND), (None, hidden, 0))
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare: this process cannot have mounts of its own")
    for source, target, flags in mounts:
        source_name = None if source is None else os.fsencode(source)
        if libc.mount(source_name, os.fsencode(target), b"tmpfs", flags, None):
            raise OSError(ctypes.get_errno(), "mount", str(target))


def address(host: int) -> str:
    """Return the IPv4 address of a host."""
    return f"10.77.0.{host + 1}"


def enter(namespace: str) -> None:
    """Move this thread, and threads it starts later, into a network namespace. Open sockets stay where they are."""
    with open(f"/run/netns/{namespace}") as file:
        _set_namespace(file.fileno())


def check(*, needs_tun: bool, needs_nat: bool = False) -> None:
    """Raise RuntimeError that names what is missing if this machine or user cannot create namespaces."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise RuntimeError("network namespaces need Linux and root; start this as root, best in a virtual machine")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise RuntimeError(f"the program {program} is not here; install iproute2: apt-get install iproute2")
    for program, package in (("nft", "nftables"), ("conntrack", "conntrack")) if needs_nat else ():
        if shutil.which(program) is None:
            raise RuntimeError(f"the program {program} is not here; install it: apt-get install {package}")
    if needs_tun and not Path("/dev/net/tun").exists():
        raise RuntimeError("/dev/net/tun is not here, without which there is no delay; try: modprobe tun")


def _remove(namespace: str) -> None:
    """Remove a namespace, if there is one; signals wait until that is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        if Path(f"/run/netns/{namespace}").exists():
            run(f"ip netns del {namespace}")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _add_bridge(center: str, namespaces: Sequence[str]) -> None:
    run(f"ip -n {center} link add bridge type bridge")
    run(f"ip -n {center} link set bridge up")
    for host, namespace in enumerate(namespaces):
        run(f"ip -n {namespace} link add eth0 mtu {MTU} type veth peer name port{host} mtu {MTU} netns {center}")
        run(f"ip -n {center} link set port{host} master bridge up")


def _configure(namespace: str, own_address: str) -> None:
    with _inside(namespace):
        Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
    run(f"ip -n {namespace} address add {own_address}/24 dev eth0")
    run(f"ip -n {namespace} link set eth0 mtu {MTU} up")


def _limit(namespace: str, device: str, mbit: float | None) -> None:
    queue = "pfifo limit 1000"
    if mbit is not None:
        burst = max(2 * MTU, round(mbit * 1e6 / 8 * BURST_S))
        queue = f"tbf rate {round(mbit * 1e6)}bit burst {burst} latency {QUEUE_S * 1e3:g}ms"
    run(f"tc -n {namespace} qdisc replace dev {device} root {queue}")


def run(command: str) -> str:
    """Run a program in a session of its own, where a terminal's Ctrl-C does not reach it; return its output."""
    done = subprocess.run(command.split(), capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def _inside(namespace: str) -> Iterator[None]:
    """Let this thread be in a network namespace for a while."""
    with open("/proc/thread-self/ns/net") as home:
        enter(namespace)
        try:
            yield
        finally:
            _set_namespace(home.fileno())


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns: this process cannot enter a network namespace")


@contextlib.contextmanager
def _started_switch(
    namespaces: Sequence[str], delays_s: Sequence[float], loss: float, offload: bool
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process that delays packets; it ends when its input does, so also when this process dies."""
    command = [sys.executable, __file__, ",".join(map(str, delays_s)), str(loss), str(int(offload)), *namespaces]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as switch:
        assert switch.stdout is not None
        if not switch.stdout.read(1):
            raise RuntimeError("the switch of the network did not start; see its error above")
        yield switch


class Switch:
    """Forwards packets between the TUN devices of all hosts, with a delay and a rate limit per receiving host.

    delays_s: of each host to this switch; loss: fraction of packets that are dropped; offload: as for `lab`.
    """

    def __init__(self, namespaces: Sequence[str], delays_s: Sequence[float], loss: float, offload: bool) -> None:
        self._delays_s = delays_s
        self._loss = loss
        self._rates = [0.0] * len(namespaces)
        self._ports = [_open_tun(namespace, offload) for namespace in namespaces]
        self._hosts = {socket.inet_aton(address(host)): host for host in range(len(namespaces))}
        self._free_at = [0.0] * len(namespaces)  # when the queue of a host will be empty
        self._travelling: list[tuple[float, int, int, bytes]] = []
        """Heap of packets: when they arrive, a number, the host, and the bytes, SEGMENT first."""
        self._numbers = itertools.count()
        self._waiting: list[deque[tuple[float, bytes]]] = [deque() for _ in namespaces]  # with their time, in order

    def run(self, control: int) -> None:
        """Forward packets until the file descriptor `control` is closed; rates read from it apply at once."""
        while True:
            dues = [packets[0][0] for packets in (self._travelling, *self._waiting) if packets]
            due = min(dues, default=time.monotonic() + 1)
            ready, _, _ = select.select([control, *self._ports], [], [], max(0.0, due - time.monotonic()))
            if control in ready:
                if len(message := os.read(control, RATE.size)) < RATE.size:
                    return
                host, rate = RATE.unpack(message)
                self._rates[host] = rate
            for source, port in enumerate(self._ports):
                if port in ready:
                    self._take(source, port)
            self._arrive()
            self._pass_on()

    def _take(self, source: int, port: int) -> None:
        with contextlib.suppress(OSError):  # no more packets, or the host is cut off
            for _ in range(PACKETS_PER_TURN):
                packet = os.read(port, LONGEST)
                ip = packet[SEGMENT.size : SEGMENT.size + 20]
                if ip[0] >> 4 == 4 and (host := self._hosts.get(ip[16:20])) is not None:
                    if random.random() < self._loss:
                        continue
                    at = time.monotonic() + self._delays_s[source] + self._delays_s[host]
                    heapq.heappush(self._travelling, (at, next(self._numbers), host, packet))

    def _arrive(self) -> None:
        """Let packets that have arrived wait for the rate of their host; drop them where too many wait."""
        now = time.monotonic()
        while self._travelling and self._travelling[0][0] <= now:
            at, _, host, packet = heapq.heappop(self._travelling)
            if rate := self._rates[host]:
                if self._free_at[host] > at + QUEUE_S:
                    continue
                at = self._free_at[host] = max(at, self._free_at[host]) + _wire_bytes(packet) / rate
            self._waiting[host].append((at, packet))

    def _pass_on(self) -> None:
        now = time.monotonic()
        for port, packets in zip(self._ports, self._waiting, strict=True):
            while packets and packets[0][0] <= now:
                with contextlib.suppress(OSError):  # the host is cut off
                    os.write(port, packets.popleft()[1])


def _open_tun(namespace: str, offload: bool) -> int:
    with _inside(namespace):
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
        fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 if offload else 0)
    return device


def _wire_bytes(packet: bytes) -> int:
    """Return the bytes of a packet, or of those into which a network card would divide it."""
    _, _, _, payload, _, _ = SEGMENT.unpack_from(packet)
    further = (len(packet) - SEGMENT.size - HEADERS - 1) // payload if payload else 0
    return len(packet) - SEGMENT.size + further * HEADERS


def main() -> None:
    """Run the switch: python netlab.py DELAY_S,... LOSS OFFLOAD NAMESPACE..."""
    delays_s, loss, offload, *namespaces = sys.argv[1:]
    switch = Switch(namespaces, [*map(float, delays_s.split(","))], float(loss), offload == "1")
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))  # a wire does not wait for a CPU
    sys.stdout.write(".")
    sys.stdout.close()
    switch.run(sys.stdin.fileno())


if __name__ == "__main__":
    main()
