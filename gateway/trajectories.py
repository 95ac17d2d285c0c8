"""Training sequences cut from a session's token tree."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from titogym.errors import UserError
from titogym.gateway.sessions.tree import Node, Tree, path, row


@dataclass(slots=True)
class Trajectory:
    """One training sequence: the row from a root to a leaf, `n` tokens long.

    `loss_mask[i]` is 1 where token `i` was sampled by the model and carries loss in this trajectory;
    `logprobs[i]` is the engine's log-prob of token `i` given those before it, 0.0 where the mask is 0.
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
    routes: bytes | None = None
    provenance: dict[str, Any] = field(default_factory=dict)


Picker = Callable[[Tree], Sequence[Node]]


def unsuperseded(tree: Tree) -> list[Node]:
    """The default picker: every leaf but those that were sampled again in their place."""
    return [leaf for leaf in tree.leaves() if tree.counts(leaf)]


def cut(session_id: str, tree: Tree, picker: Picker = unsuperseded) -> list[Trajectory]:
    """One trajectory per picked leaf, in order of commit.

    A completion that several of them share carries loss in the first only. Raises `UserError` when the
    picker gives something that is no leaf of the tree.
    """
    leaves = sorted(picker(tree), key=lambda node: node.id)
    if any(leaf.children or tree.nodes[leaf.id] is not leaf for leaf in leaves):
        raise UserError("The trajectory picker must return leaves of the tree that it was given.")
    trained: set[int] = set()
    return [_cut(session_id, leaf, trained) for leaf in leaves]


def _cut(session_id: str, leaf: Node, trained: set[int]) -> Trajectory:
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
        mask += [0] * environment + [1 if fresh else 0] * sampled
        logprobs += [0.0] * environment
        start = len(logprobs)
        logprobs += generation.logprobs if fresh else [0.0] * sampled
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
        provenance={
            "nodes": [node.id for node in steps],
            "engines": sorted({n.generation.engine for n in steps}),
        },
    )


def _joined(spans: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Touching spans of one version as one."""
    joined: list[tuple[int, int, str]] = []
    for start, end, version in spans:
        if joined and joined[-1][1:] == (start, version):
            joined[-1] = (joined[-1][0], end, version)
        else:
            joined.append((start, end, version))
    return joined
