"""A record for tests of sinks."""

from acsgd.io.telemetry.record import StepRecord

RECORD = StepRecord(
    step=1,
    loss=2.5,
    tokens=64,
    tokens_per_s=32.0,
    step_s=2.0,
    lr=0.1,
    grad_norm=1.0,
    pp_forward_bytes=1,
    pp_backward_bytes=2,
    tied_bytes=0,
    dp_bytes=3,
    hidden_share=0.5,
    peak_memory_bytes=4,
)
