"""Codecs: tensor <-> bytes.

To add a codec, write its file and add a line to the table, which also gets it tested.
"""

from __future__ import annotations

from acsgd.codecs.base import Codec
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.hadamard import Hadamard
from acsgd.codecs.identity import Identity
from acsgd.codecs.lloyd import Lloyd
from acsgd.codecs.transform import Transform
from acsgd.config.spec import from_spec

CODECS: dict[str, type[Codec]] = {
    "none": Identity,
    "fixpoint": FixPoint,
    "lloyd": Lloyd,
    "hadamard": Hadamard,
    "transform": Transform,
}


def parse(spec: str, *, key: str = "codec") -> Codec:
    """Return the codec of a spec string, such as "none:dtype=bf16". key: Named in errors. Raises ValueError."""
    codec: Codec = from_spec(spec, CODECS, key=key)
    return codec
