"""The gateway as an ASGI application: sessions, their model endpoints, and administration."""

import asyncio
import hmac
import logging
import sqlite3
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from hashlib import blake2b
from importlib.metadata import version
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from titogym.dotted import load
from titogym.errors import UserError
from titogym.gateway import inspection, openapi
from titogym.gateway.answering import TurnResponse, error_response
from titogym.gateway.comparing import LeafCounter
from titogym.gateway.engines.base import Engine
from titogym.gateway.engines.pool import EnginePool
from titogym.gateway.errors import RequestError
from titogym.gateway.protocols import chat, messages, responses
from titogym.gateway.protocols.base import Context, WireProtocol
from titogym.gateway.protocols.errors import anthropic_error, openai_error
from titogym.gateway.sessions.journal import Journal, hold
from titogym.gateway.sessions.service import TurnService
from titogym.gateway.sessions.session import Session
from titogym.gateway.sessions.spec import parse_spec
from titogym.gateway.sessions.store import SessionStore
from titogym.gateway.sessions.turn import Committed
from titogym.gateway.settings import GatewaySettings
from titogym.gateway.telemetry import Telemetry
from titogym.gateway.trajectories import cut, unsuperseded
from titogym.gateway.viewer.routes import Viewer
from titogym.templates.model import ModelAssets, check_vocabulary, load_model_assets

_LOG = logging.getLogger("titogym.gateway")
_SWEEP_SECONDS = 5.0
SESSION_HEADER = "x-titogym-session"

Endpoint = Callable[[Request], Awaitable[Response]]


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, default=_base64)


def _base64(data: Any) -> str:
    """How bytes stand in JSON."""
    if isinstance(data, bytes):
        return b64encode(data).decode()
    raise TypeError


class Gateway:
    """The parts of one gateway and the endpoints over them."""

    def __init__(self, settings: GatewaySettings, assets: ModelAssets, engines: Sequence[Engine]) -> None:
        self._settings = settings
        self._assets = assets
        self._model = assets.model_dir.name
        self._pool = EnginePool(engines, limit=settings.context_length)
        self._telemetry = Telemetry()
        self._held = hold(settings.journal) if settings.journal else None
        self._leaves = LeafCounter(assets, self._telemetry)
        self._store = SessionStore(
            Journal(settings.journal),
            self._telemetry,
            max_sessions=settings.max_sessions,
            max_turns=settings.max_turns,
            max_bytes=settings.max_bytes,
            ttl=settings.ttl_seconds,
            idle=settings.idle_seconds,
            departing=self._leaves.add,
        )
        self._service = TurnService(assets, self._pool, self._store)
        self._viewer = Viewer(self._store, assets)
        self._started = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/openapi.json", self.openapi),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self._admin(self.metrics)),
            Route("/engines", self._admin(self.engines), methods=["GET"]),
            Route("/engines", self._admin(self.drain), methods=["POST"]),
            Route("/sessions", self._admin(self.create), methods=["POST"]),
            Route("/sessions", self._admin(self.index), methods=["GET"]),
            Route("/sessions/{id}", self._admin(self.inspect), methods=["GET"]),
            Route("/sessions/{id}", self._admin(self.delete), methods=["DELETE"]),
            Route("/sessions/{id}/turns", self._admin(self.turns), methods=["GET"]),
            Route("/sessions/{id}/trajectories", self._admin(self.trajectories), methods=["GET"]),
            *self._viewer.routes(self._admin),
            *(
                Route(base + path, endpoint, methods=[method])
                for base in ("/sessions/{id}/v1", "/v1")
                for path, endpoint, method in (
                    ("/chat/completions", self._turn(chat.PROTOCOL), "POST"),
                    ("/messages", self._turn(messages.PROTOCOL), "POST"),
                    ("/messages/count_tokens", self._count(messages.PROTOCOL, _input_tokens), "POST"),
                    ("/responses", self._turn(responses.PROTOCOL), "POST"),
                    ("/responses/input_tokens", self._count(responses.PROTOCOL, _response_tokens), "POST"),
                    ("/responses/{response}", self.response, "GET"),
                    ("/responses/{response}", self.delete_response, "DELETE"),
                    ("/responses/{response}/input_items", self.response_items, "GET"),
                    ("/completions", self.completions, "POST"),
                    ("/models", self.models, "GET"),
                    ("/models/{model:path}", self.model, "GET"),
                )
            ),
        ]

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        background = [
            asyncio.create_task(self._sweep()),
            asyncio.create_task(self._leaves.run()),
            # It takes a second or more, in which turns are served already.
            asyncio.create_task(asyncio.to_thread(self._assets.tokenizer.accelerate)),
        ]
        try:
            yield
        finally:
            for task in background:
                task.cancel()
            self._store.close()
            if self._held is not None:
                self._held.close()
            await self._pool.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            try:
                self._store.sweep()
                await asyncio.to_thread(self._store.checkpoint)
            except (RequestError, sqlite3.Error) as error:  # the disk is full, say: it may pass
                _LOG.error("sweep_failed", extra={"fields": {"message": str(error)}})
            self._telemetry.engines(self._pool.statuses())

    # --- administration ---------------------------------------------------------------------------

    def _admin(self, endpoint: Endpoint) -> Endpoint:
        async def guarded(request: Request) -> Response:
            key = self._settings.admin_key
            if key is not None and not hmac.compare_digest(_bearer(request).encode(), key.encode()):
                raise RequestError(
                    "This needs the gateway's admin key as a bearer token.",
                    status=401,
                    code="invalid_admin_key",
                )
            return await endpoint(request)

        return guarded

    async def openapi(self, request: Request) -> Response:
        return Json(openapi.document(version("titogym")))

    async def health(self, request: Request) -> Response:
        return Json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if await self._pool.ready():
            return Json({"status": "ready", "model": self._model, "family": self._assets.family.name})
        raise RequestError("No engine takes requests.", status=503, code="engine_unavailable", retry_after=1)

    async def metrics(self, request: Request) -> Response:
        text = self._telemetry.render(inspection.gauges(self._store), self._pool.statuses())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def engines(self, request: Request) -> Response:
        return Json({"engines": self._pool.statuses()})

    async def drain(self, request: Request) -> Response:
        """Give one engine no new requests (`draining` true), or give it some again."""
        asked = _json(await self._body(request))
        if not isinstance(asked, dict) or not isinstance(asked.get("url"), str):
            raise RequestError('Name the engine: {"url": ..., "draining": true or false}.', param="url")
        draining = asked.get("draining")
        if not isinstance(draining, bool):
            raise RequestError("draining must be true or false.", param="draining")
        status = self._pool.drain(asked["url"], draining)
        if status is None:
            raise RequestError(f"There is no engine {asked['url']}.", status=404, code="engine_not_found")
        return Json(status)

    async def create(self, request: Request) -> Response:
        body = await self._body(request)
        spec = parse_spec(_json(body) if body else {})
        if spec.family not in (None, self._assets.family.name):
            raise RequestError(
                f"This gateway serves family {self._assets.family.name}, not {spec.family}.", param="family"
            )
        if spec.routes and self._service.route_shape is None:
            raise RequestError(
                f"routes: {self._model} has no experts whose routes could be kept; leave it out.",
                param="routes",
            )
        session = self._store.create(spec)
        root = (self._settings.public_url or str(request.base_url)).rstrip("/")
        home = f"{root}/sessions/{session.id}"
        answer = {
            "id": session.id,
            "base_url": f"{home}/v1",
            "anthropic_base_url": home,
            "api_key": session.id,
        }
        return Json(answer, 201)

    async def index(self, request: Request) -> Response:
        return Json({"sessions": [inspection.listed(record) for record in self._store.records()]})

    async def inspect(self, request: Request) -> Response:
        session = self._store.get(request.path_params["id"])
        if request.query_params.get("brief"):
            return Json(inspection.overview(session))
        return Json(await asyncio.to_thread(inspection.report, session, self._assets))

    async def turns(self, request: Request) -> Response:
        return Json({"turns": inspection.turns(self._store.get(request.path_params["id"]))})

    async def trajectories(self, request: Request) -> Response:
        session = self._store.get(request.path_params["id"])
        path = request.query_params.get("picker")
        try:
            picker = load(path, "picker") if path else unsuperseded
            shape = self._service.route_shape if session.spec.routes else None
            found = cut(session.id, session.tree, picker, shape)
        except UserError as error:
            raise RequestError(str(error), param="picker") from error
        self._leaves.add(session)
        answer: dict[str, Any] = {"trajectories": found}
        if request.query_params.get("texts"):
            decode = self._assets.tokenizer.decode
            answer["texts"] = [[decode([token]) for token in trajectory.tokens] for trajectory in found]
        return Json(answer)

    async def delete(self, request: Request) -> Response:
        self._store.delete(request.path_params["id"])
        return Response(status_code=204)

    # --- the model, as a session sees it ----------------------------------------------------------

    def _turn(self, protocol: WireProtocol) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            self._store.check(_session_id(request))  # before a body is read for nobody
            body = await self._body(request)
            session = self._session(request)
            try:
                asked = protocol.parse(_json(body), self._context(request, session, protocol, body))
                items, receipt = self._service.board(session, asked.turn, _retried(request))
            except RequestError as error:
                self._store.failed(session, error)
                raise
            reply = asked.reply(self._assets.tokenizer, receipt)
            return TurnResponse(
                items, reply, stream=asked.turn.stream, error_body=protocol.error_body, session=session.id
            )

        return endpoint

    def _count(self, protocol: WireProtocol, answer: Callable[[int], dict[str, Any]]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            self._store.check(_session_id(request))
            body = _json(await self._body(request))
            session = self._session(request)
            if isinstance(body, dict):
                body = {"max_tokens": 1, **body}  # where a turn must say it, a count need not
            asked = protocol.parse(body, self._context(request, session, protocol, b""))
            return Json(answer(await self._service.count(session, asked.turn)))

        return endpoint

    def _context(self, request: Request, session: Session, protocol: WireProtocol, body: bytes) -> Context:
        return Context(
            family=self._assets.family,
            model=self._model,
            tree=session.tree,
            digest=blake2b(body, digest_size=16, person=protocol.name.encode()).hexdigest(),
            key=request.headers.get("idempotency-key", ""),
            headers=request.headers,
        )

    async def response(self, request: Request) -> Response:
        node = responses.stored(self._session(request).tree, request.path_params["response"])
        if request.query_params.get("stream") == "true":
            raise RequestError("A stored response is not streamed again: leave stream out.", param="stream")
        return Json(orjson.Fragment(responses.retrieved(node, self._assets.tokenizer).whole(Committed(node))))

    async def response_items(self, request: Request) -> Response:
        node = responses.stored(self._session(request).tree, request.path_params["response"])
        return Json(responses.items_page(node, request.query_params))

    async def delete_response(self, request: Request) -> Response:
        responses.stored(self._session(request).tree, request.path_params["response"])
        raise RequestError(
            "A session keeps every turn: delete the session as a whole.", status=405, code="not_deletable"
        )

    async def completions(self, request: Request) -> Response:
        self._session(request)
        raise RequestError(
            "Text completions bypass the chat template: use /v1/chat/completions.",
            status=404,
            code="unsupported_endpoint",
        )

    async def models(self, request: Request) -> Response:
        self._session(request)
        listed = [self._described(request)]
        if _of_anthropic(request):
            return Json({"data": listed, "has_more": False, "first_id": self._model, "last_id": self._model})
        return Json({"object": "list", "data": listed})

    async def model(self, request: Request) -> Response:
        self._session(request)
        if request.path_params["model"] != self._model:
            raise RequestError(
                f"This gateway serves {self._model} alone.", status=404, code="model_not_found", param="model"
            )
        return Json(self._described(request))

    def _described(self, request: Request) -> dict[str, Any]:
        if _of_anthropic(request):
            created = datetime.fromtimestamp(self._started, UTC).isoformat().replace("+00:00", "Z")
            return {"type": "model", "id": self._model, "display_name": self._model, "created_at": created}
        return {"id": self._model, "object": "model", "created": self._started, "owned_by": "titogym"}

    def _session(self, request: Request) -> Session:
        return self._store.get(_session_id(request))

    async def _body(self, request: Request) -> bytes:
        most = self._settings.max_body_bytes
        said = request.headers.get("content-length", "")
        if said.isdecimal() and int(said[:20]) > most:
            raise RequestError(f"The request body is larger than {most} bytes.", status=413, code="too_large")
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                raise RequestError(
                    f"The request body is larger than {most} bytes.", status=413, code="too_large"
                )
        return bytes(body)


def create_app(settings: GatewaySettings) -> Starlette:
    """The application for `settings`. Raises `UserError` for what cannot be served."""
    from titogym.gateway.engines.sglang import SGLangEngine

    assets = load_model_assets(settings.model_dir, settings.family)
    check_vocabulary(settings.model_dir, assets.tokenizer)
    return application(settings, assets, [SGLangEngine(url) for url in settings.engines])


def application(settings: GatewaySettings, assets: ModelAssets, engines: Sequence[Engine]) -> Starlette:
    """The application over engines of any kind."""
    gateway = Gateway(settings, assets, engines)
    return Starlette(
        routes=gateway.routes(),
        lifespan=gateway.lifespan,
        exception_handlers={
            RequestError: _refused,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            Exception: _failed,
        },
    )


def _json(body: bytes) -> Any:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The request body is not JSON: {error}.") from None
    try:  # what can be read need not be as shallow as what can be written: to the journal, or to an engine
        orjson.dumps(_deeper(value))
    except orjson.JSONEncodeError:
        raise RequestError("The request body is nested too deeply.") from None
    return value


def _deeper(value: Any) -> Any:
    """The value inside more lists than the gateway ever puts around a part of a request."""
    for _ in range(16):
        value = [value]
    return value


def _session_id(request: Request) -> str:
    """The session that the path, the header or the API key names: there is no default one.

    Raises `RequestError` where none does, and where one place names two: no guess could be right.
    """
    if id := request.path_params.get("id"):
        return str(id)
    for name, read in ((SESSION_HEADER, str), ("x-api-key", str), ("authorization", _bearer_token)):
        named = {read(value) for value in request.headers.getlist(name)}
        if len(named) > 1:
            raise RequestError(
                f"The header {name} names several sessions: send it once.",
                status=400,
                code="session_ambiguous",
            )
        if named == {""} and name == SESSION_HEADER:
            raise RequestError(f"The header {name} is empty.", status=401, code="session_required")
        if named and named != {""}:
            return named.pop()
    raise RequestError(
        "Name a session: create one with POST /sessions, then use its base_url, its api_key, or the "
        f"header {SESSION_HEADER}.",
        status=401,
        code="session_required",
    )


def _input_tokens(count: int) -> dict[str, Any]:
    return {"input_tokens": count}


def _response_tokens(count: int) -> dict[str, Any]:
    return {"object": "response.input_tokens", "input_tokens": count}


def _retried(request: Request) -> bool:
    """Whether the client's SDK says that it sends this request once more."""
    count = request.headers.get("x-stainless-retry-count", "")
    return count.isdecimal() and count.strip("0") != ""


def _bearer(request: Request) -> str:
    return _bearer_token(request.headers.get("authorization", ""))


def _bearer_token(authorization: str) -> str:
    scheme, _, value = authorization.partition(" ")
    return value.strip() if scheme.lower() == "bearer" else ""


def _of_anthropic(request: Request) -> bool:
    """Whether the client speaks Anthropic's protocol."""
    return "anthropic-version" in request.headers or "/v1/messages" in request.url.path


def _error(request: Request, error: RequestError) -> Response:
    return error_response(error, anthropic_error if _of_anthropic(request) else openai_error)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _error(request, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = f"{request.method} {request.url.path}: {error.detail}"
    refusal = RequestError(detail, status=error.status_code, code="no_such_endpoint")
    return _error(request, refusal)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _failed(request: Request, error: Exception) -> Response:
    failure = RequestError("The gateway failed; its log has the details.", status=500, code="internal_error")
    return _error(request, failure)
