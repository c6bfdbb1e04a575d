"""Rates by which the time of a step is predicted: those of a device, measured or of a known GPU, and those of links."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from acsgd.codecs.identity import DTYPES
from acsgd.config.spec import suggest
from acsgd.errors import CorruptFileError
from acsgd.io.files.atomic import replace_text
from acsgd.io.files.fields import Positive, from_json
from acsgd.streams import PEAK_TB_PER_S, peak_of_gpu

RATES = "rates.json"
"""Name of the file of measured rates in a run directory."""
VERSION = 5
"""Version of what is measured and how, in the file."""
SHARE_OF_PEAK, SHARE_OF_BANDWIDTH = 0.5, 0.8
"""Fraction of a GPU's peak arithmetic and bandwidth that training reaches; a rule of thumb, not measured."""
ADAMW_BYTES = 28
"""Bytes that AdamW reads and writes per parameter: weight, two moments, and the gradient, which it only reads."""
SPLIT = 1.05
"""Time of a backward in two parts relative to that of a whole one, where it is not measured: more in small blocks."""
HOST_BYTES_PER_S = 20e9
"""Of host memory, whose link to a GPU is no slower (PCIe 4.0 x16), where it is not measured; the same."""
DISK_BYTES_PER_S = 2e9
"""Of an NVMe disk; the same."""
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class LinkRate:
    """A link between two ranks, one direction."""

    bytes_per_s: Positive
    delay_s: float = 0.0
    """One way."""

    def slower_of(self, other: LinkRate) -> LinkRate:
        """Return a link with the lower rate and the longer delay of both."""
        return LinkRate(min(self.bytes_per_s, other.bytes_per_s), max(self.delay_s, other.delay_s))


@dataclass(frozen=True)
class LayerTimes:
    """Measured times of the layers of a model for one micro-batch."""

    key: str
    """Identity of model and micro-batch, see `measure.layers_key`."""
    forward_s: tuple[float, ...]
    """By layer."""
    backward_s: tuple[float, ...]
    context_s: float = 0.0
    """What a stage computes before its layers, such as masks and positions."""
    split: Positive = SPLIT
    """Time of a backward in two parts relative to that of a whole one."""

    def slower_of(self, other: LayerTimes) -> LayerTimes:
        """Return the longest times of both, which are of the same layers."""
        both = (self.forward_s, other.forward_s), (self.backward_s, other.backward_s)
        forward_s, backward_s = (tuple(map(max, *each)) for each in both)
        context_s, split = max(self.context_s, other.context_s), max(self.split, other.split)
        return LayerTimes(self.key, forward_s, backward_s, context_s, split)


@dataclass(frozen=True)
class MessageTimes:
    """CPU time that messages take, seconds."""

    end_s: float
    """Of the thread that computes, for each message between stages that it sends or receives."""
    end_byte_s: float
    """The same, besides, for each byte of the message."""
    sum_byte_s: float
    """Of all threads of a process, for each byte that it sends in an all-reduce of gradients."""
    part_byte_s: float
    """The same of the gradients and weights of dp.shard, whose messages are packed and have checksums."""
    cores: float
    """Cores of the host for each thread that computes in a process."""
    mode: str = ""
    """dp.mode that was measured; empty = none but allreduce."""
    mode_param_s: float = 0.0
    """CPU time of a process for each trained parameter in a step of this mode, besides AdamW's; of several threads at
    once, no more than the time that passes."""

    def delays_layers(self, processes: int) -> bool:
        """Return whether other threads run on the cores of those that compute. processes: of the run on the host."""
        return self.cores < 2 * processes


@dataclass(frozen=True)
class Rates:
    """Rates of the device of each rank."""

    device: str
    """Name, for the user."""
    on_gpu: bool
    dtype: str
    """model.dtype for which they hold."""
    operations_per_s: Positive
    """Of layers in training, in the operations of `layer_costs`."""
    bytes_per_s: Positive
    """Of operations on single elements, bytes that they read and write."""
    host_bytes_per_s: Positive = HOST_BYTES_PER_S
    """Of copies from pinned host memory to the device."""
    link: LinkRate | None = None
    """Between two processes of one host; None = not measured."""
    layers: LayerTimes | None = None
    """Times of the layers of one model; None = not measured."""
    messages: MessageTimes | None = None
    """None = not measured."""

    def write(self, path: Path) -> None:
        """Write to a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps({"version": VERSION, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Rates | None:
        """Read from a file; None if it has another version. Raises CorruptFileError."""
        try:
            content = json.loads(path.read_bytes())
            if isinstance(content, dict) and content.pop("version", 0) != VERSION:
                return None
            return from_json(cls, content)
        except ValueError as error:
            raise CorruptFileError(path, f"does not hold measured rates: {error}; --calibrate writes it anew") from None


def parse_link(text: str) -> LinkRate:
    """Parse "100mbit" or "100mbit,20ms". Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)(?:,(\d+(?:\.\d+)?)(ms|s))?", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"--link {text} is not a rate and a delay; give, for example, --link 100mbit,20ms")
    delay = 0.0 if found[3] is None else float(found[3]) * (1e-3 if found[4] == "ms" else 1.0)
    return LinkRate(float(found[1]) * UNITS[found[2]] / 8, delay)


def rates_of_gpu(name: str, dtype: str) -> Rates:
    """Return the usual rates of a GPU. dtype: model.dtype. Raises ValueError for one that is not in the table.

    name: whole words of its name in the table, such as "RTX 4090", which no other GPU there has.
    """
    wanted = "".join(name.lower().removeprefix("nvidia").split())
    named = [each for each in PEAK_TB_PER_S if wanted in _phrases(each)]
    exact = [each for each in named if wanted == "".join(each.lower().split())]
    if not named:
        raise ValueError(
            f"--device {name} is not a known GPU; on the machine itself, --calibrate measures"
            f"{suggest(name, PEAK_TB_PER_S)}"
        )
    if not exact and len(named) > 1:
        raise ValueError(f'--device {name} may be {" or ".join(named)}; give its whole name: --device "{named[0]}"')
    found = (exact or named)[0]
    peak, bandwidth = peak_of_gpu(f"NVIDIA {found}", DTYPES[dtype]), 1e12 * PEAK_TB_PER_S[found]
    return Rates(found, True, dtype, SHARE_OF_PEAK * peak, SHARE_OF_BANDWIDTH * bandwidth)


def _phrases(name: str) -> set[str]:
    """Return all sequences of words of a name, in lower case and without spaces."""
    words = name.lower().split()
    ends = itertools.combinations(range(len(words) + 1), 2)
    return {"".join(words[first:last]) for first, last in ends}
