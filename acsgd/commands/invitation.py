"""Invitations into elastic runs, and the files of this user that belong to them."""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from acsgd.comm.addresses import is_public

VERSION = importlib.metadata.version("acsgd")
PREFIX = "acsgd1-"
"""Beginning of an invitation, with the version of its format."""
PRIVATE = Path("~/.acsgd")
"""Directory with the secrets and invitations of this user's runs."""
MAX_BYTES = 2**20
"""Maximum size of what an invitation holds."""
SHOWN = 20
"""Number of characters of a wrong invitation that are shown; it may hold a secret."""


@dataclass(frozen=True)
class Invitation:
    """What a host needs to join a run. Whoever has it can join: it holds the secret of the run."""

    run: str
    """Id of the run, --rdzv-id."""
    secret: str
    endpoints: tuple[str, ...]
    """Addresses host:port of hosts that a newcomer contacts first."""
    hosts: str
    """Lowest and highest number of hosts, --nnodes."""
    mesh: str
    """"true", "false", or "auto": as the addresses want; see --rdzv-conf."""
    options: str
    """Options of the run, TOML."""
    version: str
    """Version of acsgd that made it."""

    @property
    def has_mesh(self) -> bool:
        """Whether the run has a mesh."""
        return self.mesh == "true" or (self.mesh == "auto" and is_public(self.endpoints))

    @property
    def is_known(self) -> bool:
        """Whether this host has taken it before. The secret may have been replaced since."""
        path = private_file(f"{self.run}.invitation")
        return path.exists() and path.read_text() == self.encode() and secret_file(self.run).exists()

    def current_secret(self) -> str:
        """Return the secret of the run, as far as this host knows."""
        return secret_file(self.run).read_text().strip() if self.is_known else self.secret

    @classmethod
    def open(cls, text: str) -> Self:
        """Return the invitation that is given as text, or in a file.

        Raises ValueError if it is damaged, or of another version.
        """
        invitation = cls._of_file(Path(text)) if os.path.isfile(text) else cls.decode(text)
        if invitation.version != VERSION:
            raise ValueError(f"the run has acsgd {invitation.version}, this host {VERSION}; install the same version")
        return invitation

    @classmethod
    def _of_file(cls, path: Path) -> Self:
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            text = ""
        if not text.strip():
            raise ValueError(f"{path} holds no invitation; give what acsgd host printed after acsgd join")
        return cls.decode(text)

    def encode(self) -> str:
        """Return the invitation as text of one line."""
        content = zlib.compress(json.dumps(dataclasses.asdict(self)).encode(), 9)
        return PREFIX + base64.urlsafe_b64encode(_checksum(content) + content).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> Self:
        """Return the invitation of a text. Raises ValueError if it is damaged or of another format."""
        text = "".join(text.split())  # mail and chat programs break lines
        if not text.startswith(PREFIX):
            if text.startswith("acsgd"):
                raise ValueError(
                    f"the invitation {text[:SHOWN]}... is of another version of acsgd than {VERSION}; "
                    "install the same version on all hosts"
                )
            shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
            raise ValueError(
                f'"{shown}" is neither an invitation nor a file with one; copy all that acsgd host printed after acsgd '
                "join"
            )
        try:
            data = base64.urlsafe_b64decode(text[len(PREFIX) :] + "=" * (-(len(text) - len(PREFIX)) % 4))
            check, content = data[:4], data[4:]
            if _checksum(content) != check:
                raise ValueError
            fields: dict[str, Any] = json.loads(zlib.decompressobj().decompress(content, MAX_BYTES))
            if not re.fullmatch(r"\w[\w.-]*", fields["run"]):  # names files
                raise ValueError
            return cls(**{**fields, "endpoints": tuple(fields["endpoints"])})
        except (ValueError, KeyError, TypeError, zlib.error, binascii.Error):
            raise ValueError("the invitation is damaged or not whole; copy all that acsgd host printed") from None


def known_invitations() -> list[Invitation]:
    """Return the invitations of this version that this user has printed or taken on this host, the newest first."""
    paths = sorted(PRIVATE.expanduser().glob("*.invitation"), key=lambda path: path.stat().st_mtime, reverse=True)
    found = []
    for path in paths:
        with contextlib.suppress(ValueError, OSError):
            found.append(Invitation.open(str(path)))
    return found


def secret_file(run: str) -> Path:
    return private_file(f"{run}.secret")


def private_file(name: str) -> Path:
    """Return the path of a file of this user, in a directory that no other user can read."""
    directory = PRIVATE.expanduser()
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory / name


def write_privately(path: Path, text: str) -> None:
    """Write a file that only this user can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(4, "big")
