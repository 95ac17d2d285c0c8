"""The live page of a run: its figures as they come, its trajectories token by token, Prometheus metrics.

It reads the run directory alone, so it shows a run of another process, or one that has ended, just as well.
What models wrote reaches the page as escaped text, and its content security policy allows no script but its
own.
"""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from titogym.errors import UserError
from titogym.trainer.pages import report, view
from titogym.trainer.runs.directory import RunDirectory
from titogym.trainer.runs.metrics import MEANINGS
from titogym.trainer.runs.trackers import prometheus_text

HOST = "127.0.0.1"
_PLACE = re.compile(r"[a-z]+-\d+/\d{1,9}")
_FILES = {"/style.css": "text/css", "/live.js": "text/javascript"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def application(run: RunDirectory) -> Starlette:
    """The page and its parts. Its endpoints run in threads: they read files."""

    listing = view.Listing(run)

    def page(request: Request) -> Response:
        return _html("live.html.jinja", _now(run, listing))

    def now(request: Request) -> Response:
        return _html("now.html.jinja", _now(run, listing))

    def trajectory(request: Request) -> Response:
        place = request.path_params["place"]
        record = run.trajectory(place) if _PLACE.fullmatch(place) else None
        if record is None:
            return PlainTextResponse(f"The run keeps no trajectory {place}.\n", 404)
        return _html(
            "trajectory.html.jinja", {"name": view.name_of(run), "t": view.trajectory(place, record)}
        )

    def metrics(request: Request) -> Response:
        steps, scores = run.metrics(), [done["score"] for done in run.evaluations()]
        last = {**steps[-1], "eval/score": scores[-1] if scores else None} if steps else None
        return PlainTextResponse(prometheus_text(last, MEANINGS), media_type="text/plain; version=0.0.4")

    def file(request: Request) -> Response:
        path = request.url.path
        body = view.PAGES.get_template(path[1:]).render()
        return Response(body, headers=_HEADERS, media_type=_FILES[path])

    def user_error(request: Request, error: Exception) -> Response:
        return PlainTextResponse(f"{error}\n", 500)

    return Starlette(
        routes=[
            Route("/", page),
            Route("/now", now),
            Route("/trajectories/{place:path}", trajectory),
            Route("/metrics", metrics),
            *(Route(path, file) for path in _FILES),
        ],
        # A foreign site whose name resolves to this address must not read the run.
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])],
        exception_handlers={UserError: user_error},
    )


@contextmanager
def serving(run: RunDirectory, port: int) -> Iterator[str]:
    """Serve the page of `run` on 127.0.0.1 while the block runs; gives its URL.

    `port` 0 takes a free one. Raises `UserError` when the port is taken.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise UserError(f"Port {port} of {HOST} cannot be used: {error.strerror}. Choose another.") from None
    settings = uvicorn.Config(application(run), log_level="error", lifespan="off")
    server = uvicorn.Server(settings)
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, name="live-page", daemon=True
    )
    thread.start()
    try:
        yield f"http://{HOST}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(5)


def _now(run: RunDirectory, listing: view.Listing) -> dict[str, object]:
    summary, steps = report.summarise(run), run.metrics()
    return {
        **view.figures(run),
        "name": view.name_of(run),
        "lead": report.lead(summary),
        "tiles": list(report.tiles(summary)),
        "status": run.status(),
        "last": steps[-1] if steps else None,
        "trajectories": listing.latest(),
    }


def _html(template: str, values: dict[str, object]) -> Response:
    return HTMLResponse(view.PAGES.get_template(template).render(values), headers=_HEADERS)
