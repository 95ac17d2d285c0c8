"""Sequences of any length, packed into microbatches without padding, and spread over ranks.

Every rank computes the same plan from the whole batch, so nothing about it has to be agreed upon.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# (sequence, its scored entries), for each sequence of a microbatch
Members = tuple[tuple[int, NDArray[np.int64]], ...]


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of the batch a rank computes.

    Whole sequences are dealt to `data_size` ranks; the tokens of each sequence are cut into
    `2 * context_size` chunks, of which a rank takes one from the front and its mirror image from the back,
    so that causal attention costs every rank the same. A rank's part of a microbatch is a multiple of
    `multiple` tokens long. What these two ask for is padded at the ends of sequences, after every token
    that carries loss.
    """

    data_rank: int = 0
    data_size: int = 1
    context_rank: int = 0
    context_size: int = 1
    multiple: int = 1


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Sequences that pass through the model together; `m` of their tokens are scored.

    This rank holds `t` of the tokens and scores `len(where)` of the `m`: the one at `where[j]` (in
    `tokens`) predicts `targets[j]`, entry `mine[j]` of the `m`. `members` tells which entries of which
    sequences the `m` are, so that per-token columns can be gathered and scattered.
    """

    tokens: Tensor  # [1, t]
    positions: Tensor  # [1, t], place of each token in its sequence
    real: Tensor  # [t] bool, False where padded
    bounds: Tensor  # [s + 1] int32: where sequences start, over the tokens of all context ranks
    longest: int  # tokens of the longest sequence
    where: Tensor  # [m'] int64
    targets: Tensor  # [m'] int64
    mine: Tensor  # [m'] int64
    members: Members
    routes: Tensor | None  # [t, layers, top_k] int64, recorded experts; 0, 1, ... where padded

    @property
    def scored(self) -> int:
        """`m`, over all context ranks."""
        return sum(len(entries) for _, entries in self.members)

    def sequences(self) -> Tensor:
        """Which sequence of the microbatch, from 0, each scored entry belongs to, `[m]` int64."""
        lengths = torch.tensor([len(entries) for _, entries in self.members], device=self.tokens.device)
        return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)

    def gather(self, column: Sequence[NDArray[np.float32]]) -> Tensor:
        """The scored entries of a per-token column, `[m]` on the microbatch's device."""
        picked = np.concatenate([column[sequence][entries] for sequence, entries in self.members])
        return torch.from_numpy(np.ascontiguousarray(picked, dtype=np.float32)).to(self.tokens.device)


def scatter(members: Members, values: NDArray[np.float32], column: Sequence[NDArray[np.float32]]) -> None:
    """Write `values` `[m]` to the entries of a per-token column that `members` names."""
    start = 0
    for sequence, entries in members:
        column[sequence][entries] = values[start : start + len(entries)]
        start += len(entries)


def microbatches(
    tokens: Sequence[NDArray[np.int32]],
    loss_mask: Sequence[NDArray[np.float32]],
    budget: int,
    device: torch.device,
    share: Share | None = None,
    routes: Sequence[NDArray[np.integer]] | None = None,
) -> list[Microbatch]:
    """A rank's microbatches: together the ranks cover every entry with `loss_mask > 0` once.

    At most `budget` tokens of sequences go into one microbatch; a longer sequence gets one of its own.
    Every rank gets equally many, the last of which may score nothing. What follows the last scored token
    influences nothing and is left out, and so are sequences without one. Entry 0 cannot be scored.
    """
    share = share or Share()
    scored = [np.flatnonzero(mask > 0) for mask in loss_mask]
    for entries in scored:
        if len(entries) and entries[0] == 0:
            raise ValueError("loss_mask marks the first token of a sequence, which nothing predicts")
    lengths = {i: length(mask) for i, mask in enumerate(loss_mask) if mask.any()}
    plans = [_fill(part, budget) for part in _deal(lengths, share.data_size)]
    plan = plans[share.data_rank]
    plan += [[] for _ in range(max(map(len, plans)) - len(plan))]
    return [_microbatch(members, tokens, scored, lengths, share, routes, device) for members in plan]


def length(loss_mask: NDArray[np.float32]) -> int:
    """How many tokens of a sequence pass through the model: those before the last that is scored."""
    scored = np.flatnonzero(loss_mask > 0)
    return int(scored[-1]) if len(scored) else 0


def _microbatch(
    members: Sequence[int],
    tokens: Sequence[NDArray[np.int32]],
    scored: Sequence[NDArray[np.int64]],
    lengths: dict[int, int],
    share: Share,
    routes: Sequence[NDArray[np.integer]] | None,
    device: torch.device,
) -> Microbatch:
    chunks = 2 * share.context_size if share.context_size > 1 else 1
    padded = [-(-lengths[i] // chunks) * chunks for i in members] or [0]
    whole = share.multiple * chunks
    padded[-1] += -sum(padded) % whole or (0 if sum(padded) else whole)
    starts = np.cumsum([0, *padded])
    total = int(starts[-1])

    ids, places = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
    real = np.zeros(total, dtype=bool)
    rows: NDArray[np.int64] | None = None
    if routes is not None:
        layers, top_k = routes[0].shape[1:]
        rows = np.broadcast_to(np.arange(top_k), (total, layers, top_k)).copy()
    for i, start in zip(members, starts, strict=False):
        end = start + lengths[i]
        ids[start:end], real[start:end] = tokens[i][: lengths[i]], True
        if rows is not None and routes is not None:
            if len(routes[i]) < lengths[i]:
                raise ValueError(
                    f"sequence {i} has {len(routes[i])} rows of expert routes, but needs {lengths[i]}"
                )
            rows[start:end] = routes[i][: lengths[i]]
    for start, length in zip(starts, padded, strict=False):
        places[start : start + length] = np.arange(length)

    local = _local(starts, share)
    where = np.concatenate(
        [scored[i] - 1 + start for i, start in zip(members, starts, strict=False)] or [np.zeros(0, np.int64)]
    )
    targets = np.concatenate([tokens[i][scored[i]] for i in members] or [np.zeros(0, np.int32)])
    place_here = np.full(total, -1)
    place_here[local] = np.arange(len(local))
    mine = np.flatnonzero(place_here[where] >= 0)

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return Microbatch(
        tokens=tensor(ids[local])[None],
        positions=tensor(places[local])[None],
        real=tensor(real[local]),
        bounds=tensor(starts.astype(np.int32)),
        longest=max(padded),
        where=tensor(place_here[where][mine]),
        targets=tensor(targets[mine].astype(np.int64)),
        mine=tensor(mine),
        members=tuple((i, scored[i]) for i in members),
        routes=None if rows is None else tensor(rows[local]),
    )


def _local(starts: NDArray[np.int64], share: Share) -> NDArray[np.int64]:
    """Places, in the whole pack, of the tokens that this context rank holds."""
    if share.context_size == 1:
        return np.arange(int(starts[-1]))
    picked = []
    for start, end in pairwise(starts):
        chunks = np.arange(start, end).reshape(2 * share.context_size, -1)
        picked += [chunks[share.context_rank], chunks[-1 - share.context_rank]]
    return np.concatenate(picked)


def _deal(lengths: dict[int, int], ranks: int) -> list[dict[int, int]]:
    """Longest first, each to the rank with the fewest tokens; at most 4/3 of the best (Graham 1969)."""
    parts: list[dict[int, int]] = [{} for _ in range(ranks)]
    loads = [0] * ranks
    for i in sorted(lengths, key=lambda i: (-lengths[i], i)):
        rank = loads.index(min(loads))
        parts[rank][i] = lengths[i]
        loads[rank] += lengths[i]
    return parts


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
