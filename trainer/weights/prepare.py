"""What every mover sends: named tensors in buckets of bounded size, whose bytes lie end to end.

The tensors come gathered and under their Hugging Face names (`Backend.export`). Those that an engine can
only load together stay together: a quantised weight with its scales, and the parts of a fused matrix.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

_SCALE = re.compile(r"(weight|bias)(_scale_inv|_scale|_zero_point|_scale_2|_packed|_shape)$")
_FUSED = re.compile(r"\.(?:[qkv]_proj|gate_proj|up_proj|q_a_proj|kv_a_proj_with_mqa)\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")
Named = tuple[str, Tensor]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel together, their bytes one after another in `flat`.

    Wider types come first, so that each tensor starts at a multiple of its element's size.
    """

    names: list[str]
    dtypes: list[str]  # torch's names, such as "bfloat16"
    shapes: list[list[int]]
    flat: Tensor  # uint8

    def tensors(self) -> list[Named]:
        """The tensors again, as views of `flat`."""
        made, start = [], 0
        for name, kind, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            dtype: torch.dtype = getattr(torch, kind)
            end = start + torch.Size(shape).numel() * dtype.itemsize
            made.append((name, self.flat[start:end].view(dtype).view(shape)))
            start = end
        return made


def buckets(tensors: Iterable[Named], limit: int, expert_factor: int = 1) -> Iterator[Bucket]:
    """Cut named tensors into buckets of at most `limit` bytes, in order; never cuts an atomic group.

    An expert's bytes count `expert_factor` times: gathering them takes that much memory on every rank.
    """
    held: list[Named] = []
    size = 0
    for key, group in groupby(tensors, key=lambda named: atomic_key(named[0])):
        members = list(group)
        added = sum(tensor.nbytes for _, tensor in members) * (expert_factor if _EXPERT.search(key) else 1)
        if held and size + added > limit:
            yield _bucket(held)
            held, size = [], 0
        held += members
        size += added
    if held:
        yield _bucket(held)


def atomic_key(name: str) -> str:
    """Neighbouring tensors with the same key are loaded together or not at all."""
    return _FUSED.sub(".fused.", _SCALE.sub(r"\1", name))


def _bucket(tensors: Sequence[Named]) -> Bucket:
    ordered = sorted(tensors, key=lambda named: -named[1].element_size())
    return Bucket(
        names=[name for name, _ in ordered],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered],
        shapes=[list(tensor.shape) for _, tensor in ordered],
        flat=torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in ordered]),
    )
