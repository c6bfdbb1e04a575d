"""Addresses by which the hosts of a run reach each other, of IPv4 and IPv6.

An address with a port is written host:port, or [host]:port if the host is an IPv6 address, with the name of the
interface if it is of one link: [fe80::1%eth0]:29400. A name may have several addresses.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
from collections.abc import Iterable, Iterator, Sequence

import psutil

DEFAULT_PORT = 29400
LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Hosts of a run on one machine."""
EVERYWHERE = "::"
"""Host of the address of a socket that listens on all interfaces, of IPv4 and IPv6."""
VIRTUAL = "127.88."
"""Start of the virtual addresses of hosts in a mesh."""
ANYWHERE = ("192.0.2.1:9", "[2001:db8::1]:9")
"""Addresses that no host has, to find the default routes."""


def join_address(host: str, port: int | str) -> str:
    """Return a host and a port as one text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_virtual(host: str) -> bool:
    """Return whether a host is given by a virtual address."""
    return host.startswith(VIRTUAL)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of an address. Raises ValueError unless it has both."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address} needs brackets around the IPv6 address: [ADDRESS]:PORT")
    if not (colon and host.strip("[]") == host != "" and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"{address or 'an empty part'} is not host:port")
    return host, int(port)


def check_announced(address: str) -> None:
    """Raise ValueError unless an address of --announce has a host and a port."""
    try:
        split_address(address)
    except ValueError as error:
        raise ValueError(f"--announce {address}: {error}; give the address at which others reach this host") from None


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Return host:port of each endpoint of --rdzv-endpoint. Raises ValueError that says what to type."""
    endpoints = []
    for each in text.split(","):
        part = each.strip()
        if _is_address(part) or ":" not in part.rpartition("]")[2]:
            part = join_address(re.sub(r"^\[(.*)\]$", r"\1", part), DEFAULT_PORT)
        try:
            host, port = split_address(part)
        except ValueError:
            raise ValueError(
                f"--rdzv-endpoint={text}: {each.strip() or 'an empty part'} is not host:port; give one or more hosts, "
                f"such as hostA:{DEFAULT_PORT},hostB:{DEFAULT_PORT}, or [fd00::1]:{DEFAULT_PORT}"
            ) from None
        endpoints.append(join_address(str(ipaddress.ip_address(host)) if _is_address(host) else host, port))
    return tuple(dict.fromkeys(endpoints))


def find_address(endpoints: tuple[str, ...], local_address: str | None) -> str:
    """Return host:port at which other hosts reach this one.

    It is the first endpoint that is this host's and whose port is free; else a free port of `local_address` (torchrun's
    --local-addr), or of the address from which this host reaches the first endpoint. Raises OSError if it reaches none.
    """
    for endpoint in endpoints:
        if _can_bind(*split_address(endpoint)):
            return endpoint
    host = local_address or address_towards(endpoints)
    with listen(host) as server:
        return join_address(host, server.getsockname()[1])


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at the first address of a host that is this host's; "::" = everywhere.

    Raises OSError.
    """
    if host == EVERYWHERE:
        return listen_everywhere(port)
    error = OSError(errno.EADDRNOTAVAIL, "no address of this host", host)
    for family, address in resolve(host, port):
        try:
            return socket.create_server(address, family=family)
        except OSError as failure:
            error = failure
    raise error


def listen_everywhere(port: int = 0) -> socket.socket:
    """Return a socket that listens at a port on all interfaces. Raises OSError."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """Return the families and the socket addresses of a host. Raises OSError if it has none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:  # of a part that is empty or longer than 63 letters
        raise OSError(errno.EINVAL, "no name of a host", host) from None
    return [(family, address) for family, _, _, _, address in found]  # type: ignore[misc]  # IPv6 has four numbers


def is_public(endpoints: Iterable[str]) -> bool:
    """Return whether one of the endpoints has an address that is not private. Names that have none are not."""
    for endpoint in endpoints:
        with contextlib.suppress(OSError):
            for _, address in resolve(*split_address(endpoint)):
                if ipaddress.ip_address(address[0].partition("%")[0]).is_global:
                    return True
    return False


def _can_bind(host: str, port: int) -> bool:
    """Return whether an address is of this host, and nothing listens there."""
    try:
        with listen(host, port):
            return True
    except OSError:
        return False


def address_towards(endpoints: Iterable[str]) -> str:
    """Return the address of this host from which it reaches the first of the endpoints that it can reach.

    Raises OSError if it reaches none.
    """
    errors = []
    for endpoint in endpoints:
        try:
            return next(_addresses_towards(endpoint))
        except OSError as error:
            errors.append(f"{endpoint}: {error}")
    raise OSError(f"no endpoint of --rdzv-endpoint can be reached ({'; '.join(errors)})")


def _addresses_towards(endpoint: str) -> Iterator[str]:
    """Yield the address of this host from which it reaches each address of an endpoint. Raises OSError if none."""
    error = None
    has_any = False
    for family, address in resolve(*split_address(endpoint)):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)  # sends nothing
            except OSError as failure:
                error = failure
                continue
            has_any = True
            yield _text_of(probe.getsockname())
    if error is not None and not has_any:
        raise error


def _text_of(address: Sequence[object]) -> str:
    """Return the host of a socket address, with the interface of one of a link."""
    return socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]  # type: ignore[arg-type]


def find_interface(host: str, endpoints: Iterable[str]) -> str | None:
    """Return the network interface of this host by which others reach it; None if it cannot be found.

    host: name or address of this host. Its name may resolve to a loopback address, as on Debian, to one that another
    host or a router has, as in clouds, or not at all: then it is the interface towards the first endpoint on another
    host, or that of the default route.
    """
    own = _local_address(host)
    if own is None or (_is_loopback(own) and host not in LOOPBACK):
        own = next((each for each in _reachable_from((*endpoints, *ANYWHERE)) if not _is_loopback(each)), None)
    return _interfaces().get(own or "")


def own_address() -> str | None:
    """Return the address of this host from which it reaches other networks; None if it has none but loopback."""
    return next((each for each in _reachable_from(ANYWHERE) if not _is_loopback(each)), None)


def default_is_loopback() -> bool:
    """Return whether gloo would use a loopback address: that to which this host's name resolves, or for want of one."""
    own = _local_address(socket.gethostname())
    return own is None or _is_loopback(own)


def _reachable_from(endpoints: Iterable[str]) -> Iterator[str]:
    for endpoint in endpoints:
        try:
            yield from _addresses_towards(endpoint)
        except OSError:
            continue


def _local_address(host: str) -> str | None:
    """Return the first address of a host that is this host's; None if it has none."""
    try:
        found = [_text_of(address) for _, address in resolve(host, 0)]
    except OSError:
        return None
    return next((each for each in found if _is_loopback(each) or each in _interfaces()), None)


def _interfaces() -> dict[str, str]:
    """Return the names of this host's network interfaces by their addresses."""
    found = psutil.net_if_addrs().items()
    return {each.address: name for name, addresses in found for each in addresses}


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
