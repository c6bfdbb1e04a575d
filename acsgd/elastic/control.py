"""A worker's connection to the daemon of its host."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from queue import SimpleQueue

from acsgd.comm.waits import InterruptibleWaits
from acsgd.elastic.membership.messages import End, FromWorker, Run, Stop, Tick, ToWorker, from_line, to_line
from acsgd.errors import RunError

TICK_S = 0.25
COMPLETE_S = 10.0
"""Time in which a rank completes what follows the last step of a run that is over, seconds."""
ENDED = "torchrun of this host has ended"


class Control:
    """Receives the daemon's messages in a thread, which can stop training in the main thread.

    Raises RunError if the daemon cannot be reached.
    """

    def __init__(self, socket_path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(str(socket_path))
        except OSError as error:  # which does not name the socket
            raise RunError(ENDED) from error
        self._messages: SimpleQueue[Run | Stop | End] = SimpleQueue()
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._waits: InterruptibleWaits | None = None
        self.pause_requested = False
        """Whether training was requested to stop at the end of a step."""
        self._is_stop_pending = False
        threading.Thread(target=self._listen, name="control", daemon=True).start()
        threading.Thread(target=self._tick, name="ticks", daemon=True).start()

    def send(self, message: FromWorker) -> None:
        """Send a message to the daemon; if it has ended, `next_message` returns End."""
        with contextlib.suppress(OSError), self._sending:
            self._socket.sendall(to_line(message))

    def next_message(self) -> Run | Stop | End:
        """Wait for a message."""
        message = self._messages.get()
        with self._lock:
            if isinstance(message, Stop):
                self._is_stop_pending = False
        return message

    def attach(self, waits: InterruptibleWaits) -> None:
        """From now on, let requests to stop end these waits, or set `pause_requested`."""
        with self._lock:
            self._waits, self.pause_requested = waits, False
            if self._is_stop_pending:
                waits.interrupt("another view follows")

    def detach(self) -> None:
        """Undo `attach`."""
        with self._lock:
            self._waits = None

    def close(self) -> None:
        """End the connection and the threads."""
        self._closed.set()
        self._socket.close()

    def _tick(self) -> None:
        """Report whether the training thread moves, also while it is inside of torch."""
        while not self._closed.wait(TICK_S):
            with self._lock:
                waits = self._waits
            if waits is not None:
                is_waiting, since = waits.activity
                self.send(Tick(is_waiting, max(0.0, time.monotonic() - since)))

    def _listen(self) -> None:
        error: str | None = ENDED
        with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                self._handle(from_line(line, ToWorker))
        self._handle(End(error))

    def _handle(self, message: Run | Stop | End) -> None:
        with self._lock:
            if isinstance(message, Stop) and message.at_step_end and self._waits is not None:
                self.pause_requested = True
            elif not isinstance(message, Run):
                self._is_stop_pending = True
                if self._waits is not None:
                    self._interrupt(self._waits, message)
            self._messages.put(message)

    def _interrupt(self, waits: InterruptibleWaits, message: Stop | End) -> None:
        if isinstance(message, End) and message.is_over:
            # a rank that has completed its end has sent all that this one waits for; one that has failed there sends
            # nothing any more
            later = threading.Timer(COMPLETE_S, waits.interrupt, ("the run has ended",))
            later.daemon = True
            later.start()
        else:
            waits.interrupt("another view follows" if isinstance(message, Stop) else "the run has ended")
