"""Encrypted connections between hosts that have one open port each, or none. Beneath everything else of an elastic run.

Each host has a virtual address 127.88.x.y, which is derived from its key. The processes of the run on that host
listen at that address alone. On each other host, the forwarder listens at 127.88.x.y with the same ports, and carries
what connects there through TLS 1.3 to the forwarder of the host that has the address, which connects to the port. So an
address and a port are the same on all hosts, and programs such as gloo need no change.

- `identity`: `HostIdentity`, the key, certificate and virtual address of this host; `VerifiedHost`, another one
  whose certificate was verified.
- `streams`: protocols of asyncio: `FirstLine` reads what a new connection is for, `Lines` exchanges messages,
  `CarriedEnd` is one of the two ends of a carried connection.
- `transport`: `TlsTransport` encrypts a connection of asyncio.
- `tls`: `Entrance` accepts connections of members, and bounds what others can cost; `dial` opens one to a member.
- `ports`: which ports listen at an address, and which user a local connection belongs to, from /proc/net/tcp.
- `messages`: what two forwarders send to each other.
- `peers`: `MeshPeer`, what this host knows of another one.
- `mirrors`: `Mirrors`, the ports of other hosts that are open here.
- `carrier`: `Carrier` carries what connects to them to the other host, where it is delivered.
- `forwarder`: `Forwarder` is connected to each other host, and keeps track of its ports.
- `rotation`: `SecretRotation` replaces the secret of the run while it runs.
- `mesh`: `Mesh` runs the forwarder of this host in a thread; workers call `publish` when they have opened a port.
"""
