"""How the bytes of a tensor become those of its next version: two encodings, both compressed.

- `xor`: old XOR new, which is mostly zeros where a small step changes the low bits of few elements.
- `overwrite`: the places of the elements that differ, as gaps, and their new values; best where few do.
"""

from typing import Literal

import numpy as np
import zstandard
from numpy.typing import NDArray

Encoding = Literal["xor", "overwrite"]
Bytes = NDArray[np.uint8]


class DeltaError(ValueError):
    """A delta that does not fit the bytes it is applied to."""


def encode(old: Bytes, new: Bytes, item_size: int, encoding: Encoding) -> bytes:
    """What turns `old` into `new` (same length, elements of `item_size` bytes)."""
    if encoding == "xor":
        payload = (old ^ new).tobytes()
    else:
        places = np.flatnonzero((old != new).reshape(-1, item_size).any(axis=1))
        gaps = np.diff(places, prepend=0).astype("<u4")
        payload = gaps.tobytes() + new.reshape(-1, item_size)[places].tobytes()
    return zstandard.ZstdCompressor(level=3).compress(payload)


def apply(data: bytes, old: Bytes, item_size: int, encoding: Encoding) -> None:
    """Turn `old` into the new bytes in place. Raises `DeltaError`."""
    try:
        payload = np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint8)
    except zstandard.ZstdError as error:
        raise DeltaError(f"a delta cannot be decompressed: {error}") from None
    if encoding == "xor":
        if len(payload) != len(old):
            raise DeltaError(f"a delta of {len(payload)} bytes for a tensor of {len(old)}")
        np.bitwise_xor(old, payload, out=old)
        return
    count, rest = divmod(len(payload), 4 + item_size)
    places = np.cumsum(payload[: 4 * count].view("<u4"), dtype=np.int64)
    items = old.reshape(-1, item_size)
    if rest or (count and places[-1] >= len(items)):
        raise DeltaError(f"a delta that reaches beyond a tensor of {len(old)} bytes")
    items[places] = payload[4 * count :].reshape(-1, item_size)
