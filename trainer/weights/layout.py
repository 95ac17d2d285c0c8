"""The bytes of a safetensors file, known before they are written: where each tensor lies in it.

The order is the library's own (wider types first, then by name), so that the same weights give the same
file whoever writes them, and a tensor can be written into its place without the others.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titogym.trainer.weights.prepare import Bucket

# torch's name of a type -> its name in the format, bytes of one element
TYPES = {
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "float32": ("F32", 4),
    "int32": ("I32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "int16": ("I16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
_ITEM_SIZES = dict(TYPES.values())


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor's type (the format's name) and shape, and the half-open range of its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def item_size(self) -> int:
        return _ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """A file of `size` bytes that begins with `header`."""

    header: bytes
    entries: Mapping[str, Entry]
    size: int


def layout(buckets: Iterable[Bucket]) -> Layout:
    """Where the tensors of `buckets` lie in their file."""
    found = [
        (name, *TYPES[dtype], tuple(shape))
        for bucket in buckets
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True)
    ]
    described: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    ranges, at = {}, 0
    for name, dtype, item, shape in sorted(found, key=lambda one: (-one[2], one[0])):
        size = int(np.prod(shape, dtype=np.int64)) * item
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        ranges[name] = (dtype, shape, at, at + size)
        at += size
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    ahead = len(header)
    entries = {
        name: Entry(dtype, shape, start + ahead, end + ahead)
        for name, (dtype, shape, start, end) in ranges.items()
    }
    return Layout(header, entries, ahead + at)


def contents(buckets: Iterable[Bucket]) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """The bytes of each tensor, as a view of its bucket where that is in the CPU's memory."""
    for bucket in buckets:
        flat = bucket.flat.cpu().numpy()
        start = 0
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            end = start + int(np.prod(shape, dtype=np.int64)) * TYPES[dtype][1]
            yield name, flat[start:end]
            start = end


def digest(data: bytes | NDArray[np.uint8]) -> str:
    """What names a tensor's bytes: BLAKE2b of 16 bytes, in hexadecimal."""
    return hashlib.blake2b(data if isinstance(data, bytes) else data.data, digest_size=16).hexdigest()


def checksum(digests: Mapping[str, str], header: bytes) -> str:
    """What names a whole file: the digest of its header and of its tensors' digests by name."""
    text = "".join(f"{name}={digests[name]}\n" for name in sorted(digests))
    return digest(header + text.encode())
