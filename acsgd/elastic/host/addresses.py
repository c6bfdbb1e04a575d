"""The addresses by which the hosts of an elastic run reach each other."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

DEFAULT_PORT = 29400
LOOPBACK = ("localhost", "127.0.0.1")
"""Hosts of a run on one machine."""
ANYWHERE = "192.0.2.1:9"
"""An address that no host has, to find the default route."""
SIOCGIFADDR = 0x8915
"""Linux: request for the address of an interface."""


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Return host:port of each endpoint of --rdzv-endpoint. Raises ValueError that says what to type."""
    endpoints = []
    for part in text.split(","):
        host, colon, port = part.strip().rpartition(":")
        if not colon:
            host, port = port, str(DEFAULT_PORT)
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(
                f"--rdzv-endpoint={text}: {part.strip() or 'an empty part'} is not host:port; give one or more hosts, "
                f"such as hostA:{DEFAULT_PORT},hostB:{DEFAULT_PORT}"
            )
        endpoints.append(f"{host}:{port}")
    return tuple(dict.fromkeys(endpoints))


def find_address(endpoints: tuple[str, ...], local_address: str | None) -> str:
    """Return host:port at which other hosts reach this one.

    It is the first endpoint that is this host's and whose port is free; else a free port of `local_address` (torchrun's
    --local-addr), or of the address from which this host reaches the first endpoint. Raises OSError if it reaches none.
    """
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if _can_bind(host, int(port)):
            return endpoint
    host = local_address or address_towards(endpoints)
    with socket.create_server((host, 0)) as server:
        return f"{host}:{server.getsockname()[1]}"


def _can_bind(host: str, port: int) -> bool:
    """Return whether an address is of this host, and nothing listens there."""
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


def address_towards(endpoints: tuple[str, ...]) -> str:
    """Return the address of this host from which it reaches the first of the endpoints that it can reach.

    Raises OSError if it reaches none.
    """
    errors = []
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((host, int(port)))  # sends nothing
                address: str = probe.getsockname()[0]
                return address
        except OSError as error:
            errors.append(f"{endpoint}: {error}")
    raise OSError(f"no endpoint of --rdzv-endpoint can be reached ({'; '.join(errors)})")


def find_interface(address: str, endpoints: tuple[str, ...]) -> str | None:
    """Return the network interface of this host by which it reaches the others; None if it cannot be found.

    address: host:port of this host. Its own name may resolve to a loopback address, as on Debian, which other hosts
    cannot reach: then it is the interface towards another endpoint, or that of the default route.
    """
    host = address.rpartition(":")[0]
    try:
        own = socket.gethostbyname(host)
        if own.startswith("127.") and host not in LOOPBACK:
            own = address_towards((*(each for each in endpoints if each != address), ANYWHERE))
    except OSError:
        return None
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == own), None)


def _address_of(interface: str) -> str | None:
    """Return the first IPv4 address of an interface. Linux only; elsewhere None."""
    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        return socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
    return None
