"""The events of a new view."""

from __future__ import annotations

from acsgd.elastic.messages import View
from acsgd.io.telemetry.record import Event


def view_events(view: View, before: View | None, step: int, seconds: float, moved_bytes: int) -> list[Event]:
    """Return the events of a new view: one for each host that hung, left or joined since, then that of the view.

    seconds: since this rank has stopped in the view before; moved_bytes: size of the state that ranks have received.
    """
    known = before.hosts if before else view.hosts
    changes = [("hung", address) for address in view.hung]
    changes += [("left", host.address) for host in known if host not in view.hosts]
    changes += [("joined", host.address) for host in view.hosts if host not in known]
    events = [Event(name, step, f"{address} {name}", {"host": address}) for name, address in changes]
    return [*events, _view_event(view, before, step, seconds, moved_bytes)]


def _view_event(view: View, before: View | None, step: int, seconds: float, moved_bytes: int) -> Event:
    plan = view.plan
    fields = {
        "view": view.epoch,
        "reason": view.reason,
        "hosts": len(view.hosts),
        "replicas": plan.replicas,
        "stages": plan.stages,
        "spares": len(plan.spares),
        "moved_layers": sum(len(transfer.layers) for transfer in plan.transfers),
        "moved_bytes": moved_bytes,
        "from": plan.origin,
        "recovery_s": round(seconds, 3),
    }
    text = f"view {view.epoch}: {plan.replicas} x {plan.stages} on {len(view.hosts)} hosts"
    if plan.spares:
        text += f" and {len(plan.spares)} spares"
    if before is not None:
        text += f", after {seconds:.2f} s: {view.reason}"
    return Event("view", step, text, fields)
