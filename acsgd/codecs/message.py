"""The message protocol: a vector <-> one uint8 buffer of limited length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from acsgd.codecs.base import BlockDecoder, Codec, Wire, check_finite, pack, unpack, wire_bytes
from acsgd.codecs.bits import has_values
from acsgd.codecs.lossless import compress_, decompress


class MessageCodec(Protocol):
    """Encodes a vector as a message. Implemented by PackedCodec for every Codec, and by TopK and LogLevels."""

    def max_bytes(self, n: int) -> int:
        """Return the largest length of a message that encodes a vector [n]."""
        ...

    def encode(self, x: Tensor) -> Tensor:
        """Return the message, uint8[m], of a vector fp32 [n], on its device. May raise NotFiniteError."""
        ...

    def decode(self, message: Tensor, n: int) -> Tensor:
        """Return the decoded vector, fp32 [n], on the message's device. Raises ValueError for a corrupt message."""
        ...

    def error_bound(self, x: Tensor) -> Tensor:
        """Return an upper bound of |decode(encode(x)) - x| for each element of a finite vector, fp64 [n]."""
        ...


@dataclass(frozen=True)
class PackedCodec:
    """A codec's fields packed into one message, which is entropy-coded if the codec asks for it."""

    codec: Codec

    def max_bytes(self, n: int) -> int:
        return wire_bytes(self.codec.wire((n,)))

    def encode(self, x: Tensor) -> Tensor:
        message = x.new_empty(self.max_bytes(len(x)), dtype=torch.uint8)
        fields = self.codec.encode(x)
        if not self.codec.encodes_nan:
            check_finite(fields, x)
        pack(fields, message)
        return compressed(message, self.codec.wire((len(x),))) if self.codec.entropy_coding else message

    def decode(self, message: Tensor, n: int) -> Tensor:
        """Raises ValueError for a corrupt message."""
        return self.codec.decode(self._fields(message, n), (n,), torch.float32)

    @property
    def decodes_in_blocks(self) -> bool:
        """Whether `decoded_blocks` can be called, and keeps no more than a message and a block."""
        return isinstance(self.codec, BlockDecoder) and not self.codec.entropy_coding

    def check(self, message: Tensor, n: int) -> None:
        """Raise ValueError unless `decode` can decode a message to a vector [n]."""
        self._fields(message, n)

    def decoded_blocks(self, message: Tensor, n: int) -> Iterator[tuple[slice, Tensor]]:
        """Return blocks of the elements that `decode` returns, as `BlockDecoder` yields them.

        Only if `decodes_in_blocks`. Raises ValueError for a corrupt message.
        """
        assert isinstance(self.codec, BlockDecoder)
        return self.codec.decoded_blocks(self._fields(message, n), (n,))

    def _fields(self, message: Tensor, n: int) -> tuple[Tensor, ...]:
        nbytes = self.max_bytes(n)
        if self.codec.entropy_coding:
            message = decompressed(message, nbytes, self.codec.wire((n,)))
        if len(message) != nbytes:
            raise ValueError(f"corrupt message of {n} elements: {len(message)} bytes instead of {nbytes}")
        return unpack(message, self.codec.wire((n,)))

    def error_bound(self, x: Tensor) -> Tensor:
        return self.codec.error_bound(x)


def compressed(message: Tensor, wire: Wire = ()) -> Tensor:
    """Return a message, uint8[n], entropy-coded, on its device; the message itself if that is not shorter.

    wire: as in `compress_`.
    """
    coded = message.to("cpu", copy=True)
    length = compress_(coded, wire) if has_values(message) else len(message)
    return coded[:length].to(message.device) if length < len(message) else message


def decompressed(message: Tensor, nbytes: int, wire: Wire = ()) -> Tensor:
    """Return the uint8[nbytes] that `compressed` encoded, on the message's device. Raises ValueError if corrupt."""
    if len(message) == nbytes:
        return message
    decoded = torch.empty(nbytes, dtype=torch.uint8)
    decompress(message.cpu(), decoded, wire)
    return decoded.to(message.device)
