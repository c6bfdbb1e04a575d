"""Sleeps of one module that take no time."""

from __future__ import annotations

import time
from types import ModuleType, SimpleNamespace

import pytest


def record_sleeps(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the arguments of later calls of time.sleep by a module, which return at once.

    The module `time` itself is not changed: threads that poll would no longer wait, and their calls be recorded.
    """
    slept: list[float] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=slept.append, monotonic=time.monotonic))
    return slept
