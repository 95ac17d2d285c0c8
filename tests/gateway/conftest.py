"""A real gateway over HTTP in front of a scripted engine."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.doubles.scripted_engine import ScriptedEngine
from tests.templates.models import write_model_dir
from titogym.gateway.app import create_app
from titogym.gateway.settings import GatewaySettings
from titogym.templates.families import QUICKSTART, QWEN3, SMOLLM2
from titogym.templates.families.qwen3_5 import QWEN3_5
from titogym.templates.model import ModelAssets, load_model_assets

FAMILIES = {family.name: family for family in (QUICKSTART, QWEN3, QWEN3_5, SMOLLM2)}


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder per kind of tool-call format and reasoning, with a small tokenizer of our own."""
    root = tmp_path_factory.mktemp("models")
    return {name: write_model_dir(root / name, family) for name, family in FAMILIES.items()}


@pytest.fixture(scope="session")
def assets(model_dirs: dict[str, Path]) -> ModelAssets:
    return load_model_assets(model_dirs["qwen3"])


class Served:
    """An ASGI application on a loopback port, in a thread of its own."""

    def __init__(self, app: Any, port: int = 0) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(256)
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            app, log_level="warning", lifespan="on", timeout_graceful_shutdown=1, timeout_keep_alive=75
        )
        self._server = uvicorn.Server(config)
        run = self._server.serve
        self._thread = threading.Thread(target=lambda: asyncio.run(run([listener])), daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)


class Stand:
    """An engine whose next answers a test writes, and the gateway before it."""

    def __init__(self, settings: GatewaySettings, engine: ScriptedEngine, assets: ModelAssets) -> None:
        self.settings = settings
        self.engine = engine
        self.assets = assets
        self._gateway = Served(create_app(settings))
        self.url = f"http://127.0.0.1:{self._gateway.port}"

    def restart(self) -> None:
        """Another gateway on the same port and journal."""
        self._gateway.stop()
        self._gateway = Served(create_app(self.settings), self._gateway.port)

    def stop(self) -> None:
        self._gateway.stop()
        self.engine.stop()


Serve = Callable[..., Stand]


@contextmanager
def serving(model_dirs: dict[str, Path]) -> Iterator[Serve]:
    """Starts a stand: `serve(answers, family=..., engine={...}, **settings)`.

    The engine gives the answers in order, the last one again and again; each ends with the stop token
    unless it ends with "…" (then it is cut, as by length). A function answers by itself.
    """
    stands: list[Stand] = []

    def start(
        answers: list[str] | Callable[[list[int]], str],
        *,
        family: str = "qwen3",
        engine: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Stand:
        assets = load_model_assets(model_dirs[family])
        queue = [] if callable(answers) else list(answers)

        def script(prompt: list[int], params: dict[str, Any]) -> list[int]:
            text = answers(prompt) if callable(answers) else queue.pop(0) if len(queue) > 1 else queue[0]
            cut = text.endswith("…")
            return assets.tokenizer.encode(text.removesuffix("…") + ("" if cut else "<|im_end|>"))

        double = ScriptedEngine(script, tokenizer=assets.tokenizer, **(engine or {}))
        double.start()
        made = GatewaySettings(engines=(double.url,), model_dir=model_dirs[family], **settings)
        stands.append(Stand(made, double, assets))
        return stands[-1]

    try:
        yield start
    finally:
        for stand in stands:
            stand.stop()


@pytest.fixture
def serve(model_dirs: dict[str, Path]) -> Iterator[Serve]:
    with serving(model_dirs) as start:
        yield start


@pytest.fixture(scope="module")
def module_serve(model_dirs: dict[str, Path]) -> Iterator[Serve]:
    """Stands for all tests of a module."""
    with serving(model_dirs) as start:
        yield start
