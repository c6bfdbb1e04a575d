"""The faults that an elastic run must survive, each as a scenario of `tests.lib.scenes`."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.common import netlab
from tests.lib.injection import Death, FullDisk, NoRegister, Pace, SlowDisk
from tests.lib.scenes import EXACT, HANG_S, MODES, SHAPES, SILENCE_S, Row, Scene, Shape, calm_losses, opened

MINUTE_S, YEAR_S = 60.0, 365 * 86400.0
TRIO, PAIR = Shape(1, 3, 1), Shape(1, 2, 1)


@dataclass(frozen=True)
class Network:
    """A network of three hosts, or of as many as the shape has."""

    delay_s: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """Lets a fault occur in a scene with hosts that are not started yet, and waits until the run has recovered.

    shape, network, flags: if it needs certain ones.
    """

    run: Callable[[Scene], None]
    shape: Shape | None = None
    network: Network | None = None
    flags: tuple[str, ...] = ()


def _dies(scene: Scene, point: str, *, call: int = 5, host: str = "c") -> None:
    """A host dies in the middle of a step."""
    scene.start_all({host: {"worker": [Death(point, call)]}})
    scene.wait_for_fault()
    scene.recover()


def _agent_dies(scene: Scene) -> None:
    scene.start_all()
    scene.send(signal.SIGKILL, scene.running["b"].pids("agent"))
    scene.recover()
    scene.wait_until(lambda: not scene.running["b"].pids(), "end of the workers without torchrun")
    scene.running.pop("b").kill()


def _worker_dies(scene: Scene) -> None:
    scene.start_all()
    scene.send(signal.SIGKILL, scene.running["b"].workers[:1])
    scene.recover()
    scene.wait_for_replicas(scene.shape.replicas)


def _host_dies(scene: Scene, *hosts: str) -> None:
    scene.start_all()
    scene.wait_for_steps(5)
    scene.kill(*hosts)
    scene.recover()


def _coordinator_dies(scene: Scene, point: str) -> None:
    """The host that forms the next view dies meanwhile."""
    death = Death(point, view=1 if "proposed" in point else 2, once="coordinator")
    scene.start_all({name: {"agent": death} for name in scene.names})
    scene.kill(scene.names[-1])
    scene.wait_for_fault()
    scene.recover()


def _dies_in_change(scene: Scene, point: str) -> None:
    """A host dies while the groups of the view after another death are formed."""
    deaths = {"worker": [Death(point, view=2, once="second")]}
    scene.start_all(dict.fromkeys(scene.names, deaths))
    scene.kill(scene.names[-1])
    scene.wait_for_fault()
    scene.recover()


def _holders_die(scene: Scene) -> None:
    """All holders of a stage die; the others return to the newest checkpoint, once there are enough hosts again."""
    scene.start_all()
    scene.wait_for_steps(55)
    step = scene.watch.last_step
    holders = scene.names[1:] if scene.shape.workers == 1 else scene.names
    scene.kill(*holders)
    scene.fault_at = time.monotonic()
    for name in holders:
        scene.start(f"{name}2")
    scene.recover()
    scene.steps_lost = max(0, step - next(e["after_step"] for e in scene.hosts.events()[::-1] if e["from"] != "memory"))


def _copy_dies(scene: Scene, point: str) -> None:
    """A host joins, and the one that sends the state, or itself, dies meanwhile."""
    death = Death(point, view=2, once="copy")
    scene.start_all({name: {"worker": [death]} for name in scene.names})
    scene.kill(scene.names[-1])
    scene.recover()
    scene.start("e", worker=[death]) if scene.network is None else None
    scene.wait_for_fault()
    scene.recover()


def _stopped_worker(scene: Scene) -> None:
    scene.start_all()
    scene.send(signal.SIGSTOP, scene.running["b"].workers[:1])
    scene.recover()
    scene.wait_for_replicas(scene.shape.replicas)


def _stopped_host(scene: Scene) -> None:
    """A host is stopped; when it continues it does nothing at first, then it joins again."""
    scene.start_all()
    pids = scene.running["c"].pids()
    scene.send(signal.SIGSTOP, pids)
    scene.recover()
    scene.wait_for_steps(5)
    fault_at = scene.fault_at
    scene.send(signal.SIGCONT, pids)
    scene.fault_at = fault_at
    scene.wait_for_replicas(scene.shape.replicas)


def _sleeping_thread(scene: Scene) -> None:
    scene.start_all({"b": {"worker": [Pace(sleep_at=10)]}})
    scene.wait_for_fault()
    scene.recover()
    scene.wait_for_replicas(scene.shape.replicas)


def _slow_rank(scene: Scene) -> None:
    """A rank is 10 times slower; it stays."""
    scene.start_all({"b": {"worker": [Pace(factor=10.0)]}})
    scene.stay_calm(2 * HANG_S)


def _cut(scene: Scene, host: int, *, survivors: int = 2) -> None:
    """A host is cut off; the others continue; healed, it joins again."""
    assert scene.network is not None
    scene.start_all()
    scene.mark_fault()
    scene.network.cut(host)
    scene.recover()
    assert scene.watch.replicas == survivors, scene.hosts.events()
    scene.wait_for_steps(5)
    scene.network.heal(host)
    scene.wait_for_replicas(len(scene.names))


def _cut_majority(scene: Scene) -> None:
    """The host with rank 0 is cut off from the two others, which continue."""
    _cut(scene, 0)


def _two_hosts(scene: Scene, *, junior: bool) -> None:
    _cut(scene, 1 if junior else 0, survivors=1)


def _no_register(scene: Scene) -> None:
    """Two hosts are cut apart while no view can be recorded: none trains, until one can be."""
    assert scene.network is not None
    blocker = NoRegister("no-register")
    scene.start_all({name: {"agent": blocker} for name in scene.names})
    (scene.directory / "no-register").touch()
    scene.mark_fault()
    scene.network.cut(1)
    time.sleep(3 * SILENCE_S)
    step = scene.watch.last_step
    time.sleep(1.0)
    assert scene.watch.last_step == step, "a host trains in a view that is not recorded"
    scene.mark_fault()
    (scene.directory / "no-register").unlink()
    scene.recover()
    scene.network.heal(1)
    scene.wait_for_replicas(2)


def _blocked_link(scene: Scene) -> None:
    """The link between two of three hosts drops everything; one of the two leaves, and joins again."""
    assert scene.network is not None
    scene.start_all()
    scene.mark_fault()
    scene.network.block(1, 2)
    scene.recover()
    scene.wait_for_steps(5)
    scene.network.unblock(1, 2)
    scene.wait_for_replicas(3)


def _flapping_link(scene: Scene) -> None:
    """A link is broken every other second; training continues."""
    assert scene.network is not None
    scene.start_all()
    step = scene.watch.last_step
    scene.mark_fault()
    for _ in range(5):
        scene.network.block(1, 2)
        time.sleep(1.0)
        scene.network.unblock(1, 2)
        time.sleep(1.0)
    assert scene.watch.last_step > step, scene.output()
    scene.wait_for_replicas(3)


def _dies_in_message(scene: Scene, mbit: float) -> None:
    """A host dies while its messages are on their way, over slow links."""
    assert scene.network is not None
    scene.start_all()
    scene.network.limit(mbit)
    scene.wait_for_steps(2)
    time.sleep(0.3)
    scene.kill("c")
    scene.recover()


def _join_while_another_dies(scene: Scene) -> None:
    scene.start_all()
    scene.kill("c")
    scene.recover()
    scene.start("e")
    views = len(scene.hosts.events())
    scene.wait_until(lambda: len(scene.hosts.events()) > views, "view with the host that joins")
    scene.kill("b")
    scene.recover()


def _spare(scene: Scene) -> None:
    """A host joins beyond elastic.max_replicas; its workers are used when another host dies."""
    scene.start_all()
    views = len(scene.hosts.events())
    scene.start("e")
    scene.wait_until(lambda: len(scene.hosts.events()) > views, "view with spares")
    assert scene.hosts.events()[-1]["spares"] >= 1, scene.hosts.events()
    scene.wait_for_steps(2)
    scene.kill("b")
    scene.recover()
    scene.wait_for_replicas(scene.shape.replicas)


def _joiner_dies(scene: Scene, point: str, *, call: int = 1) -> None:
    """A host that joins dies on its way; the others continue."""
    scene.start_all()
    scene.kill("c")
    scene.recover()
    scene.start("e", worker=[Death(point, call)])
    scene.wait_for_fault()
    scene.wait_for_steps(5)


def _dies_in_save(scene: Scene) -> None:
    """A host dies while a checkpoint is written."""
    scene.start_all({name: {"worker": [SlowDisk(0.2)]} for name in scene.names})
    saves = scene.hosts.run_dir / "checkpoints"
    scene.wait_until(lambda: list(saves.glob("*.partial")) or list(saves.glob(".*")), "save")
    scene.kill("a")
    scene.recover()


def _joiner_cannot_save(scene: Scene) -> None:
    """A host joins on which no layer can be written: it ends at the next save, which the others repeat."""
    scene.start_all()
    scene.kill("c")
    scene.recover()
    joiner = scene.start("e", worker=[FullDisk()])
    scene.wait_until(lambda: joiner.exit_code is not None, "end of the host that cannot save")
    error, *others = scene.running.pop("e").errors
    assert not others, [error, *others]
    assert " could not be saved: rank " in error, error
    assert error.endswith("fix the cause and start this host again"), error
    step, checkpoints = int(error.split()[2]), scene.hosts.run_dir / "checkpoints"  # "error: step 50 could not ..."
    saved = f"step-{step:08d}"
    scene.wait_until(lambda: any(path.name >= saved for path in checkpoints.glob("step-????????")), "the next save")


def _sigterm_in_change(scene: Scene) -> None:
    """Another host receives SIGTERM while the view after a death is formed."""
    scene.start_all()
    scene.kill("c")
    time.sleep(0.1)
    scene.running["b"].signal(signal.SIGTERM)
    scene.recover()
    host = scene.running.pop("b")
    scene.wait_until(lambda: not host.pids(), "end of the host that leaves")
    assert not host.errors, host.errors


def _strangers(scene: Scene) -> None:
    """A host with another secret, and a connection that sends garbage: the run continues."""
    scene.start_all()
    host, _, port = scene.hosts.endpoints[0].rpartition(":")
    for garbage in (b"\0" * 100_000, b"GET / HTTP/1.1\r\n\r\n", b"{}\n" * 1000):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(garbage)
    stranger = scene.start("e", secret="another")
    scene.wait_until(lambda: stranger.exit_code is not None, "end of the host with another secret")
    (error,) = stranger.errors
    assert "ACSGD_SECRET" in error, error
    scene.running.pop("e")
    scene.stay_calm(1.0)


def _clocks(scene: Scene) -> None:
    """Clocks are off by a minute and by a year; then a host dies."""
    clocks = dict(zip(scene.names, (0.0, -MINUTE_S, YEAR_S, MINUTE_S), strict=False))
    scene.start_all({name: {"clock_s": seconds} for name, seconds in clocks.items()})
    scene.kill("a")
    scene.recover()


def _bad_network(scene: Scene) -> None:
    """Links lose 1 % of packets; a host dies."""
    _host_dies(scene, "c")


JOINER = {
    "with inputs open": "inputs are open",
    "asking to join": "asks to join",
    "with a rank": "has a rank",
    "in the new groups": "groups are formed",
    "receiving its state": "receives state",
    "in its first step": "gradients ready",
}
SCENARIOS: dict[str, Scenario] = {
    "host dies, gradients ready": Scenario(partial(_dies, point="gradients ready")),
    "host dies, row sent to one only": Scenario(partial(_dies, point="row sent to one")),
    "host dies, all rows sent": Scenario(partial(_dies, point="all rows sent")),
    "host dies in the update": Scenario(partial(_dies, point="in the update")),
    "torchrun dies alone": Scenario(_agent_dies),
    "worker dies alone": Scenario(_worker_dies),
    "host 0 dies": Scenario(lambda scene: _host_dies(scene, "a")),
    "coordinator dies, proposal sent": Scenario(partial(_coordinator_dies, point="has proposed a view")),
    "coordinator dies, view recorded": Scenario(partial(_coordinator_dies, point="has recorded a view")),
    "coordinator dies, view known to one": Scenario(partial(_coordinator_dies, point="has announced a view to one")),
    "new rank 0 dies, store announced": Scenario(partial(_dies_in_change, point="new rank 0 with its store")),
    "two hosts die at once": Scenario(lambda scene: _host_dies(scene, "a", "c")),
    "host dies while groups are formed": Scenario(partial(_dies_in_change, point="groups are formed")),
    "all holders of a stage die": Scenario(_holders_die),
    "source of a copy dies": Scenario(partial(_copy_dies, point="sends state")),
    "receiver of a copy dies": Scenario(partial(_copy_dies, point="receives state")),
    "worker stopped": Scenario(_stopped_worker),
    "host stopped and continued": Scenario(_stopped_host),
    "main thread sleeps": Scenario(_sleeping_thread),
    "rank 10 times slower": Scenario(_slow_rank),
    "minority cut off": Scenario(lambda scene: _cut(scene, 2), TRIO, Network()),
    "majority cut off": Scenario(_cut_majority, TRIO, Network()),
    "two hosts, junior cut off": Scenario(partial(_two_hosts, junior=True), PAIR, Network()),
    "two hosts, senior cut off": Scenario(partial(_two_hosts, junior=False), PAIR, Network()),
    "two hosts without a register": Scenario(_no_register, PAIR, Network()),
    "link blocked": Scenario(_blocked_link, TRIO, Network()),
    "link flaps every second": Scenario(_flapping_link, TRIO, Network()),
    "host dies mid-message, 10 Mbit/s": Scenario(partial(_dies_in_message, mbit=10.0), TRIO, Network()),
    "host dies mid-message, 50 Mbit/s": Scenario(partial(_dies_in_message, mbit=50.0), TRIO, Network()),
    "host joins while another dies": Scenario(_join_while_another_dies),
    "spare is used": Scenario(_spare, flags=("--elastic.max_replicas", "{replicas}")),
    **{f"joiner dies {name}": Scenario(partial(_joiner_dies, point=point)) for name, point in JOINER.items()},
    "host dies during a save": Scenario(_dies_in_save),
    "joiner cannot save": Scenario(_joiner_cannot_save),
    "host dies during evaluation": Scenario(partial(_dies, point="evaluates", call=2)),
    "SIGTERM during a change": Scenario(_sigterm_in_change),
    "wrong secret, garbage on the port": Scenario(_strangers),
    "clocks off by a minute and a year": Scenario(_clocks),
    "host dies, 1 % loss and 40 ms": Scenario(_bad_network, TRIO, Network(delay_s=0.02, loss=0.01)),
}


def draw_run(name: str, turn: int) -> tuple[Shape, str]:
    """Return shape and mode of the run of a scenario. Over five turns, each scenario has each mode."""
    scenario, number, modes = SCENARIOS[name], list(SCENARIOS).index(name), list(MODES)
    mode = modes[(number + turn) % len(modes)]
    shape = scenario.shape or list(SHAPES.values())[(number + number // 15 + turn) % len(SHAPES)]
    if mode == "delta" and shape.stages == 1:  # there are no links
        return (shape, EXACT[0]) if scenario.shape else (SHAPES["2x2"], mode)
    return shape, mode


def inject(name: str, directory: Path, inputs: Path, shape: Shape, mode: str) -> Row:
    """Run a scenario and check the laws; return its row. Raises AssertionError if a law is broken.

    directory: empty; inputs: as `scenes.prepare` has written.
    """
    scenario = SCENARIOS[name]
    calm = calm_losses(inputs, mode, shape.replicas)
    with ExitStack() as stack:
        network = None
        if scenario.network is not None:
            delay_s, loss = scenario.network.delay_s, scenario.network.loss
            network = stack.enter_context(netlab.lab(hosts=shape.hosts, delay_s=delay_s, loss=loss))
        flags = [flag.format(replicas=shape.replicas) for flag in scenario.flags]
        scene = stack.enter_context(opened(directory, inputs, shape, mode, flags=flags, network=network))
        scenario.run(scene)
        scene.end()
        difference = scene.check(calm)
    run = f"{shape.stages} x {shape.replicas}, {mode}"
    return Row(name, run, scene.view_s, scene.step_s, scene.steps_lost, difference, "ok")
