"""`titogym serve`: the gateway in this process."""

import asyncio
import gc
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from titogym.errors import UserError
from titogym.gateway.settings import GatewaySettings
from titogym.venvs import home


def command(
    engine: Annotated[list[str], typer.Option(help="Base URL of an SGLang server; repeat for several.")],
    model_dir: Annotated[Path, typer.Option(help="Model folder with tokenizer.json (weights are not read).")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 lets the system choose.")
    ] = 8080,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback need --admin-key.")
    ] = "127.0.0.1",
    family: Annotated[
        str | None, typer.Option(help="Template family; default: recognised from the folder.")
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(envvar="TITOGYM_ADMIN_KEY", help="Key of the admin routes: 8 characters or more."),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            help="SQLite file that keeps sessions over a restart.  [default: one per port in titogym's "
            "cache; with --port 0 none]"
        ),
    ] = None,
    public_url: Annotated[
        str | None, typer.Option(help="Base URL by which agents reach this gateway.")
    ] = None,
    context_length: Annotated[
        int | None, typer.Option(help="Cap on the engines' context length (tokens).")
    ] = None,
    max_sessions: Annotated[int, typer.Option(help="Most sessions held at once.")] = 16384,
    max_turns: Annotated[int, typer.Option(help="Most turns held of one session.")] = 10_000,
    max_bytes: Annotated[int, typer.Option(help="Most memory of all sessions in use.")] = 8 << 30,
    log_level: Annotated[
        str, typer.Option(help="What goes to the log (stderr, JSON lines): debug, info, warning or error.")
    ] = "info",
    ttl: Annotated[float, typer.Option(help="Seconds after which an unused session is deleted.")] = 86400.0,
) -> None:
    """Serve an OpenAI-compatible API that keeps the exact tokens of every session."""
    # Texts are tokenised one by one: handing each to a pool of threads only costs time. Set ahead of import.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import uvicorn

    from titogym.gateway.app import create_app
    from titogym.gateway.telemetry import log_to_stderr

    listener = _listen(host, port)
    if port:
        journal = journal or home() / "gateway" / f"journal-{port}.sqlite"
    port = listener.getsockname()[1]
    try:
        settings = GatewaySettings(
            engines=tuple(engine),
            model_dir=model_dir,
            port=port,
            host=host,
            family=family,
            admin_key=admin_key,
            journal=journal,
            public_url=public_url,
            context_length=context_length,
            max_sessions=max_sessions,
            max_turns=max_turns,
            max_bytes=max_bytes,
            log_level=log_level,  # type: ignore[arg-type]  # checked by the model
            ttl_seconds=ttl,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"{'.'.join(map(str, first['loc']))} {first['msg']}".strip()) from None
    app = create_app(settings)
    log_to_stderr(settings.log_level)
    gc.collect()
    gc.freeze()  # what is loaded by now stays: the collector need not look at it again
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        # Longer than any client keeps an idle connection, so that none sends into one that we just closed.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=3,
    )
    typer.echo(f"Gateway at http://{host}:{port}, sessions in {settings.journal or 'a temporary file'}")
    for url in asyncio.run(_silent(settings.engines)):
        typer.echo(f"Warning: engine {url} does not answer; turns get 503 while no engine does.", err=True)
    uvicorn.Server(config).run(sockets=[listener])


async def _silent(urls: Sequence[str]) -> list[str]:
    """The engines that do not answer now."""
    from titogym.gateway.engines.sglang import SGLangEngine

    engines = [SGLangEngine(url) for url in urls]
    looks = [asyncio.create_task(engine.healthy()) for engine in engines]
    await asyncio.wait(looks, timeout=1.0)
    silent = [url for url, look in zip(urls, looks, strict=True) if not (look.done() and look.result())]
    for look, engine in zip(looks, engines, strict=True):
        look.cancel()
        await engine.close()
    return silent


def _listen(host: str, port: int) -> socket.socket:
    # The protocol is named so that asyncio knows TCP and turns Nagle's algorithm off: with it on, an answer's
    # body waits up to 40 ms for the client to acknowledge its headers.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # From here on a client waits until it is served, in place of being refused.
        listener.listen(2048)
    except OSError as error:
        raise UserError(
            f"Cannot listen on {host}:{port}: {error.strerror}; choose another --port."
        ) from error
    return listener
