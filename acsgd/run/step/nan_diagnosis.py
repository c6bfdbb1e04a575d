"""Find the origin of a NaN or inf in the loss or the gradients, over all ranks."""

from __future__ import annotations

import json

from acsgd.io.data.batches import Batch
from acsgd.pp.nan_probe import NonFiniteTensor, first_non_finite
from acsgd.run.setup.session import Session


def explain_non_finite(
    session: Session, batch: Batch, step: int, loss_scale: float, *, loss: float, grad_norm: float
) -> str:
    """Run a step again with every layer watched; return an error message that names the first non-finite tensor.

    Every rank calls it with its own batch of the step; all return the same message.
    """
    tensor = session.pipeline.find_non_finite(batch, step, loss_scale)
    found = None
    if tensor is not None:
        micro = None if tensor.micro is None else tensor.micro - batch.micro_ids.start
        ids = batch.sample_ids if micro is None else batch.sample_ids[micro]
        found = {"tensor": tensor.to_dict(), "ids": ids.flatten().tolist()}
    timeout_s = session.job.config.run.timeout
    texts = session.groups.all_gather_text("finding a non-finite tensor", json.dumps(found), timeout_s=timeout_s)
    reports = [report for report in map(json.loads, texts) if report]
    ids_of = {NonFiniteTensor.from_dict(report["tensor"]): report["ids"] for report in reports}
    summary = f"step {step + 1}: loss {loss:g}, gradient norm {grad_norm:g}"
    if not ids_of:
        return (
            f"{summary}; the same step run again is finite: suspect the hardware, or a gradient norm beyond fp32; "
            "start the run again"
        )
    first = first_non_finite(list(ids_of))
    return (
        f"{summary}; first in {first}, samples {ids_of[first]}; weights and checkpoints are unchanged; "
        "use a smaller optim.lr, or --optim.on_nan skip to skip such updates"
    )
