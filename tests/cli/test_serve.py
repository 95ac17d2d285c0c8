import asyncio
import json
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from tests.doubles.scripted_engine import ScriptedEngine
from tests.templates.models import write_model_dir
from titogym.cli.main import app
from titogym.cli.serve import _listen
from titogym.errors import UserError
from titogym.templates.families import QWEN3


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("model"), QWEN3)


@contextmanager
def served(model_dir, home, *engines):
    """`titogym serve --port 0`, and a function that waits for the first line with a word in what it says."""
    command = [sys.executable, "-m", "titogym", "serve", "--port", "0", "--model-dir", str(model_dir)]
    command += [word for url in engines for word in ("--engine", url)]
    log = home / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={"TITOGYM_HOME": str(home)})

    def line(word):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for found in log.read_text().splitlines():
                if word in found:
                    return found
            time.sleep(0.05)
        raise AssertionError(log.read_text())

    try:
        yield line
    finally:
        process.terminate()
        process.wait(10)


def test_a_silent_engine_is_named_at_the_start(model_dir, tmp_path):
    with (
        ScriptedEngine(lambda prompt, params: [2]) as engine,
        served(model_dir, tmp_path, "http://127.0.0.1:1", engine.url) as line,
    ):
        assert "http://127.0.0.1:1 does not answer" in line("Warning")
        line("Gateway at")
        assert engine.url not in (tmp_path / "log").read_text()


def test_a_gateway_on_a_port_of_the_systems_choice_leaves_no_journal(model_dir, tmp_path):
    with served(model_dir, tmp_path, "http://127.0.0.1:1") as line:
        assert line("Gateway at").endswith("sessions in a temporary file")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["log"]


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(model_dir, tmp_path):
    config = {**json.loads((model_dir / "config.json").read_text()), "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    for command in (["serve", "--engine", "http://x", "--model-dir"], ["engine"]):
        result = CliRunner().invoke(app, [*command, str(tmp_path), "--port", "0"])
        assert isinstance(result.exception, UserError)
        assert "vocab_size 100" in str(result.exception)


async def test_an_answer_does_not_wait_until_its_beginning_is_acknowledged():
    """Nagle's algorithm is off on the connections of the listener that `titogym serve` opens."""
    accepted: asyncio.Future[asyncio.Transport] = asyncio.get_running_loop().create_future()

    class Served(asyncio.Protocol):
        def connection_made(self, transport):
            accepted.set_result(transport)

    server = await asyncio.get_running_loop().create_server(Served, sock=_listen("127.0.0.1", 0))
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        connection = (await accepted).get_extra_info("socket")
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()


def test_a_client_that_comes_before_the_gateway_is_ready_waits():
    """It is told the address a moment earlier; and that the port is taken is known from the start."""
    with _listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        with pytest.raises(UserError, match="choose another --port"):
            _listen("127.0.0.1", port)
