"""The turn pipeline: find the node, build the row, sample, parse, commit.

A request is validated as a whole before anything changes. The commit is the only change: it happens at
once, after the last token and before the client learns that its answer is complete.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import orjson

from titogym.gateway.engines.base import (
    Chunk,
    ContextLengthError,
    Engine,
    EngineError,
    Finish,
    NoEngineError,
    Prompt,
    SamplingParams,
)
from titogym.gateway.errors import RequestError, context_exceeded
from titogym.gateway.routes import first_missing, route_shape
from titogym.gateway.sessions.budget import Seat
from titogym.gateway.sessions.flights import replay
from titogym.gateway.sessions.policies import Placement
from titogym.gateway.sessions.session import Session
from titogym.gateway.sessions.spec import Sampling
from titogym.gateway.sessions.store import SessionStore
from titogym.gateway.sessions.tree import (
    Generation,
    Lookup,
    Node,
    Receipt,
    Timings,
    Tree,
    logprob_array,
    path,
    token_array,
)
from titogym.gateway.sessions.turn import Committed, Delta, Item, Items, Planned, TurnRequest
from titogym.gateway.tokens.forcing import forced_calls, one_call_stops
from titogym.gateway.tokens.parsers.answer import AnswerParser
from titogym.gateway.tokens.parsers.events import Content, Event
from titogym.gateway.tokens.rows import Extension, extend
from titogym.templates.conversation import Message, Prefix, Role
from titogym.templates.model import ModelAssets
from titogym.templates.published import vocabulary

_LONG_TEXT = 32_768  # characters; encoding more than this would hold up other sessions' streams
# Characters per token that no text comes near on average: one that is longer is refused unencoded, since
# encoding takes some 300 bytes of memory for each of its own.
_MOST_CHARACTERS = 32
_MOST_AT_ONCE = 512  # tokens of an answer that comes whole; between them other sessions have their turn
_UNSEEDED = "the engines sample by seeds only with --enable-deterministic-inference"
_SHARED_BLOCK = "the family writes all calls of an answer as one"


class Router(Protocol):
    """Knows the engines."""

    async def choose(self, session_id: str) -> Engine:
        """The engine for a session's next turn. Raises `EngineError` when there is none."""
        ...

    async def context_length(self) -> int:
        """Tokens of prompt and output that every engine takes. Raises `EngineError`."""
        ...

    @property
    def seeded(self) -> bool:
        """Whether the engines sample by the seed of a request."""
        ...


@dataclass(frozen=True, slots=True)
class _Plan:
    lookup: Lookup
    placement: Placement
    messages: tuple[Message, ...]  # what the turn adds
    extension: Extension
    prompt: Prompt
    params: SamplingParams
    stops: tuple[str, ...]  # stop strings of the client; `params` may have more
    routes_from: int | None  # the first token without expert routes, where the session keeps them


class TurnService:
    """Serves turns of any session."""

    def __init__(self, assets: ModelAssets, router: Router, store: SessionStore) -> None:
        self._assets = assets
        self._router = router
        self._store = store
        self.route_shape = route_shape(assets.model_dir)
        # A model may sample from more rows than its tokenizer has tokens: embeddings are padded.
        self._vocabulary = max(assets.tokenizer.vocab_size, vocabulary(assets.model_dir))

    def board(self, session: Session, request: TurnRequest, retried: bool) -> tuple[Items, Receipt]:
        """Start a turn, or find the one that this request is a retry of: its items, and its receipt.

        `retried` says that the client calls the request a retry. Raises `RequestError`.
        """
        earlier = session.attempts.earlier(request.receipt, retried)
        if isinstance(earlier, Node):
            session.diagnostics.replayed += 1
            return replay(earlier), earlier.receipt
        if earlier is None:
            earlier = session.attempts.start(request.receipt, lambda: self.turn(session, request))
            session.tasks.add(earlier.task)
            earlier.task.add_done_callback(session.tasks.discard)
        else:
            session.diagnostics.joined += 1
        return earlier.board(), earlier.receipt

    async def turn(self, session: Session, request: TurnRequest) -> AsyncGenerator[Item]:
        """Sample one answer. The last item is `Committed`; closing the iterator earlier commits nothing.

        Turns of a linear session wait for each other. Raises `RequestError`, before the first item for
        everything that validation can find.
        """
        started = time.monotonic()
        self._ignore(session, {**request.ignored, **_overruled(session.spec.sampling, request.sampling)})
        try:
            async with (
                session.lock if session.spec.policy == "linear" else nullcontext(),
                session.budget.seat(self._most(session, request)) as seat,
            ):
                plan = await self._plan(session, request, seat)
                async with aclosing(self._sample(session, request, plan, started)) as items:
                    async for item in items:
                        yield item
        except RequestError as error:
            self._store.failed(session, error)
            raise
        except Exception:
            failure = RequestError("The gateway failed.", status=500, code="internal_error")
            self._store.failed(session, failure)
            raise

    async def count(self, session: Session, request: TurnRequest) -> int:
        """Tokens of the prompt that the request would be sampled from. Changes nothing.

        Raises `RequestError` for what the template refuses.
        """
        lookup = session.tree.find(request.prefix, request.messages)
        parent = lookup.nodes[-1] if lookup.nodes else None
        messages = lookup.messages[parent.depth if parent else 0 :]
        cut = _cut(session.tree, parent, lookup, request)
        extension = await self._extend(parent, request, messages, await self._context_length(), cut)
        return (parent.length if parent else 0) - extension.trim + len(extension.prompt_ids)

    async def _context_length(self) -> int:
        try:
            return await self._router.context_length()
        except EngineError as error:
            raise _engine_failure(error) from error

    async def _extend(
        self,
        parent: Node | None,
        request: TurnRequest,
        messages: Sequence[Message],
        context_length: int,
        cut: Node | None = None,
    ) -> Extension:
        """What `messages`, and what was begun of the answer, add to the row of `parent`.

        `cut` is the turn that had begun it. Raises `RequestError` when no context holds them.
        """
        prefix, begun = request.prefix, request.begun
        length = _characters([*messages, *([begun] if begun else [])], None if parent else prefix)
        if length > _MOST_CHARACTERS * context_length:
            raise context_exceeded(
                f"This model's maximum context length is {context_length} tokens. However, your messages "
                f"have {length} characters. Please reduce the length of the messages.",
                overflow=(length // _MOST_CHARACTERS, context_length - 1),  # tokens that it has at the least
            )
        if cut is not None:
            begun = None
        if length > _LONG_TEXT:
            found = await asyncio.to_thread(extend, self._assets, parent, prefix, messages, begun)
        else:
            found = extend(self._assets, parent, prefix, messages, begun)
        if cut is None:
            return found
        sampled = cut.generation.output_ids
        return replace(found, prompt_ids=[*found.prompt_ids, *sampled], begun=sampled)

    def _most(self, session: Session, request: TurnRequest) -> int | None:
        """Tokens that the request asks for at most."""
        forced = session.spec.sampling.max_tokens
        return request.sampling.max_tokens if forced is None else forced

    async def _plan(self, session: Session, request: TurnRequest, seat: Seat) -> _Plan:
        """Everything about the turn that can be known, and refused, ahead of sampling."""
        self._store.admit(session)
        context_length = await self._context_length()
        lookup = session.tree.find(request.prefix, request.messages)
        placement = session.policy(session.tree, lookup)
        parent = placement.parent
        messages = lookup.messages[parent.depth if parent else 0 :]
        session.budget.allow(seat, placement)
        if request.begun is not None:
            self._check_begun(request)
        cut = _cut(session.tree, parent, lookup, request)
        extension = await self._extend(parent, request, messages, context_length, cut)
        prompt = session.texts.prompt(parent, extension.trim, extension.prompt_ids)
        room = context_length - len(prompt)
        if room < 1:
            raise context_exceeded(
                f"This model's maximum context length is {context_length} tokens. However, your messages "
                f"resulted in {len(prompt)} tokens. Please reduce the length of the messages.",
                overflow=(len(prompt), context_length - 1),
            )
        # Asked once more: what follows is not interrupted, up to where the turn has taken its share.
        budget = session.budget.allow(seat, placement)
        params = self._params(
            session.spec.sampling, request.sampling, room if budget is None else min(room, budget)
        )
        if budget is not None:
            seat.tokens = params.max_new_tokens
        if params.seed is not None and not self._router.seeded:
            self._ignore(session, {"seed": _UNSEEDED})
        stops = params.stop
        params = self._chosen(session, request, messages[-1].role if messages else "user", params)
        held = first_missing(parent.length if parent else 0, extension.trim)
        routes_from = held if session.spec.routes else None
        return _Plan(lookup, placement, messages, extension, prompt, params, stops, routes_from)

    def _check_begun(self, request: TurnRequest) -> None:
        """Raises `RequestError` for an answer that cannot be gone on with."""
        assert request.begun is not None
        if request.choice.must or request.sampling.json_schema is not None:
            raise RequestError(
                "An answer that is begun can neither be made to call a tool nor to follow a schema.",
                param="messages[-1]",
            )
        calls, reasoning = self._assets.family.tool_calls, self._assets.family.reasoning
        marks = (calls.begin if calls else "", reasoning.begin if reasoning else "")
        for mark in (*(mark.strip() for mark in marks), reasoning.end.strip() if reasoning else ""):
            if mark and mark in request.begun.content:
                raise RequestError(
                    f"The beginning of an answer cannot hold {mark}: only the model writes it.",
                    param="messages[-1]",
                )

    def _chosen(
        self, session: Session, request: TurnRequest, after: Role, params: SamplingParams
    ) -> SamplingParams:
        """With what makes the answer call tools as the request asks. Raises `RequestError`."""
        choice, renderer = request.choice, self._assets.renderer
        if choice.must:
            if params.json_schema is not None:
                raise RequestError(
                    f"An answer cannot both call a tool and follow {request.schema_field}.",
                    param="tool_choice",
                )
            single = bool(choice.single)
            tag = forced_calls(renderer, request.prefix, after=after, names=choice.must, single=single)
            if tag is None:
                raise RequestError(
                    f"A call cannot be forced in the {self._assets.family.name} format: set tool_choice to "
                    "auto or none.",
                    param="tool_choice",
                )
            return replace(params, structural_tag=tag)
        if choice.may and choice.single:
            stops = one_call_stops(renderer, request.prefix, after)
            if stops is None:
                self._ignore(session, {choice.single: _SHARED_BLOCK})
            return replace(params, stop=(*params.stop, *(stops or ())))
        return params

    def _params(self, forced: Sampling, asked: Sampling, most: int) -> SamplingParams:
        options = {**asked.model_dump(exclude_none=True), **forced.model_dump(exclude_none=True)}
        return SamplingParams(
            max_new_tokens=min(most, options.pop("max_tokens", most)),
            stop_token_ids=tuple(sorted(self._assets.stop_ids)),
            **options,
        )

    async def _sample(
        self, session: Session, request: TurnRequest, plan: _Plan, started: float
    ) -> AsyncGenerator[Item]:
        yield Planned(len(plan.prompt))
        try:
            engine = await self._router.choose(session.id)
        except EngineError as error:
            raise _engine_failure(error) from error
        parser = AnswerParser(
            self._assets.family,
            self._assets.tokenizer,
            stop_ids=self._assets.stop_ids,
            stops=plan.stops,
            opened=plan.extension.opened,
            calls=request.choice.may,
            tools=request.prefix.tools,
        )
        known = len(request.begun.content) if request.begun else 0  # characters of content
        _, known = _told(parser.begin(plan.extension.begun), known)
        output, logprobs = token_array(()), logprob_array(())
        finish: Finish | None = None
        queued = time.monotonic()
        first = 0.0
        rid = uuid.uuid4().hex
        try:
            async with aclosing(
                engine.generate(
                    plan.prompt, plan.params, rid=rid, stream=request.stream, routes_from=plan.routes_from
                )
            ) as chunks:
                async for chunk in chunks:
                    self._check(chunk)
                    first = first or time.monotonic()
                    output.extend(chunk.output_ids)
                    logprobs.extend(chunk.logprobs)
                    finish = chunk.finish or finish
                    for at in range(0, len(chunk.output_ids), _MOST_AT_ONCE):
                        if at:
                            await asyncio.sleep(0)
                        ids = chunk.output_ids[at : at + _MOST_AT_ONCE]
                        events, known = _told(parser.push(ids), known)
                        yield Delta(events, ids, chunk.logprobs[at : at + _MOST_AT_ONCE])
        except EngineError as error:
            raise _grammar_refusal(error, request, plan.params) or _engine_failure(error) from error
        except (asyncio.CancelledError, GeneratorExit):
            session.diagnostics.aborted += 1
            raise
        if finish is None or finish.reason == "abort":
            raise _engine_failure(EngineError("the engine ended the generation before it was complete"))
        yield Delta(_told(parser.finish(), known)[0], (), ())
        done = time.monotonic()
        ours = plan.params.stop[len(plan.stops) :]
        generation = Generation(
            trim=plan.extension.trim,
            prompt_ids=token_array(plan.extension.prompt_ids),
            output_ids=output,
            logprobs=logprobs,
            spans=finish.version_spans,
            finish=finish.reason,
            stop=finish.matched_stop if finish.matched_stop not in ours else None,
            engine=engine.url,
            cached_tokens=finish.cached_tokens,
            routes=self._packed(plan, finish, len(output)),
            unpaired=0 if plan.routes_from is None else finish.unpaired,
            timings=Timings(queued - started, (first or done) - queued, done - started),
        )
        yield Committed(self._commit(session, request, plan, parser.message(), generation))

    def _check(self, chunk: Chunk) -> None:
        """Raises `EngineError` for tokens that no model of this vocabulary has sampled."""
        if len(chunk.logprobs) != len(chunk.output_ids):
            raise EngineError("the engine gave tokens without log-probs")
        if max(chunk.output_ids, default=0) >= self._vocabulary:
            raise EngineError(f"the engine gave tokens beyond the model's vocabulary of {self._vocabulary}")

    def _packed(self, plan: _Plan, finish: Finish, sampled: int) -> bytes | None:
        """The expert routes that the turn adds, where the session keeps them. Raises `RequestError`."""
        if plan.routes_from is None:
            return None
        try:
            if self.route_shape is None:
                raise ValueError("config.json describes no experts")
            if finish.routes is None:
                raise ValueError("none came: start the engine with --enable-return-routed-experts")
            return self.route_shape.pack(finish.routes, len(plan.prompt) + sampled - 1 - plan.routes_from)
        except ValueError as error:
            raise RequestError(
                f"The session keeps expert routes, but the engine's are no good: {error}.",
                status=502,
                code="routes_missing",
            ) from error

    def _commit(
        self,
        session: Session,
        request: TurnRequest,
        plan: _Plan,
        answer: Message,
        generation: Generation,
    ) -> Node:
        if session.deleted:
            raise RequestError("The session was deleted.", status=404, code="session_not_found")
        parent, supersedes = plan.placement.parent, plan.placement.supersedes
        node = session.tree.draft(
            parent,
            plan.lookup.prefix,
            plan.messages,
            answer,
            generation,
            supersedes.id if supersedes else None,
            request.receipt,
        )
        replays = _replays(parent, plan.lookup.messages)
        self._store.commit(session, node, replays)
        session.tree.append(node)
        session.attempts.done(node)
        session.texts.keep(node, plan.prompt)
        for earlier, replayed in replays:
            earlier.replayed = replayed
        return node

    def _ignore(self, session: Session, ignored: Mapping[str, str]) -> None:
        """List fields that have no effect, each once in a session."""
        known = session.diagnostics.ignored
        if not ignored.keys() <= known.keys():
            known.update(ignored)
            self._store.note(session)


def _cut(tree: Tree, parent: Node | None, lookup: Lookup, request: TurnRequest) -> Node | None:
    """The turn whose answer, cut by its length, the client gives back to have it gone on with."""
    if request.begun is None:
        return None
    found = [
        node
        for node in tree.answered(lookup.hashes[-1])
        if node.parent is parent and node.generation.finish == "length" and node.answer == request.begun
    ]
    return found[-1] if found else None


def _told(events: list[Event], known: int) -> tuple[list[Event], int]:
    """The events without the first `known` characters of content, which the client gave itself."""
    if not known:
        return events, 0
    kept: list[Event] = []
    for event in events:
        if known and isinstance(event, Content):
            event, known = Content(event.text[known:]), max(0, known - len(event.text))
            if not event.text:
                continue
        kept.append(event)
    return kept, known


def _overruled(forced: Sampling, asked: Sampling) -> dict[str, str]:
    """The sampling options that the client asked for in vain."""
    ours = forced.model_dump(exclude_none=True)
    theirs = asked.model_dump(exclude_none=True)
    return {
        name: f"the session forces {ours[name]}"
        for name in ours
        if theirs.get(name, ours[name]) != ours[name]
    }


def _characters(messages: Sequence[Message], prefix: Prefix | None) -> int:
    """Characters of all that is to be encoded for the first time; `prefix` is that of a new root."""
    spoken = sum(len(message.content) + len(message.reasoning) for message in messages)
    called = sum(len(call.name) + len(call.arguments) for message in messages for call in message.tool_calls)
    return spoken + called + (len(orjson.dumps(prefix.tools)) if prefix and prefix.tools else 0)


def _replays(parent: Node | None, messages: tuple[Message, ...]) -> list[tuple[Node, Message | None]]:
    """How earlier answers came back, where that is news: None where the harness no longer changes one."""
    sent = ((node, messages[node.depth - 1]) for node in path(parent))
    found = [(node, None if message == node.answer else message) for node, message in sent]
    return [(node, replayed) for node, replayed in found if replayed != node.replayed]


def _grammar_refusal(error: EngineError, request: TurnRequest, params: SamplingParams) -> RequestError | None:
    """The refusal of a request whose grammar the engine cannot make; None where that is not what failed."""
    field = "tool_choice" if params.structural_tag else request.schema_field if params.json_schema else None
    if field is None or error.status != 400 or "grammar" not in str(error):
        return None
    return RequestError(
        f"{field}: the engine cannot follow this schema: {error}", code="invalid_json_schema", param=field
    )


def _engine_failure(error: EngineError) -> RequestError:
    if isinstance(error, ContextLengthError):
        return context_exceeded(str(error))
    if error.status is not None and 400 <= error.status < 500:
        return RequestError(f"The engine refused the request: {error}", code="engine_refused")
    retry_after = error.retry_after if isinstance(error, NoEngineError) else 1.0
    return RequestError(
        f"The engine failed: {error}", status=503, code="engine_unavailable", retry_after=retry_after
    )
