"""Entropy coding of messages: lossless, with Huffman codes over bytes.

zlib's DEFLATE without its search for repetitions, of which packed codes have few. Two 4-bit codes or four 2-bit codes
share a byte and thus a Huffman code, so an element may take less than one bit. The Huffman code is fitted to each
32 KiB separately. zlib releases the GIL, so coding in a thread overlaps with training.
"""

from __future__ import annotations

import zlib

from torch import Tensor

_RAW = -zlib.MAX_WBITS
"""Raw DEFLATE, without header and checksum: the frame holds length and checksum."""


def compress_(message: Tensor) -> int:
    """Entropy-code a message, uint8[n] in host memory, in place. Return its new length.

    If coding does not shorten it, the message is left unchanged, and the length is n.
    """
    coder = zlib.compressobj(1, zlib.DEFLATED, _RAW, 9, zlib.Z_HUFFMAN_ONLY)
    view = message.numpy().data
    coded = coder.compress(view) + coder.flush()
    if len(coded) >= len(view):
        return len(view)
    view[: len(coded)] = coded
    return len(coded)


def decompress(coded: Tensor, message: Tensor) -> None:
    """Decode an entropy-coded message into `message`, uint8[n]; both in host memory. Raises ValueError if corrupt."""
    view, decoder = message.numpy().data, zlib.decompressobj(_RAW)
    try:
        decoded = decoder.decompress(coded.numpy().data, len(view) + 1)
    except zlib.error as error:
        raise ValueError(f"corrupt entropy-coded message of {len(coded)} bytes: {error}") from None
    if len(decoded) != len(view) or not decoder.eof or decoder.unused_data:
        raise ValueError(
            f"corrupt entropy-coded message: its {len(coded)} bytes decode to {len(decoded)} or more, not {len(view)}"
        )
    view[:] = decoded
