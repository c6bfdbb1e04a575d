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

    Each end sends two small messages and then the data twice, in as many parts as the link has connections: the first
    time fills queues and token buckets, and only the second one is timed. channel: any of the link, with no message in
    flight. Raises RunError if the peer fails.
    """
    started, count = time.perf_counter(), channel.group.connections
    with channel.report_failure("measuring the link to", started):
        small, data = torch.zeros(8, dtype=torch.uint8), torch.zeros(sent_bytes, dtype=torch.uint8)
        smalls, received = [torch.empty_like(small) for _ in range(2)], torch.empty(received_bytes, dtype=torch.uint8)
        messages = [[each] for each in smalls] + [[*received.clone().tensor_split(count)] for _ in range(2)]
        receives = [[channel.receive(part, HANDSHAKE_TAG) for part in parts] for parts in messages]
        ends, sends = list[float](), [channel.send(small, HANDSHAKE_TAG)]
        for number, parts in enumerate(receives):
            for receive in parts:
                channel.waits.wait(receive)
            ends.append(time.perf_counter())
            following = {0: [small], 1: [*data.tensor_split(count)] * 2}.get(number, [])
            sends += [channel.send(each, HANDSHAKE_TAG) for each in following]
        for send in sends:
            channel.waits.wait(send)
    return Probed((ends[3] - ends[2]) / received_bytes, ends[1] - ends[0])
