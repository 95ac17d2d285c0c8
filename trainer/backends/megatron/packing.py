"""Sequences of any length, packed into microbatches without padding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Sequences that pass through the model together, `t` tokens long, of which `m` are scored.

    `where[j]` is the position (in the pack) whose output predicts `targets[j]`. `members` tells which
    entries of which sequences those are, so that per-token columns can be gathered and scattered.
    """

    tokens: Tensor  # [1, t]
    packing: PackedSeqParams
    where: Tensor  # [m]
    targets: Tensor  # [m]
    members: tuple[tuple[int, NDArray[np.int64]], ...]  # (sequence, its scored entries)

    def sequences(self) -> Tensor:
        """Which sequence of the microbatch, from 0, each scored entry belongs to, `[m]` int64."""
        lengths = torch.tensor([len(entries) for _, entries in self.members], device=self.tokens.device)
        return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)

    def gather(self, column: Sequence[NDArray[np.float32]]) -> Tensor:
        """The scored entries of a per-token column, `[m]` on the microbatch's device."""
        picked = np.concatenate([column[sequence][entries] for sequence, entries in self.members])
        return torch.from_numpy(np.ascontiguousarray(picked, dtype=np.float32)).to(self.tokens.device)

    def scatter(self, values: Tensor, column: Sequence[NDArray[np.float32]]) -> None:
        """Write `values` `[m]` to the scored entries of a per-token column."""
        flat, start = values.detach().float().cpu().numpy(), 0
        for sequence, entries in self.members:
            column[sequence][entries] = flat[start : start + len(entries)]
            start += len(entries)


def microbatches(
    tokens: Sequence[NDArray[np.int32]],
    loss_mask: Sequence[NDArray[np.float32]],
    budget: int,
    device: torch.device,
) -> Iterator[Microbatch]:
    """Cover every entry with `loss_mask > 0` once, at most `budget` tokens per microbatch.

    A sequence longer than the budget gets a microbatch of its own. What follows the last scored token
    influences nothing and is left out, and so are sequences without one. Entry 0 cannot be scored.
    """
    scored = [np.flatnonzero(mask > 0) for mask in loss_mask]
    for entries in scored:
        if len(entries) and entries[0] == 0:
            raise ValueError("loss_mask marks the first token of a sequence, which nothing predicts")
    lengths = {i: int(entries[-1]) for i, entries in enumerate(scored) if len(entries)}
    for members in _fill(lengths, budget):
        starts = np.cumsum([0, *(lengths[i] for i in members)])
        cumulative = torch.from_numpy(starts.astype(np.int32)).to(device)
        longest = max(lengths[i] for i in members)
        packed = np.concatenate([tokens[i][: lengths[i]] for i in members])
        where = np.concatenate([scored[i] - 1 + start for i, start in zip(members, starts[:-1], strict=True)])
        targets = np.concatenate([tokens[i][scored[i]] for i in members])
        yield Microbatch(
            tokens=torch.from_numpy(packed.astype(np.int64))[None].to(device),
            packing=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=cumulative,
                cu_seqlens_kv=cumulative,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            ),
            where=torch.from_numpy(where).to(device),
            targets=torch.from_numpy(targets.astype(np.int64)).to(device),
            members=tuple((i, scored[i]) for i in members),
        )


def _fill(lengths: dict[int, int], budget: int) -> list[list[int]]:
    """First-fit decreasing bin packing; at most 11/9 of the fewest bins (Johnson 1973)."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(lengths, key=lambda i: (-lengths[i], i)):
        for b, left in enumerate(room):
            if lengths[i] <= left:
                bins[b].append(i)
                room[b] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(budget - lengths[i])
    return bins
