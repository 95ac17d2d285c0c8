"""Training sequences cut from a session's token tree."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from titogym.errors import UserError
from titogym.gateway.routes import Routes, RouteShape, first_missing
from titogym.gateway.sessions.tree import Node, Tree, path, row


@dataclass(slots=True)
class Trajectory:
    """One training sequence: the row from a root to a leaf, `n` tokens long.

    `loss_mask[i]` is 1 where token `i` was sampled by the model and carries loss in this trajectory;
    `logprobs[i]` is the engine's log-prob of token `i` given those before it, 0.0 where the mask is 0.
    `routes` has shape `[n - 1, layers, top_k]`, in sessions that keep them: those of token `i` go with the
    log-prob of token `i + 1`. Sampled tokens whose log-prob and routes are not of one pass carry no loss.
    `version_spans` are `(start, end, weight_version)` over token positions, covering sampled tokens only.
    """

    session_id: str
    leaf: str
    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    version_spans: list[tuple[int, int, str]]
    turns: int
    finish_reason: str
    reward: float | None = None
    routes: Routes | None = None
    provenance: dict[str, Any] = field(default_factory=dict)


Picker = Callable[[Tree], Sequence[Node]]


def unsuperseded(tree: Tree) -> list[Node]:
    """The default picker: every leaf but those that were sampled again in their place."""
    return [leaf for leaf in tree.leaves() if tree.counts(leaf)]


def cut(
    session_id: str, tree: Tree, picker: Picker = unsuperseded, shape: RouteShape | None = None
) -> list[Trajectory]:
    """One trajectory per picked leaf, in order of commit; with expert routes where a `shape` is given.

    A completion that several of them share carries loss in the first only. Raises `UserError` when the
    picker fails or gives something that is no leaf of the tree.
    """
    try:
        picked = list(picker(tree))
    except Exception as error:  # it is the user's own code, or no picker at all
        raise UserError(f"The trajectory picker failed: {error!r}") from error
    chosen = {id(node) for node in picked}
    leaves = [leaf for leaf in tree.leaves() if id(leaf) in chosen]
    if len(leaves) != len(picked):
        raise UserError("The trajectory picker must return leaves of the tree that it was given, each once.")
    trained: set[int] = set()
    return [_cut(session_id, leaf, trained, shape) for leaf in leaves]


def _cut(session_id: str, leaf: Node, trained: set[int], shape: RouteShape | None) -> Trajectory:
    mask: list[int] = []
    logprobs: list[float] = []
    spans: list[tuple[int, int, str]] = []
    steps = path(leaf)
    for node in steps:
        generation = node.generation
        if generation.trim:
            del mask[-generation.trim :], logprobs[-generation.trim :]
            spans = [
                (start, min(end, len(mask)), version) for start, end, version in spans if start < len(mask)
            ]
        fresh = node.id not in trained
        environment, sampled = len(generation.prompt_ids), len(generation.output_ids)
        start = len(mask) + environment
        masked = environment + (generation.unpaired if fresh else sampled)
        mask += [0] * masked + [1] * (environment + sampled - masked)
        logprobs += [0.0] * masked
        logprobs += generation.logprobs[generation.unpaired :] if fresh else []
        spans += [
            (start + span.start, start + span.end, span.version)
            for span in generation.spans
            if span.start < span.end
        ]
    trained.update(node.id for node in steps)
    return Trajectory(
        session_id=session_id,
        leaf=str(leaf.id),
        tokens=row(leaf).tolist(),
        loss_mask=mask,
        logprobs=logprobs,
        version_spans=_joined(spans),
        turns=leaf.turn,
        finish_reason=leaf.generation.finish,
        routes=None if shape is None else shape.routes(_routes(steps, shape)),
        provenance={
            "nodes": [node.id for node in steps],
            "engines": sorted({n.generation.engine for n in steps}),
        },
    )


def _routes(steps: Sequence[Node], shape: RouteShape) -> bytes:
    data = bytearray()
    for node in steps:
        generation = node.generation
        above = node.parent.length if node.parent else 0
        del data[first_missing(above, generation.trim) * shape.row :]
        data += generation.routes or b""
        if len(data) != (node.length - 1) * shape.row:
            raise ValueError(f"turn {node.id} lacks expert routes")
    return bytes(data)


def _joined(spans: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Touching spans of one version as one."""
    joined: list[tuple[int, int, str]] = []
    for start, end, version in spans:
        if joined and joined[-1][1:] == (start, version):
            joined[-1] = (joined[-1][0], end, version)
        else:
            joined.append((start, end, version))
    return joined
