"""The event of a new view."""

from __future__ import annotations

from acsgd.elastic.messages import View
from acsgd.io.telemetry.record import Event


def view_event(view: View, before: View | None, step: int, seconds: float, moved_bytes: int) -> Event:
    """Return the event of a new view.

    seconds: since this rank has stopped in the view before; moved_bytes: size of the state that ranks have received.
    """
    plan, known = view.plan, before.hosts if before else ()
    fields = {
        "view": view.epoch,
        "reason": view.reason,
        "hosts": len(view.hosts),
        "replicas": plan.replicas,
        "stages": plan.stages,
        "spares": len(plan.spares),
        "joined": [host.address for host in view.hosts if host not in known],
        "left": [host.address for host in known if host not in view.hosts],
        "moved_layers": sum(len(transfer.layers) for transfer in plan.transfers),
        "moved_bytes": moved_bytes,
        "from": "disk" if plan.from_disk else "snapshot" if plan.from_snapshot else "memory",
        "recovery_s": round(seconds, 3),
    }
    text = f"view {view.epoch}: {plan.replicas} x {plan.stages} on {len(view.hosts)} hosts"
    if plan.spares:
        text += f" and {len(plan.spares)} spares"
    if before is not None:
        text += f", after {seconds:.2f} s: {view.reason}"
    return Event("view", step, text, fields)
