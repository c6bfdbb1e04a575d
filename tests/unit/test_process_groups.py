"""The thread that drops aborted groups."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest

from acsgd.comm import process_groups


def test_the_thread_that_drops_groups_ends_before_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon thread that is in the destructor of a group when the interpreter ends aborts the process."""
    monkeypatch.setattr(process_groups, "_interpreter_ends", threading.Event())
    referenced = object()
    groups = [cast(Any, referenced)] * 2  # never dropped: more than one reference
    args = groups, time.monotonic() + 600.0
    thread = threading.Thread(target=process_groups._drop, args=args, name=process_groups._DROPPING, daemon=True)
    thread.start()
    process_groups._end_drops()
    assert not thread.is_alive()
