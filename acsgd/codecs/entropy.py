"""An entropy coder for whole messages: any bytes <-> fewer bytes, without loss.

Huffman codes over bytes (zlib's, without its search for repetitions, in which packed codes are poor): 2 codes of 4
bits or 4 codes of 2 bits share a byte and get one Huffman code together, so an element may take less than a bit. The
code is fitted anew to every 32 KiB, so parts of a message may differ. Python's lock is free meanwhile: it runs beside
the training.
"""

from __future__ import annotations

import zlib

from torch import Tensor

_RAW = -zlib.MAX_WBITS
"""Without header and checksum: the frame of the message has its length, and the network its own checksums."""


def compress_(body: Tensor) -> int:
    """Make the bytes of a message, uint8[n] in host memory, shorter in place; return how many they are now.

    n, if they do not get shorter; they are then as they were.
    """
    coder = zlib.compressobj(1, zlib.DEFLATED, _RAW, 9, zlib.Z_HUFFMAN_ONLY)
    view = body.numpy().data
    coded = coder.compress(view) + coder.flush()
    if len(coded) >= len(view):
        return len(view)
    view[: len(coded)] = coded
    return len(coded)


def decompress(coded: Tensor, body: Tensor) -> None:
    """Decode an entropy-coded message into `body`, uint8[n]; both in host memory. Raises ValueError if corrupt."""
    view, decoder = body.numpy().data, zlib.decompressobj(_RAW)
    try:
        decoded = decoder.decompress(coded.numpy().data, len(view) + 1)
    except zlib.error as error:
        raise ValueError(f"{len(coded)} bytes are not what the entropy coder makes: {error}") from None
    if len(decoded) != len(view) or not decoder.eof or decoder.unused_data:
        raise ValueError(f"{len(coded)} bytes decode to {len(decoded)} or more instead of {len(view)}")
    view[:] = decoded
