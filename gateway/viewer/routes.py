"""The viewer: a page that shows sessions token by token, and the paged JSON behind it.

The page and its files hold no data and need no key. Everything that they ask for lies under the admin
routes; the page sends the key as a header and never as a part of a URL. What models and harnesses wrote
reaches the page as text only, and its content security policy forbids every script but its own.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from titogym.gateway import inspection
from titogym.gateway.errors import RequestError
from titogym.gateway.sessions.session import Session
from titogym.gateway.sessions.store import SessionStore
from titogym.gateway.sessions.tree import Node, conversation
from titogym.gateway.tokens.mismatch import Mismatch, closed_row
from titogym.gateway.trajectories import unsuperseded
from titogym.gateway.viewer import rows
from titogym.templates.model import ModelAssets

MOST_TOKENS = 4096  # of one answer
MOST_MISMATCHES = 200
_SHOWN_TOKENS = 256  # of one side of a mismatch
_CONTEXT_TOKENS = 16  # ahead of a mismatch and behind it
_LONGEST_NUMBER = 9  # digits of a turn's number
_COMPARED_SESSIONS = 64  # whose mismatches are kept

_FILES = {
    "": ("index.html", "text/html"),
    "/viewer.js": ("viewer.js", "text/javascript"),
    "/tokens.js": ("tokens.js", "text/javascript"),
    "/virtual.js": ("virtual.js", "text/javascript"),
    "/viewer.css": ("viewer.css", "text/css"),
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

Endpoint = Callable[[Request], Awaitable[Response]]


class Viewer:
    """The page's files and its data."""

    def __init__(self, store: SessionStore, assets: ModelAssets) -> None:
        self._store = store
        self._assets = assets
        self._comparing = asyncio.Lock()  # comparing renders: one session at a time leaves room for turns
        self._compared: OrderedDict[str, tuple[int, list[tuple[Node, Mismatch]]]] = OrderedDict()

    def routes(self, admin: Callable[[Endpoint], Endpoint]) -> list[Route]:
        """`admin` guards an endpoint with the admin key."""
        data = {
            "tree": self.tree,
            "summary": self.summary,
            "mismatches": self.mismatches,
            "rows/{node}": self.row,
            "rows/{node}/tokens": self.tokens,
        }
        return [
            *(Route("/viewer" + path, _file(*file)) for path, file in _FILES.items()),
            *(Route(f"/sessions/{{id}}/{path}", admin(endpoint)) for path, endpoint in data.items()),
        ]

    async def tree(self, request: Request) -> Response:
        """Everything about a session but its tokens and mismatches.

        `state` stands for all of it: asked again with `unless=STATE`, it alone comes until that has changed.
        """
        session = self._session(request)
        state = _state(session)
        if request.query_params.get("unless") == state:
            return _json({"state": state})
        return _json(
            {
                "state": state,
                "model": self._assets.model_dir.name,
                "family": self._assets.family.name,
                **await asyncio.to_thread(inspection.overview, session),
            }
        )

    async def summary(self, request: Request) -> Response:
        """What the list of sessions adds to each line."""
        session = self._session(request)
        found = await self._mismatches(session)
        return _json(
            {
                "sampled_tokens": session.tree.sampled_tokens(),
                "row_tokens": max((node.length for node in session.tree.nodes), default=0),
                "mismatches": len(found),
            }
        )

    async def mismatches(self, request: Request) -> Response:
        """A page of `tito_session_mismatch`, each with its message and the tokens around it."""
        session = self._session(request)
        found = await self._mismatches(session)
        start, end = _range(request, len(found), MOST_MISMATCHES)
        shown = found[start:end]
        items = await asyncio.to_thread(self._told, shown)
        return _json({"total": len(found), "start": start, "mismatches": items})

    async def row(self, request: Request) -> Response:
        """The parts of the row that ends with a node's answer: `[node, sampled, start, end, loss]`."""
        node, owners = self._node(request)
        found = rows.parts(node)
        return _json(
            {
                "node": node.id,
                "length": node.length,
                "parts": [
                    [
                        part.node.id,
                        int(part.sampled),
                        part.start,
                        part.end,
                        int(part.sampled and owners.get(part.node.id) == node.id),
                    ]
                    for part in found
                ],
            }
        )

    async def tokens(self, request: Request) -> Response:
        """A stretch of that row, token by token."""
        node, owners = self._node(request)
        start, end = _range(request, node.length, MOST_TOKENS)
        return _json(rows.stretch(self._assets.tokenizer, rows.parts(node), owners, node.id, start, end))

    def _session(self, request: Request) -> Session:
        return self._store.get(request.path_params["id"])

    def _node(self, request: Request) -> tuple[Node, dict[int, int]]:
        """The node that is asked for, and in which leaf's trajectory each node carries loss."""
        tree = self._session(request).tree
        number = request.path_params["node"]
        known = number.isdecimal() and len(number) <= _LONGEST_NUMBER
        if not known or int(number) >= len(tree.nodes):
            raise RequestError(f"The session has no turn {number}.", status=404, code="no_such_turn")
        return tree.nodes[int(number)], rows.trained_in(unsuperseded(tree))

    async def _mismatches(self, session: Session) -> list[tuple[Node, Mismatch]]:
        async with self._comparing:
            turns = len(session.tree.nodes)
            known = self._compared.get(session.id)
            if known is None or known[0] != turns:
                known = turns, await asyncio.to_thread(inspection.leaf_mismatches, session, self._assets)
                self._compared[session.id] = known
            self._compared.move_to_end(session.id)
            while len(self._compared) > _COMPARED_SESSIONS:
                self._compared.popitem(last=False)
        return known[1]

    def _told(self, found: Sequence[tuple[Node, Mismatch]]) -> list[dict[str, Any]]:
        tokenizer = self._assets.tokenizer
        held: dict[int, tuple[list[int], list[Any]]] = {}  # leaf -> its row and its messages
        told = []
        for leaf, mismatch in found:
            if leaf.id not in held:
                held[leaf.id] = closed_row(self._assets, leaf), conversation(leaf)
            row, messages = held[leaf.id]
            end = mismatch.at + len(mismatch.row_ids)
            plain = asdict(mismatch)
            for side in ("row", "rendered"):
                ids = plain[f"{side}_ids"]
                plain[f"{side}_total"] = len(ids)
                plain[f"{side}_ids"] = ids[:_SHOWN_TOKENS]
                plain[f"{side}_texts"] = [tokenizer.decode([token]) for token in ids[:_SHOWN_TOKENS]]
                del plain[f"{side}_text"]
            message = messages[min(mismatch.message, len(messages) - 1)]
            plain |= {
                "leaf": leaf.id,
                "role": message.role,
                "message_text": message.content[:400],
                "before": tokenizer.decode(row[max(mismatch.at - _CONTEXT_TOKENS, 0) : mismatch.at]),
                "after": tokenizer.decode(row[end : end + _CONTEXT_TOKENS]),
            }
            told.append(plain)
        return told


def _state(session: Session) -> str:
    diagnostics = session.diagnostics
    counts = (
        len(session.tree.nodes),
        len(session.tasks),
        sum(diagnostics.errors.values()),
        diagnostics.aborted + diagnostics.joined + diagnostics.replayed,
        len(diagnostics.ignored),
    )
    return ".".join(map(str, counts))


def _file(name: str, media_type: str) -> Endpoint:
    body = Path(__file__).with_name(name).read_bytes()

    async def endpoint(request: Request) -> Response:
        return Response(body, headers=_HEADERS, media_type=media_type)

    return endpoint


def _json(content: Any) -> Response:
    return Response(
        orjson.dumps(content), headers={"cache-control": "no-store"}, media_type="application/json"
    )


def _range(request: Request, length: int, most: int) -> tuple[int, int]:
    """`start` and `end` of the query, within what there is. Raises `RequestError`."""
    try:
        start = int(request.query_params.get("start", 0))
        end = int(request.query_params.get("end", start + most))
    except ValueError:
        raise RequestError("start and end must be whole numbers.", param="start") from None
    if not 0 <= start <= end:
        raise RequestError("start must not be negative, nor end smaller than start.", param="start")
    if end - start > most:
        raise RequestError(f"At most {most} are given at once: ask for shorter ranges.", param="end")
    return min(start, length), min(end, length)
