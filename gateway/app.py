"""The gateway as an ASGI application: sessions, their model endpoints, and administration."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from titogym.dotted import load
from titogym.errors import UserError
from titogym.gateway import inspection
from titogym.gateway.answering import TurnResponse, error_response
from titogym.gateway.engines.base import Engine
from titogym.gateway.engines.pool import EnginePool
from titogym.gateway.errors import RequestError
from titogym.gateway.protocols import chat
from titogym.gateway.protocols.errors import openai_error
from titogym.gateway.sessions.journal import Journal
from titogym.gateway.sessions.service import TurnService
from titogym.gateway.sessions.session import Session
from titogym.gateway.sessions.spec import parse_spec
from titogym.gateway.sessions.store import SessionStore
from titogym.gateway.settings import GatewaySettings
from titogym.gateway.trajectories import cut, unsuperseded
from titogym.templates.model import ModelAssets, load_model_assets

_SWEEP_SECONDS = 5.0

Endpoint = Callable[[Request], Awaitable[Response]]


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


class Gateway:
    """The parts of one gateway and the endpoints over them."""

    def __init__(self, settings: GatewaySettings, assets: ModelAssets, engines: Sequence[Engine]) -> None:
        self._settings = settings
        self._assets = assets
        self._model = assets.model_dir.name
        self._pool = EnginePool(engines, limit=settings.context_length)
        self._store = SessionStore(
            Journal(settings.journal),
            max_sessions=settings.max_sessions,
            ttl=settings.ttl_seconds,
            idle=settings.idle_seconds,
        )
        self._service = TurnService(assets, self._pool, self._store)
        self._started = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self._admin(self.metrics)),
            Route("/sessions", self._admin(self.create), methods=["POST"]),
            Route("/sessions", self._admin(self.index), methods=["GET"]),
            Route("/sessions/{id}", self._admin(self.inspect), methods=["GET"]),
            Route("/sessions/{id}", self._admin(self.delete), methods=["DELETE"]),
            Route("/sessions/{id}/turns", self._admin(self.turns), methods=["GET"]),
            Route("/sessions/{id}/trajectories", self._admin(self.trajectories), methods=["GET"]),
            *(
                Route(base + path, endpoint, methods=[method])
                for base in ("/sessions/{id}/v1", "/v1")
                for path, endpoint, method in (
                    ("/chat/completions", self.chat_completions, "POST"),
                    ("/completions", self.completions, "POST"),
                    ("/models", self.models, "GET"),
                )
            ),
        ]

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(self._sweep())
        yield
        sweeper.cancel()
        self._store.close()
        await self._pool.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self._store.sweep()

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

    async def health(self, request: Request) -> Response:
        return Json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if await self._pool.ready():
            return Json({"status": "ready", "model": self._model, "family": self._assets.family.name})
        raise RequestError("No engine answers.", status=503, code="engine_unavailable", retry_after=1)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(inspection.metrics(self._store), media_type="text/plain; version=0.0.4")

    async def create(self, request: Request) -> Response:
        spec = parse_spec(await self._json(request, empty={}))
        if spec.family not in (None, self._assets.family.name):
            raise RequestError(
                f"This gateway serves family {self._assets.family.name}, not {spec.family}.", param="family"
            )
        session = self._store.create(spec)
        root = (self._settings.public_url or str(request.base_url)).rstrip("/")
        answer = {"id": session.id, "base_url": f"{root}/sessions/{session.id}/v1", "api_key": session.id}
        return Json(answer, 201)

    async def index(self, request: Request) -> Response:
        return Json({"sessions": [inspection.listed(record) for record in self._store.records()]})

    async def inspect(self, request: Request) -> Response:
        session = self._store.get(request.path_params["id"])
        return Json(await asyncio.to_thread(inspection.report, session, self._assets))

    async def turns(self, request: Request) -> Response:
        return Json({"turns": inspection.turns(self._store.get(request.path_params["id"]))})

    async def trajectories(self, request: Request) -> Response:
        session = self._store.get(request.path_params["id"])
        path = request.query_params.get("picker")
        try:
            picker = load(path, "picker") if path else unsuperseded
            found = cut(session.id, session.tree, picker)
        except UserError as error:
            raise RequestError(str(error), param="picker") from error
        answer: dict[str, Any] = {"trajectories": found}
        if request.query_params.get("texts"):
            decode = self._assets.tokenizer.decode
            answer["texts"] = [[decode([token]) for token in trajectory.tokens] for trajectory in found]
        return Json(answer)

    async def delete(self, request: Request) -> Response:
        self._store.delete(request.path_params["id"])
        return Response(status_code=204)

    # --- the model, as a session sees it ----------------------------------------------------------

    async def chat_completions(self, request: Request) -> Response:
        body = await self._json(request)
        session = self._session(request)
        try:
            asked = chat.parse(body, self._assets.family, self._model)
        except RequestError as error:
            session.diagnostics.failed(error)
            raise
        return TurnResponse(
            self._service.turn(session, asked.turn),
            chat.ChatReply(asked, self._assets.tokenizer),
            session,
            stream=asked.turn.stream,
            error_body=openai_error,
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
        model = {"id": self._model, "object": "model", "created": self._started, "owned_by": "titogym"}
        return Json({"object": "list", "data": [model]})

    def _session(self, request: Request) -> Session:
        """The session that the path or the API key names: there is no default one."""
        id = request.path_params.get("id") or _bearer(request)
        if not id:
            raise RequestError(
                "Name a session: create one with POST /sessions, then use its base_url or its api_key.",
                status=401,
                code="session_required",
            )
        return self._store.get(id)

    async def _json(self, request: Request, empty: Any = None) -> Any:
        most = self._settings.max_body_bytes
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                raise RequestError(
                    f"The request body is larger than {most} bytes.", status=413, code="too_large"
                )
        if not body and empty is not None:
            return empty
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"The request body is not JSON: {error}.") from None


def create_app(settings: GatewaySettings) -> Starlette:
    """The application for `settings`. Raises `UserError` for what cannot be served."""
    from titogym.gateway.engines.sglang import SGLangEngine

    assets = load_model_assets(settings.model_dir, settings.family)
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


def _bearer(request: Request) -> str:
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else ""


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, openai_error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = f"{request.method} {request.url.path}: {error.detail}"
    refusal = RequestError(detail, status=error.status_code, code="no_such_endpoint")
    return error_response(refusal, openai_error)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _failed(request: Request, error: Exception) -> Response:
    failure = RequestError("The gateway failed; its log has the details.", status=500, code="internal_error")
    return error_response(failure, openai_error)
