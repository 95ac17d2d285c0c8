"""What a harness does to its conversation, and whether its sessions train token-exact.

Every request of an examined run is replayed against each matcher: the tightest one under which no turn
loses its history is the one to use.
"""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titogym.gateway.errors import RequestError
from titogym.gateway.protocols import chat, messages, responses
from titogym.gateway.protocols.base import Context, WireProtocol
from titogym.gateway.sessions.divergence import Divergence, divergences
from titogym.gateway.sessions.matchers import MATCHERS, Matcher, matcher
from titogym.gateway.sessions.policies import Placement, branching, linear
from titogym.gateway.sessions.tree import (
    Generation,
    Lookup,
    Node,
    Tree,
    logprob_array,
    path,
    row,
    token_array,
)
from titogym.gateway.sessions.turn import TurnRequest
from titogym.gateway.tokens.mismatch import rewritten
from titogym.gateway.trajectories import cut
from titogym.harnesses.examination import MATCHER, Exchange, Run
from titogym.harnesses.scripted_model import FAMILY, MODEL
from titogym.templates.conversation import Message

SAFE_MATCHERS = ("strict", "loose_tool_call", "omit_reasoning", "call_id")  # the tightest first

_PROTOCOLS: dict[str, WireProtocol] = {
    "/chat/completions": chat.PROTOCOL,
    "/responses": responses.PROTOCOL,
    "/messages": messages.PROTOCOL,
}
_EXCERPT = 120  # characters
_LOG_CHARACTERS = 4000
_NOTHING = Generation(
    trim=0,
    prompt_ids=token_array(()),
    output_ids=token_array(()),
    logprobs=logprob_array(()),
    spans=(),
    finish="stop",
)


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a matcher's replay: turns whose history was `lost`, and conversations (`roots`)."""

    lost: int
    roots: int
    refused: int  # requests that a linear session would refuse


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The harness sent a field of a sampled answer back changed: so many answers, and one of them."""

    field: str
    answers: int
    held: str
    sent: str


@dataclass(slots=True)
class Report:
    """The findings. `needs` is the tightest matcher under which no turn loses its history, None where
    there is none; `used` the one that the verdict is about. `problems` are why it is not token-exact."""

    harness: str
    outcome: str
    detail: str
    seconds: float
    endpoints: list[dict[str, Any]] = field(default_factory=list)
    streaming: str = "never"
    fields: list[dict[str, str]] = field(default_factory=list)
    refusals: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0
    retried: int = 0
    matchers: dict[str, Fate] = field(default_factory=dict)
    needs: str | None = None
    used: str = ""
    rewrites: list[Rewrite] = field(default_factory=list)
    lost: list[Divergence] = field(default_factory=list)
    side_requests: list[str] = field(default_factory=list)  # conversations without tools, by what they ask
    sub_agents: list[str] = field(default_factory=list)  # those with tools of their own
    taken_back: int = 0  # answers that the harness dropped and asked again
    mismatches: dict[str, int] = field(default_factory=dict)
    prompts: int = 0  # that the model saw
    prompts_in_rows: int = 0  # of them, those that stand in the session's rows to the token
    trained_tokens: int = 0
    sampled_tokens: int = 0
    problems: list[str] = field(default_factory=list)
    reward: float | None = None  # 1 when it has done in its sandbox what the model asked for
    log: str = ""  # the end of the harness's own output

    @property
    def token_exact(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class _Answered:
    """An exchange that was answered with a new turn."""

    turn: TurnRequest
    node: Node


def diagnose(run: Run, matcher_name: str | None = None) -> Report:
    """What the run says of the harness. `matcher_name` is the matcher to judge it by.

    By default that is the harness's own, and for a plain command the tightest that it needs. Raises
    `UserError` for an unknown matcher.
    """
    report = Report(run.harness, run.result.outcome, run.result.detail, run.seconds)
    report.reward = run.reward
    report.log = run.result.log[-_LOG_CHARACTERS:]
    served = _read_exchanges(run, report)
    report.turns = len(served)
    replays = {name: _replay(served, MATCHERS[name]) for name in SAFE_MATCHERS}
    fates = {name: _fate(tree, served) for name, tree in replays.items()}
    report.matchers = fates
    report.needs = next((name for name in SAFE_MATCHERS if served and not fates[name].lost), None)
    best = report.needs or min(SAFE_MATCHERS, key=lambda name: fates[name].lost)
    report.used = matcher_name or run.declared or best
    tree = replays.get(report.used) or _replay(served, matcher(report.used))
    report.matchers.setdefault(report.used, _fate(tree, served))
    report.lost = divergences(tree)
    report.rewrites = _rewrites(served, min(replays[MATCHER], tree, key=lambda one: len(divergences(one))))
    beside = _beside(tree)
    report.side_requests = [_asks(node) for node in beside if not node.prefix.tools]
    report.sub_agents = [_asks(node) for node in beside if node.prefix.tools]
    report.taken_back = sum(not node.children and node is not _end(tree, node) for node in tree.nodes)
    report.mismatches = run.mismatches
    _witness(run, report)
    report.problems = _problems(report)
    return report


def _read_exchanges(run: Run, report: Report) -> list[_Answered]:
    """Fill in what the wire tells; the turns that were served, each once."""
    endpoints: dict[tuple[str, str], list[Exchange]] = {}
    fields: dict[str, dict[str, str]] = {}
    refusals: Counter[tuple[str, int, str, str, str]] = Counter()
    streams: list[bool] = []
    served: list[_Answered] = []
    for exchange in run.exchanges:
        endpoints.setdefault((exchange.method, exchange.path), []).append(exchange)
        protocol = next((p for end, p in _PROTOCOLS.items() if exchange.path.endswith(end)), None)
        if exchange.status >= 400:
            error = exchange.error()
            code, param, message = (str(error.get(name) or "") for name in ("code", "param", "message"))
            refusals[(exchange.path, exchange.status, code, param, message)] += 1
        body = exchange.json()
        if protocol is None or not isinstance(body, dict):
            continue
        param = str(exchange.error().get("param") or "")
        context = Context(FAMILY, MODEL, run.tree, headers=exchange.headers)
        turn = None
        with contextlib.suppress(RequestError):
            turn = protocol.parse(body, context).turn
        _note_fields(fields, body, turn.ignored if turn else {}, param)
        if turn is None or exchange.status >= 400:
            continue
        streams.append(turn.stream)
        # An answer may name the one before it, too.
        named = [n for id, n in run.tree.answers.items() if f'"{id}"'.encode() in exchange.answer]
        node = max(named, key=lambda node: node.id, default=None)
        if node is None:
            continue
        if any(one.node is node for one in served):
            report.retried += 1
        else:
            served.append(_Answered(turn, node))
    report.endpoints = [
        {
            "method": method,
            "path": path,
            "protocol": next((p.name for end, p in _PROTOCOLS.items() if path.endswith(end)), None),
            "requests": len(kept),
            "statuses": dict(Counter(str(one.status) for one in kept)),
        }
        for (method, path), kept in endpoints.items()
    ]
    report.streaming = "never" if not any(streams) else "always" if all(streams) else "sometimes"
    report.fields = list(fields.values())
    report.refusals = [
        dict(zip(("path", "status", "code", "param", "message"), told, strict=True)) | {"requests": count}
        for told, count in refusals.items()
    ]
    return sorted(served, key=lambda one: one.node.id)


def _note_fields(
    fields: dict[str, dict[str, str]], body: Mapping[str, Any], ignored: Mapping[str, str], refused: str
) -> None:
    names = {name: body[name] for name in body if name not in ignored}
    for name, value in {**names, **dict.fromkeys(ignored)}.items():
        fate = "refused" if name == refused else "ignored" if name in ignored else "heeded"
        known = fields.get(name)
        if known is None or known["fate"] == "heeded" != fate:
            example = "" if value is None and name in ignored else _excerpt(json.dumps(value))
            if name in ignored and name in body:
                example = _excerpt(json.dumps(body[name]))
            fields[name] = {"name": name, "fate": fate, "example": example, "reason": ignored.get(name, "")}


def _replay(served: Sequence[_Answered], how: Matcher) -> Tree:
    """The session as it would have become under another matcher. Its tokens do not matter here."""
    tree = Tree(how)
    for one in served:
        lookup = tree.find(one.turn.prefix, one.turn.messages)
        place = branching(tree, lookup)
        _commit(tree, lookup, place, one.node.answer)
    return tree


def _linear_refusals(served: Sequence[_Answered], how: Matcher) -> int:
    tree = Tree(how)
    refused = 0
    for one in served:
        lookup = tree.find(one.turn.prefix, one.turn.messages)
        try:
            _commit(tree, lookup, linear(tree, lookup), one.node.answer)
        except RequestError:
            refused += 1
    return refused


def _commit(tree: Tree, lookup: Lookup, place: Placement, answer: Message) -> None:
    new = lookup.messages[place.parent.depth if place.parent else 0 :]
    again = place.supersedes.id if place.supersedes else None
    tree.append(tree.draft(place.parent, lookup.prefix, new, answer, _NOTHING, again))


def _fate(tree: Tree, served: Sequence[_Answered]) -> Fate:
    roots = sum(node.parent is None for node in tree.nodes)
    return Fate(len(divergences(tree)), roots, _linear_refusals(served, tree.matcher))


def _rewrites(served: Sequence[_Answered], tree: Tree) -> list[Rewrite]:
    """How sampled answers came back, by field. `tree` holds them under the matcher that bears the most."""
    found: dict[str, dict[int, tuple[str, str]]] = {}
    for one, node in zip(served, tree.nodes, strict=True):
        sent = tree.find(one.turn.prefix, one.turn.messages).messages
        for earlier in path(node.parent):
            back = sent[earlier.depth - 1]
            for name in rewritten(earlier.answer, back):
                held = found.setdefault(name, {})
                held.setdefault(earlier.id, (_field(earlier.answer, name), _field(back, name)))
    return [
        Rewrite(name, len(cases), *map(_excerpt, next(iter(cases.values())))) for name, cases in found.items()
    ]


def _field(message: Message, name: str) -> str:
    head, _, part = name.partition(".")
    if head != "tool_calls":
        return str(getattr(message, head))
    if not part:
        return ", ".join(f"{call.name}({call.arguments})" for call in message.tool_calls)
    return ", ".join(str(getattr(call, part)) for call in message.tool_calls)


def _beside(tree: Tree) -> list[Node]:
    """First turns of the conversations beside the longest that start afresh."""
    longest = max(tree.nodes, key=lambda node: node.turn, default=None)
    main = path(longest)[0] if longest else None
    return [
        node
        for node in tree.nodes
        if node.parent is None
        and node is not main
        and not any(message.role == "assistant" for message in node.messages)
    ]


def _asks(node: Node) -> str:
    return _excerpt(node.messages[-1].content)


def _end(tree: Tree, leaf: Node) -> Node:
    """The last turn of the conversation that `leaf` belongs to."""
    root = path(leaf)[0]
    return max((node for node in tree.nodes if path(node)[0] is root), key=lambda node: node.id)


def _witness(run: Run, report: Report) -> None:
    """Compare what the model saw and sampled, to the token, with what would be trained on."""
    rows = {tuple(row(node)) for node in run.tree.nodes}
    seen = [(*one.prompt, *one.output) for one in run.model.sampled]
    report.prompts = len(seen)
    report.prompts_in_rows = sum(one in rows for one in seen)
    report.sampled_tokens = run.tree.sampled_tokens()
    report.trained_tokens = sum(sum(t.loss_mask) for t in cut("doctor", run.tree))


def _problems(report: Report) -> list[str]:
    problems = []
    if not report.turns:
        if report.outcome == "crashed" and not report.endpoints:
            return [f"It failed before it asked a model anything: {report.detail.rstrip('.')}."]
        return ["It got no answer from a model endpoint: see whether it uses the base URL that it is given."]
    if report.turns == 1:
        problems.append("It asked only once, so nothing is known of how it sends its history back.")
    if report.lost:
        causes = Counter(_cause(one.field) for one in report.lost)
        what = ", ".join(cause for cause, _ in causes.most_common(3))
        advice = f"; the matcher {report.needs} bears it" if report.needs else ""
        problems.append(
            f"{len(report.lost)} of {report.turns} turns lost their history under {report.used}, "
            f"because the harness changes {what}{advice}."
        )
    if report.prompts_in_rows < report.prompts:
        problems.append(f"{report.prompts - report.prompts_in_rows} prompts stand in no row of the session.")
    if report.trained_tokens != report.sampled_tokens:
        problems.append(f"{report.trained_tokens} of {report.sampled_tokens} sampled tokens carry loss.")
    for refusal in report.refusals:
        if refusal["code"] != "context_length_exceeded" and any(
            refusal["path"].endswith(end) for end in _PROTOCOLS
        ):
            problems.append(f"{refusal['path']} was refused with {refusal['status']}: {refusal['message']}")
    return problems


def _cause(name: str) -> str:
    return re.sub(r"^messages\[\d+\] \((\w+)\)\.", r"the \1 messages' ", name)


def _excerpt(text: str) -> str:
    return text if len(text) <= _EXCERPT else f"{text[: _EXCERPT - 1]}…"
