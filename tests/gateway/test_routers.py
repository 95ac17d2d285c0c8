"""The gateway before SGLang's own routers, real ones, with scripted engines as their workers."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from tests.doubles.scripted_engine import ScriptedEngine
from tests.gateway.conftest import Served
from tests.gateway.test_turns import CALL, USER, agent, create, sdk, trajectories
from titogym import venvs
from titogym.errors import UserError
from titogym.gateway.app import create_app
from titogym.gateway.engines.sglang import SGLangEngine
from titogym.gateway.settings import GatewaySettings
from titogym.processes import Child, free_port, spawn
from titogym.templates.model import load_model_assets

Workers = list[ScriptedEngine]

# `smg` is `sglang-router` under its later name. What else it wants serves models, not routing.
INSTALLS = [["sglang-router==0.3.2"], ["--no-deps", "smg==1.13.0"]]
# The module that starts each, and a policy of it that keeps to the routing key.
ROUTERS = {
    "sglang-router": ("sglang_router.launch_router", "manual"),
    "smg": ("smg.launch_router", "consistent_hashing"),
}


def eventually(condition: Callable[[], bool], timeout: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def routed(name: str, urls: list[str], folder: Path) -> Iterator[str]:
    """The URL of a router before these workers."""
    module, policy = ROUTERS[name]
    try:
        python = venvs.ensure("routers", INSTALLS, uv=True)
    except UserError as error:
        pytest.skip(f"needs PyPI's {name}, which could not be installed: {error}")
    port = free_port()
    command = [str(python), "-m", module, "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    command += ["--prometheus-port", str(free_port()), "--log-level", "warn", "--worker-urls", *urls]
    command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        try:
            return bool(httpx.get(f"{url}/readiness").json()["healthy_workers"] == len(urls))
        except (httpx.HTTPError, KeyError, ValueError):
            return False

    router: Child = spawn("router", command, log=folder / "router.log")
    try:
        router.wait_ready(ready, timeout=60)
        yield url
    finally:
        router.stop()


@pytest.fixture(scope="module", params=list(ROUTERS))
def stand(
    request: pytest.FixtureRequest, model_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Workers]]:
    """A gateway's URL, and the workers behind the router behind it."""
    model_dir = model_dirs["qwen3"]
    tokenizer = load_model_assets(model_dir).tokenizer
    script = lambda prompt, params: tokenizer.encode(f"I look.\n{CALL}<|im_end|>")  # noqa: E731
    workers = [
        ScriptedEngine(script, tokenizer=tokenizer, context_length=length, model_path=str(model_dir))
        for length in (4096, 3000)
    ]
    for worker in workers:
        worker.start()
    folder = tmp_path_factory.mktemp(request.param)
    with routed(request.param, [worker.url for worker in workers], folder) as url:
        gateway = Served(create_app(GatewaySettings(engines=(url,), model_dir=model_dir)))
        yield f"http://127.0.0.1:{gateway.port}", workers
        gateway.stop()
    for worker in workers:
        worker.stop()


def served(worker: ScriptedEngine) -> int:
    return len(worker.requests)


def test_every_session_stays_with_one_worker(stand):
    url, workers = stand
    homes = set()
    for n in range(12):
        before = [served(worker) for worker in workers]
        session = create(url)
        agent(session, 3, stream=n % 2 == 0)
        turns = [served(worker) - count for worker, count in zip(workers, before, strict=True)]
        assert sorted(turns) == [0, 3]
        home = workers[turns.index(3)]
        homes.add(home.url)
        [found] = trajectories(url, session)
        assert found["tokens"][: len(home.requests[-1]["input_ids"])] == home.requests[-1]["input_ids"]
        if n >= 3 and len(homes) == 2:
            break
    assert len(homes) == 2  # and not all with the same


def test_the_gateway_is_ready_and_knows_the_shortest_context(stand):
    url, _ = stand
    assert httpx.get(f"{url}/ready").status_code == 200
    session = create(url)
    long = {"role": "user", "content": "x" * 3500}
    with pytest.raises(openai.BadRequestError, match="maximum context length is"):
        sdk(session).chat.completions.create(model="m", messages=[long])


def test_a_client_that_leaves_ends_its_request_on_the_worker(stand):
    url, workers = stand
    for worker in workers:
        worker.token_latency = 0.05
    ended = sum(len(worker.aborted) for worker in workers)
    stream = sdk(create(url)).chat.completions.create(model="m", messages=[USER], stream=True)
    next(iter(stream))
    stream.close()
    assert eventually(lambda: sum(len(worker.aborted) for worker in workers) == ended + 1, timeout=5)
    for worker in workers:
        worker.token_latency = 0.0


def test_a_dead_worker_gives_its_sessions_to_the_other(stand):
    """The last test of its stand: a worker dies."""
    url, workers = stand
    session = create(url)
    before = [served(worker) for worker in workers]
    agent(session, 1, stream=True)
    home = next(worker for worker, count in zip(workers, before, strict=True) if served(worker) > count)
    home.stop()

    def answered() -> bool:
        try:
            agent(session, 1, stream=True)
        except openai.APIStatusError:
            return False
        return True

    assert eventually(answered)
    assert httpx.get(f"{url}/ready").status_code == 200


async def test_a_router_without_workers_is_not_healthy(stand):
    url, workers = stand
    async with httpx.AsyncClient() as http:
        [engine] = (await http.get(f"{url}/engines")).json()["engines"]
    for worker in workers:
        await asyncio.to_thread(worker.stop)
    client = SGLangEngine(engine["url"])
    deadline = time.monotonic() + 20
    while await client.healthy():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    await client.close()
