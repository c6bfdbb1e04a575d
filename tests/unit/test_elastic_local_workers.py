"""What a daemon makes of what the workers of its host do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from lib.patience import NO_LIMIT_S

from acsgd.elastic.host.local_workers import LocalWorkers
from acsgd.elastic.membership.messages import FromWorker, Hello, Leave, Setup, to_line
from acsgd.elastic.membership.plan import WorkerState

LIMIT_S = NO_LIMIT_S


class Events:
    """Records the events of a host's workers."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[str] = asyncio.Queue()

    def on_ready(self) -> None:
        self.queue.put_nowait("ready")

    def on_stopped(self) -> None:
        self.queue.put_nowait("stopped")

    def on_lost(self, name: str) -> None:
        self.queue.put_nowait(f"lost {name}")

    def on_broken(self, epoch: int, reason: str) -> None:
        self.queue.put_nowait(f"broken {epoch} {reason}")

    def on_leave(self) -> None:
        self.queue.put_nowait("leave")

    def on_done(self) -> None:
        self.queue.put_nowait("done")

    async def next(self) -> str:
        return await asyncio.wait_for(self.queue.get(), LIMIT_S)


async def connect(path: Path, name: str) -> asyncio.StreamWriter:
    """Connect as one of two workers."""
    _, writer = await asyncio.open_unix_connection(path)
    setup = Setup((((0,),),), "run", 1, None, 2.0, 60.0, False, {})
    send(writer, Hello(name, 2, 2**30, setup, WorkerState()))
    return writer


def send(writer: asyncio.StreamWriter, message: FromWorker) -> None:
    writer.write(to_line(message))


@pytest.mark.parametrize("loses_a_worker", [False, True])
def test_a_stop_signal_counts_only_while_all_workers_are_there(loses_a_worker: bool, tmp_path: Path) -> None:
    """If a worker has crashed, torchrun ends its siblings by SIGTERM, to start all of them again."""

    async def run() -> None:
        events = Events()
        workers, path = LocalWorkers(events), tmp_path / "socket"
        await workers.listen(path, "h:1")
        first, second = await connect(path, "0"), await connect(path, "1")
        assert await events.next() == "ready"
        if loses_a_worker:
            second.close()
            assert await events.next() == "lost 1"
        send(first, Leave())
        first.close()  # handled after its message
        assert await events.next() == ("lost 0" if loses_a_worker else "leave")
        second.close()
        workers.close()

    asyncio.run(run())
