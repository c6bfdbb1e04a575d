"""Measurement of an idle link: both ends send data at the same time, and time what they receive."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from acsgd.pp.wire.channel import HANDSHAKE_TAG, Channel

PROBE_S = 0.02
"""Time for which a measurement sends data that is timed."""
PROBE_BYTES = (2**12, 2**18)
"""Least and largest size of these data; the largest is that of the first measurement, a quarter of it."""


def probe_size(s_per_byte: float | None) -> int:
    """Return the size of the data of a measurement. s_per_byte: of the direction as known so far, None for unknown."""
    least, most = PROBE_BYTES
    return most // 4 if s_per_byte is None else int(min(most, max(least, PROBE_S / s_per_byte)))


class Probed(NamedTuple):
    """What one end has measured of the direction towards it."""

    s_per_byte: float
    delay_s: float
    """Time of a small message, as far as this end has waited for it; the mean of both ends is the delay of the link."""


def probe(channel: Channel, sent_bytes: int, received_bytes: int) -> Probed:
    """Measure a link, together with its other end, whose sizes are the same, exchanged.

    Each end sends two small messages and then the data twice: the first time fills queues and token buckets, and only
    the second one is timed. channel: any of the link, with no message in flight. Raises RunError if the peer fails.
    """
    started, lengths = time.perf_counter(), (8, 8, received_bytes, received_bytes)
    with channel.report_failure("measuring the link to", started):
        small, data = torch.zeros(8, dtype=torch.uint8), torch.zeros(sent_bytes, dtype=torch.uint8)
        buffers = [torch.empty(length, dtype=torch.uint8) for length in lengths]
        receives = [channel.receive(buffer, HANDSHAKE_TAG) for buffer in buffers]
        ends, sends = list[float](), [channel.send(small, HANDSHAKE_TAG)]
        for number, receive in enumerate(receives):
            channel.waits.wait(receive)
            ends.append(time.perf_counter())
            following = {0: [small], 1: [data, data]}.get(number, [])
            sends += [channel.send(each, HANDSHAKE_TAG) for each in following]
        for send in sends:
            channel.waits.wait(send)
    return Probed((ends[3] - ends[2]) / received_bytes, ends[1] - ends[0])
