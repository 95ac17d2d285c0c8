"""What a person is shown of sessions."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from titogym.gateway.protocols.chat import wire_message
from titogym.gateway.sessions import divergence
from titogym.gateway.sessions.journal import Record
from titogym.gateway.sessions.session import Session
from titogym.gateway.sessions.store import SessionStore
from titogym.gateway.sessions.tree import Node, conversation
from titogym.gateway.tokens.mismatch import Mismatch, compare, rewritten
from titogym.templates.model import ModelAssets

_MOST_MISMATCHES = 100


def listed(record: Record) -> dict[str, Any]:
    """One line of the list of sessions."""
    return {
        "id": record.id,
        "created": record.created,
        "touched": record.touched,
        "turns": record.turns,
        "labels": record.spec.get("labels", {}),
        "matcher": record.spec["matcher"],
        "policy": record.spec["policy"],
    }


def report(session: Session, assets: ModelAssets) -> dict[str, Any]:
    """Everything about one session but its tokens. Renders the conversations again, to compare."""
    found = leaf_mismatches(session, assets)
    mismatches = [mismatch for _, mismatch in found]
    told = overview(session)
    told["tito_session_mismatch"] = Counter(mismatch.type for mismatch in mismatches)
    told["diagnostics"] |= {
        "mismatch_causes": Counter(mismatch.cause for mismatch in mismatches),
        "mismatches": [_mismatch(*one) for one in found[:_MOST_MISMATCHES]],
    }
    return told


def overview(session: Session) -> dict[str, Any]:
    """What is known of a session without rendering anything."""
    tree = session.tree
    nodes = list(tree.nodes)
    return {
        "id": session.id,
        "created": session.created,
        "touched": session.touched,
        "in_flight": len(session.tasks),
        "spec": session.spec.model_dump(mode="json", exclude_none=True),
        "turns": tree.turns(),
        "sampled_tokens": tree.sampled_tokens(),
        "errors": session.diagnostics.errors,
        "last_error": session.diagnostics.last_error,
        "exhausted": session.diagnostics.exhausted,
        "counters": {
            "superseded": sum(not tree.counts(node) for node in nodes),
            "roots": sum(node.parent is None for node in nodes),
            "leaves": sum(not node.children for node in nodes),
            "longest_row": max((node.length for node in nodes), default=0),
        },
        "tree": [_node(node, tree.counts(node)) for node in nodes],
        "diagnostics": {
            "ignored": session.diagnostics.ignored,
            "aborted": session.diagnostics.aborted,
            "joined": session.diagnostics.joined,
            "replayed": session.diagnostics.replayed,
            "rewritten": _rewrites(nodes),
            "divergence": divergence.report(tree),
        },
    }


def turns(session: Session) -> list[dict[str, Any]]:
    """The session's turns as messages, in order of commit: what each added, and what was answered."""
    return [
        {
            "id": node.id,
            "parent": None if node.parent is None else node.parent.id,
            "turn": node.turn,
            "superseded": not session.tree.counts(node),
            "messages": [wire_message(message) for message in node.messages],
            "answer": wire_message(node.answer),
            "prompt_tokens": node.length - len(node.generation.output_ids),
            "output_tokens": len(node.generation.output_ids),
            "cached_tokens": node.generation.cached_tokens,
            "finish": node.generation.finish,
            "versions": [span.version for span in node.generation.spans],
            "seconds": node.generation.timings.total,
        }
        for node in session.tree.nodes
    ]


def leaf_mismatches(session: Session, assets: ModelAssets) -> list[tuple[Node, Mismatch]]:
    """The differences of every leaf that counts; one that several leaves share is told once."""
    seen: set[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = set()
    found = []
    for leaf in session.tree.leaves():
        if not session.tree.counts(leaf):
            continue
        for mismatch in compare(assets, leaf):
            key = (mismatch.message, mismatch.at, tuple(mismatch.row_ids), tuple(mismatch.rendered_ids))
            if key not in seen:
                seen.add(key)
                found.append((leaf, mismatch))
    return found


def _mismatch(leaf: Node, mismatch: Mismatch) -> dict[str, Any]:
    role = conversation(leaf)[mismatch.message].role
    return {"leaf": str(leaf.id), "role": role, **asdict(mismatch)}


def gauges(store: SessionStore) -> dict[str, float]:
    """What there is of sessions now, by metric."""
    live = store.in_memory
    return {
        "titogym_sessions": len(store),
        "titogym_sessions_in_memory": len(live),
        "titogym_sessions_bytes": store.size,
        "titogym_turns_in_flight": sum(len(session.tasks) for session in live),
    }


def _node(node: Node, counts: bool) -> dict[str, Any]:
    generation = node.generation
    return {
        "id": node.id,
        "parent": None if node.parent is None else node.parent.id,
        "turn": node.turn,
        "superseded": not counts,
        "roles": [message.role for message in node.messages],
        "trim": generation.trim,
        "prompt_tokens": len(generation.prompt_ids),
        "output_tokens": len(generation.output_ids),
        "row_tokens": node.length,
        "cached_tokens": generation.cached_tokens,
        "finish": generation.finish,
        "versions": [span.version for span in generation.spans],
        "engine": generation.engine,
        "timings": asdict(generation.timings),
        "content": node.answer.content[:200],
        "tool_calls": [call.name for call in node.answer.tool_calls],
    }


def _rewrites(nodes: list[Node]) -> dict[str, int]:
    """How many answers came back changed, by field."""
    changed = (rewritten(node.answer, node.replayed) for node in nodes if node.replayed is not None)
    return Counter(field for fields in changed for field in fields)
