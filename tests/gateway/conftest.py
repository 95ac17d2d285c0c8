"""A real gateway over HTTP in front of a scripted engine."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.doubles.scripted_engine import ScriptedEngine
from tests.templates.models import write_model_dir
from titogym.gateway.app import create_app
from titogym.gateway.settings import GatewaySettings
from titogym.templates.families import BUILT_IN
from titogym.templates.model import ModelAssets, load_model_assets

FAMILIES = {family.name: family for family in BUILT_IN}


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder per built-in family, with a small tokenizer of our own."""
    root = tmp_path_factory.mktemp("models")
    return {name: write_model_dir(root / name, family) for name, family in FAMILIES.items()}


@pytest.fixture(scope="session")
def assets(model_dirs: dict[str, Path]) -> ModelAssets:
    return load_model_assets(model_dirs["qwen3"])


class Served:
    """An ASGI application on a loopback port, in a thread of its own."""

    def __init__(self, app: Any) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(256)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        run = self._server.serve
        self._thread = threading.Thread(target=lambda: asyncio.run(run([listener])), daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)


@dataclass
class Stand:
    """An engine whose next answers a test writes, and the gateway before it."""

    url: str
    engine: ScriptedEngine
    assets: ModelAssets
    answers: list[str]


Serve = Callable[..., Stand]


@pytest.fixture
def serve(model_dirs: dict[str, Path]) -> Iterator[Serve]:
    """Starts a stand: `serve(answers, family=..., engine={...}, **settings)`.

    The engine gives the answers in order, the last one again and again; each ends with the stop token
    unless it ends with "…" (then it is cut, as by length).
    """
    stops: list[Callable[[], None]] = []

    def start(
        answers: list[str], *, family: str = "qwen3", engine: dict[str, Any] | None = None, **settings: Any
    ) -> Stand:
        assets = load_model_assets(model_dirs[family])
        queue = list(answers)

        def script(prompt: list[int], params: dict[str, Any]) -> list[int]:
            text = queue.pop(0) if len(queue) > 1 else queue[0]
            cut = text.endswith("…")
            return assets.tokenizer.encode(text.removesuffix("…") + ("" if cut else "<|im_end|>"))

        double = ScriptedEngine(script, tokenizer=assets.tokenizer, **(engine or {}))
        double.start()
        stops.append(double.stop)
        gateway = Served(
            create_app(GatewaySettings(engines=(double.url,), model_dir=model_dirs[family], **settings))
        )
        stops.append(gateway.stop)
        return Stand(gateway.url, double, assets, queue)

    yield start
    for stop in reversed(stops):
        stop()
