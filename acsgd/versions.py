"""What must be installed alike on all hosts of a run. Imports no torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path


def installed_versions() -> dict[str, str]:
    """Return what must be equal on all hosts of a run: versions of packages, and a digest of acsgd's code."""
    versions = {name: _version(name) for name in ("torch", "transformers")}
    return {**versions, "code": digest_of_code()[:12]}


def digest_of_code() -> str:
    """Return a digest of the source files of this package."""
    digest, package = hashlib.sha256(), Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
