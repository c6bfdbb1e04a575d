"""Measures the link to another host on which `acsgd doctor` listens: delay, rates, loss, packet size, clock, versions.

Each side proves that it has the secret of the run. Messages are lines of JSON; data to measure a rate follows a request
until the connection ends.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from acsgd.comm.addresses import listen_everywhere, resolve, split_address
from acsgd.commands.doctor.host import Diagnosis

PROTOCOL = 1
MAX_LINE = 4096
MAX_CONNECTIONS = 32
"""Connections that a listening doctor serves at a time; others wait."""
CONNECT_S = 5.0
"""Time in which a connection is made, or a line is answered."""
DIAL_S = 30.0
"""Time in which a peer says whether it reached an address."""
QUEUE_S = 120.0
"""Time for which other hosts may measure their links first."""
MAX_MEASURED_S = 10.0
"""Longest time for which a peer sends or receives data."""
STALL_S, TRIED_S = 3.0, 1.0
"""Time without data after which a link passes none, and the same where sizes of segments are tried."""
ECHOES = 20
BLOCK = bytes(2**16)
SEGMENTS = (1400, 1300, 1200, 1000, 500)
"""Sizes of segments that are tried where larger ones do not arrive, bytes."""
TCP_INFO = struct.Struct("8x 24I 4Q 2I")
"""Linux's tcp_info up to the number of received segments."""
RETRANSMITTED, SENT_SEGMENTS = 23, 28
"""Indices of its fields."""

CLOCK_WARNING_S, CLOCK_ERROR_S = 30.0, 3600.0
SLOW_LINK = 10e6
"""Bits per second below which a link needs the strongest compression."""
LOSSY, LOSSY_FOR_TCP = 0.02, 0.005
"""Parts of the segments beyond which a link is bad, and beyond which it slows down TCP if its delay is long."""
LONG_S = 0.01
"""Delay, there and back, beyond which losses slow down TCP, seconds."""


class PeerError(Exception):
    """A peer cannot be reached or does not answer as a doctor. The text is a clause; the remedy says what to do."""

    def __init__(self, text: str, remedy: str) -> None:
        super().__init__(text)
        self.remedy = remedy


@dataclass(frozen=True)
class MeasuredLink:
    """What was measured of a link."""

    address: str
    facts: Mapping[str, str]
    """Facts of the peer; the address and port by which it sees this host: "sees", "sees_port"."""
    own_port: int
    """Port of this host on the connection of which these are."""
    delay_s: float
    """Median time of a round trip of a small message."""
    clock_s: float
    """By how much the peer's clock is ahead."""
    sent: float | None
    """Rate of data to the peer, bits per second; None if large messages do not arrive."""
    received: float | None
    """Rate of data from the peer, as `sent`."""
    loss: float
    """Part of the sent segments that were sent again."""
    segment: int | None = None
    """Largest tried segment that arrives where larger ones do not, bytes."""


class Doctor:
    """Answers the doctors of other hosts on a port, in threads.

    facts: of this host, compared by the peers.
    """

    def __init__(self, port: int, secret: bytes, facts: Mapping[str, str]) -> None:
        self._secret = secret
        self._facts = facts
        self._server = listen_everywhere(port)
        self.port: int = self._server.getsockname()[1]
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._measuring = threading.Lock()
        threading.Thread(target=self._accept, name="doctor", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # ends the wait of the thread
        self._server.close()

    def _accept(self) -> None:
        while True:
            self._slots.acquire()
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.closing(connection), contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            try:
                connection.settimeout(CONNECT_S)
                self._answer(_Lines(connection), connection)
            finally:
                self._slots.release()

    def _answer(self, lines: _Lines, connection: socket.socket) -> None:
        """Prove the secret to each other, then answer requests until the connection ends."""
        nonce = secrets.token_hex(16)
        lines.send({"acsgd": "doctor", "protocol": PROTOCOL, "nonce": nonce})
        hello = lines.receive()
        if not hmac.compare_digest(str(hello["proof"]), _proof(self._secret, "client", nonce, hello["nonce"])):
            lines.send({"refused": True})
            return
        proof = _proof(self._secret, "server", nonce, hello["nonce"])
        host, port = connection.getpeername()[:2]
        seen = {"sees": host.removeprefix("::ffff:"), "sees_port": str(port)}
        lines.send({"proof": proof, "facts": {**self._facts, **seen}})
        while request := lines.receive():
            match request["do"]:
                case "time":
                    lines.send({"time": time.time()})
                case "dial":
                    lines.send({"problem": self._dial(str(request["address"]))})
                case "take" | "give":
                    seconds, wait_s = (min(float(request[name]), MAX_MEASURED_S) for name in ("seconds", "wait_s"))
                    with self._measuring:
                        lines.send({"begins": True})
                        if request["do"] == "give":
                            send_data(connection, seconds, wait_s)
                        else:
                            lines.send({"bits": receive_data(connection, wait_s)})
                    return

    def _dial(self, address: str) -> str:
        try:
            with DoctorClient(address, self._secret):
                return ""
        except PeerError as error:
            return str(error)


class DoctorClient:
    """A connection to the doctor of another host. Raises PeerError.

    address: host:port; segment: largest segment of either side, bytes, None = that of the path.
    """

    def __init__(self, address: str, secret: bytes, segment: int | None = None) -> None:
        self._address = address
        self._socket = _connect(address, segment)
        self.own_port: int = self._socket.getsockname()[1]
        self._lines = _Lines(self._socket)
        try:
            self.facts = self._greet(secret)
        except (OSError, ValueError, KeyError) as error:
            self.close()
            raise PeerError(f"another program than acsgd doctor answers at {address}", "give another port") from error
        except PeerError:
            self.close()
            raise

    def __enter__(self) -> DoctorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def request(self, what: str, *, within_s: float = CONNECT_S, **arguments: object) -> dict[str, Any]:
        """Return the answer to a request."""
        try:
            self._socket.settimeout(within_s)
            self._lines.send({"do": what, **arguments})
            answer = self._lines.receive()
        except (OSError, ValueError) as error:
            raise PeerError(f"{self._address} no longer answers ({error})", "start this command again") from error
        if not answer:
            raise PeerError(f"{self._address} no longer answers", "start this command again")
        return answer

    def send(self, seconds: float, wait_s: float) -> tuple[float, float]:
        """Send data for some seconds. Returns the rate at the peer, bits per second, and the part that was lost.

        Raises OSError if none is taken for `wait_s` seconds, or the peer does not send the rate.
        """
        self.request("take", within_s=QUEUE_S, seconds=seconds, wait_s=wait_s)
        send_data(self._socket, seconds, wait_s)
        self._socket.settimeout(MAX_MEASURED_S + wait_s)  # what is in buffers arrives first
        return float(self._lines.receive()["bits"]), _loss(self._socket)

    def receive(self, seconds: float, wait_s: float) -> float:
        """Receive data for some seconds. Returns the rate, bits per second. Raises OSError if none for `wait_s`."""
        self.request("give", within_s=QUEUE_S, seconds=seconds, wait_s=wait_s)
        return receive_data(self._socket, wait_s)

    def _greet(self, secret: bytes) -> Mapping[str, str]:
        """Prove the secret to each other; return the facts of the peer."""
        greeting, nonce = self._lines.receive(), secrets.token_hex(16)
        if greeting["acsgd"] != "doctor" or greeting["protocol"] != PROTOCOL:
            raise PeerError(
                f"{self._address} has another version of acsgd", "install the same version of acsgd on all hosts"
            )
        self._lines.send({"nonce": nonce, "proof": _proof(secret, "client", greeting["nonce"], nonce)})
        answer = self._lines.receive()
        expected = _proof(secret, "server", greeting["nonce"], nonce)
        if not hmac.compare_digest(str(answer.get("proof", "")), expected):
            raise PeerError(f"{self._address} has another secret", "give all hosts the same ACSGD_SECRET")
        return {str(name): str(value) for name, value in answer["facts"].items()}


def measure(address: str, secret: bytes, seconds: float) -> MeasuredLink:
    """Measure the link to a doctor that listens. seconds: of data in each direction. Raises PeerError."""
    with DoctorClient(address, secret) as peer:
        facts, own_port, rounds = peer.facts, peer.own_port, []
        for _ in range(ECHOES):
            began = time.time()
            there = float(peer.request("time")["time"])
            ended = time.time()
            rounds.append((ended - began, there - (began + ended) / 2))
    rounds.sort()
    delay_s, clock_s = rounds[ECHOES // 2][0], rounds[0][1]  # the fastest round has the most accurate clock
    sent, received, loss = _rates(address, secret, seconds, STALL_S)
    segment = None
    if sent is None or received is None:
        tried = ((size, _rates(address, secret, 0.2, TRIED_S, size)) for size in SEGMENTS)
        segment = next((size for size, (there, back, _) in tried if there is not None and back is not None), None)
    return MeasuredLink(address, facts, own_port, delay_s, clock_s, sent, received, loss, segment)


def _rates(
    address: str, secret: bytes, seconds: float, wait_s: float, segment: int | None = None
) -> tuple[float | None, float | None, float]:
    """Return the rates to and from a peer, None where no data arrives for `wait_s`, and the loss.

    segment: see `DoctorClient`.
    """
    sent = received = None
    loss = 0.0
    with DoctorClient(address, secret, segment) as peer, contextlib.suppress(OSError, ValueError, KeyError, PeerError):
        sent, loss = peer.send(seconds, wait_s)
    with DoctorClient(address, secret, segment) as peer, contextlib.suppress(OSError, PeerError):
        received = peer.receive(seconds, wait_s)
    return sent, received, loss


def diagnose(link: MeasuredLink, facts: Mapping[str, str], own: set[str]) -> Iterator[Diagnosis]:
    """Yield what a measured link means for training. facts, own: of this host: facts, and addresses."""
    subject = f"link to {link.address}"
    for name in ("code", "torch", "transformers"):
        mine, other = facts[name], link.facts.get(name, "none")
        if mine != other:
            what = "source code of acsgd" if name == "code" else name
            text = f"{what} differs: {mine} here, {other} there"
            yield Diagnosis("error", subject, text, "install the same versions on all hosts")
    if abs(link.clock_s) > CLOCK_WARNING_S:
        text = f"its clock is {abs(link.clock_s):,.0f} s {'ahead' if link.clock_s > 0 else 'behind'}"
        level = "error" if abs(link.clock_s) > CLOCK_ERROR_S else "warning"
        yield Diagnosis(level, subject, text, "set both clocks: timedatectl set-ntp true")  # type: ignore[arg-type]
    if link.sent is None or link.received is None:
        yield _explain_stall(link, subject)
        return
    text = (
        f"{link.delay_s * 1e3:.1f} ms, {link.sent / 1e6:,.1f} Mbit/s there, {link.received / 1e6:,.1f} Mbit/s back, "
        f"{link.loss:.1%} lost"
    )
    seen = link.facts.get("sees", "")
    if seen and seen not in own:
        text += f"; it sees this host as {seen}, so a router translates addresses"
    remedies = []
    if link.loss > LOSSY:
        remedies.append("the link loses packets: look at Wi-Fi, cables, or the provider")
    if link.loss > LOSSY_FOR_TCP and link.delay_s > LONG_S:
        remedies.append("TCP slows down at each loss: try --run.congestion bbr")
    if min(link.sent, link.received) < SLOW_LINK:  # where a queue is short, such a link loses packets, too
        remedies.append("use a mode for slow links, such as --dp.mode cocktail or diloco")
    yield Diagnosis("warning" if remedies else "ok", subject, text, "; ".join(remedies))


def diagnose_router(links: Sequence[MeasuredLink], own: set[str], *, is_reached: bool | None) -> Iterator[Diagnosis]:
    """Yield what kind of router is between this host and the others, as these see it.

    own: addresses of this host; is_reached: whether a host has connected to this one; None = none has tried.
    """
    seen = [(link, link.facts["sees"]) for link in links if link.facts.get("sees")]
    translated = [(link, address) for link, address in seen if address not in own]
    if not seen:
        return
    dial = "others cannot dial this host: forward a port to it, and --announce it, or start it with --announce none"
    if is_reached is None:
        dial = "whether others can dial this host: add --listen PORT, at which they try to"
    if not translated:
        text = "open: others see this host by its own address"
        if is_reached is False:
            yield Diagnosis("warning", "router", f"{text}, but a firewall keeps them out", dial)
            return
        yield Diagnosis("ok", "router", text, dial if is_reached is None else "")
        return
    addresses = ", ".join(dict.fromkeys(address for _, address in translated))
    if is_reached:
        text = f"one-to-one: others see this host as {addresses}, and reach it there"
        yield Diagnosis("ok", "router", text)
        return
    ports = [(str(link.own_port), port) for link, _ in translated if (port := link.facts.get("sees_port"))]
    changed = [port for own, port in ports if port != own]
    kind = f"a router that {'changes' if changed else 'keeps'} ports" if ports else "a router"
    if len({*changed}) > 1:
        kind = "symmetric: a router that maps each connection to another port"
    text = f"{kind}; others see this host as {addresses}"
    yield Diagnosis("ok" if is_reached is None else "warning", "router", text, dial)


def _explain_stall(link: MeasuredLink, subject: str) -> Diagnosis:
    direction = "to it" if link.sent is None else "from it"
    text = f"small messages pass, but large ones {direction} do not arrive"
    if link.segment is None:
        return Diagnosis("error", subject, text, "a firewall or router on the path ends connections; try another path")
    text += f" unless segments have at most {link.segment} bytes: a router drops larger packets without an answer"
    return Diagnosis("error", subject, text, f"ip link set dev INTERFACE mtu {link.segment + 60} on both hosts")


def send_data(connection: socket.socket, seconds: float, wait_s: float) -> None:
    """Send zeros for some seconds, then end the data. Raises OSError if none is taken for `wait_s`."""
    connection.settimeout(wait_s)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        connection.sendall(BLOCK)
    connection.shutdown(socket.SHUT_WR)


def receive_data(connection: socket.socket, wait_s: float) -> float:
    """Receive data to its end; return its rate from the first bytes on, bits per second.

    Raises OSError if none arrives for `wait_s`, or none at all.
    """
    connection.settimeout(wait_s)
    first = len(connection.recv(2**18))
    if not first:
        raise ConnectionError("no data arrived")
    count, began = 0, time.monotonic()
    while data := connection.recv(2**18):
        count += len(data)
    return 8 * (count or first) / max(time.monotonic() - began, 1e-3)


class _Lines:
    """Messages of one line each on a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._read = b""

    def send(self, message: Mapping[str, object]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Return the next message, an empty one if the connection has ended. Raises ValueError if it is too long."""
        while b"\n" not in self._read:
            if len(self._read) > MAX_LINE:
                raise ValueError("a line is too long")
            data = self._socket.recv(MAX_LINE)
            if not data:
                return {}
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message


def _connect(address: str, segment: int | None) -> socket.socket:
    """Connect to host:port. Raises PeerError."""
    host, port = split_address(address)
    try:
        found = resolve(host, port)
    except OSError:
        raise PeerError(f"the name {host} has no address", "correct it, or give an address") from None
    problems: list[OSError] = []
    for family, target in found:
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if segment is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
        try:
            connection.connect(target)
            return connection
        except OSError as error:
            connection.close()
            problems.append(error)
    if any(each.errno == errno.ECONNREFUSED for each in problems):
        raise PeerError(f"nothing listens at {address}", f"start acsgd doctor --listen {port} there")
    raise PeerError(
        f"{address} does not answer ({os.strerror(problems[0].errno) if problems[0].errno else 'no packet came back'})",
        f"let firewall and router of that host pass TCP port {port}, or correct the address",
    )


def _loss(connection: socket.socket) -> float:
    """Return the part of the segments of a connection that were sent again; 0 where the system does not say."""
    if not hasattr(socket, "TCP_INFO"):
        return 0.0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
    if len(info) < TCP_INFO.size:
        return 0.0
    fields = TCP_INFO.unpack(info)
    return float(fields[RETRANSMITTED] / max(fields[SENT_SEGMENTS], 1))


def _proof(secret: bytes, side: str, *nonces: object) -> str:
    """Return what only a host with the secret can compute of the nonces of a connection."""
    return hmac.new(secret, f"acsgd doctor {side} {nonces}".encode(), hashlib.sha256).hexdigest()
