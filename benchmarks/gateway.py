"""What the gateway costs: its time per turn and its memory per session, beside a naive server's.

    python benchmarks/gateway.py [--sessions N] [--turns N] [--tokens N] [--model-dir DIR] [--family NAME]

Sessions of an agent that calls a tool in every turn grow to `--tokens` tokens, in front of an engine double
that answers at once (`engine_double.py`). Each turn is sent to the gateway whole and as a stream, to the
naive server (`naive_gateway.py`) and, as its bare tokens, to the double itself, one after the other, so that
all of them see the same machine. Printed:

- added latency: how much longer a turn takes through a server than its tokens take to the double and back,
  over all turns, and over the last turn of each session, where history is longest;
- turns per second of CPU time of the server's process, which is its rate on a core of its own;
- resident memory per session: what the server's process grew by, divided by the sessions that it holds.
  With few sessions this is too little where they fit into memory that the start had left free, so the
  gateway's own account of its sessions (`titogym_sessions_bytes`) stands beside it.
"""

import argparse
import http.client
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import orjson
import psutil

from titogym.gateway import launch as gateway
from titogym.quickstart import tokenizer
from titogym.templates.conversation import Message, Prefix, ToolCall
from titogym.templates.model import ModelAssets, load_model_assets

HERE = Path(__file__).parent
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the sandbox and get its output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "What to run."}},
            "required": ["command"],
        },
    },
}
ANSWER = Message(
    "assistant",
    "I look at the next part of the module and at what calls it, then I decide what to change.",
    tool_calls=(ToolCall("x", "bash", '{"command": "sed -n 1,200p src/module.py && grep -rn main src"}'),),
)


class Connection:
    """A keep-alive connection that sends ready bytes."""

    def __init__(self, url: str, key: str = "") -> None:
        self._http = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        self._headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}

    def get(self, path: str) -> str:
        self._http.request("GET", path, headers=self._headers)
        return self._http.getresponse().read().decode()

    def post(self, path: str, body: bytes) -> tuple[bytes, float]:
        """The answer, and the seconds until all of it was there."""
        started = time.perf_counter()
        self._http.request("POST", path, body, self._headers)
        response = self._http.getresponse()
        answer = response.read()
        seconds = time.perf_counter() - started
        if response.status >= 300:
            sys.exit(f"{path}: {response.status} {answer[:300]!r}")
        return answer, seconds


@dataclass
class Server:
    """A server under test, and what was measured of it."""

    name: str
    pid: int
    connection: Connection
    stream: bool
    added: list[list[float]] = field(default_factory=list)  # ms: [turn][session]
    cpu: float = 0.0  # seconds in measured turns
    turns: int = 0
    growth: float = 0.0  # bytes, over the measured sessions

    def seconds_of_cpu(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def resident(self) -> int:
        resident: int = psutil.Process(self.pid).memory_info().rss
        return resident

    def create(self) -> str:
        """The path of a fresh session's completions."""
        made = orjson.loads(self.connection.post("/sessions", b"{}")[0])
        return f"{urlsplit(made['base_url']).path}/chat/completions"

    def turn(self, path: str, history: list[dict[str, Any]], content: str) -> float:
        """Ask with the whole history, as agents do, and keep the answer in it; seconds."""
        if history:
            call = history[-1]["tool_calls"][0]["id"]
            history.append({"role": "tool", "tool_call_id": call, "content": content})
        else:
            history.append({"role": "user", "content": content})
        asked = {"model": "m", "messages": history, "tools": [TOOL], "stream": self.stream}
        answer, seconds = self.connection.post(path, orjson.dumps(asked))
        history.append(_streamed(answer) if self.stream else orjson.loads(answer)["choices"][0]["message"])
        return seconds


def _streamed(answer: bytes) -> dict[str, Any]:
    """The message that a client puts together from a stream with one call."""
    content, id, name, arguments = "", "", "", ""
    for line in answer.split(b"\n\n"):
        if line.startswith(b"data: {"):
            delta = orjson.loads(line[6:])["choices"][0]["delta"]
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                id += call.get("id", "")
                name += call["function"].get("name", "")
                arguments += call["function"].get("arguments", "")
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def train_model(folder: Path) -> Path:
    """A model folder with a tokenizer of 8,000 tokens learnt from the project's own code."""
    texts = [path.read_text() for path in sorted(HERE.parent.glob("*/*/*.py"))]
    tokenizer.write(tokenizer.train(texts, 8000), folder)
    config = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 1 << 20}
    (folder / "config.json").write_bytes(orjson.dumps(config))
    return folder


def answer_ids(assets: ModelAssets) -> list[int]:
    """What a model of the family samples for `ANSWER`, its stop token included."""
    asked, prefix = [Message("user", "x")], Prefix(tools=(TOOL,))
    opened = assets.encode(asked, prefix, add_generation_prompt=True)
    ids = assets.encode([*asked, ANSWER], prefix, add_generation_prompt=False)[len(opened) :]
    end = next(i for i, token in enumerate(ids) if token in assets.stop_ids)
    return ids[: end + 1]


def tool_results(assets: ModelAssets, turns: int, tokens: int, answer: int) -> list[str]:
    """Lines of the project's own code, so many that every turn adds about `tokens / turns` tokens."""
    code = "\n".join(path.read_text() for path in sorted(HERE.parent.glob("*/*/*.py")))
    lines = code.splitlines(keepends=True)
    results, at = [], 0
    for _ in range(turns):
        size, text = 0, []
        while size < tokens // turns - answer - 16:
            text.append(lines[at % len(lines)])
            size += len(assets.tokenizer.encode(text[-1]))
            at += 1
        results.append("".join(text))
    return results


def run_session(results: Sequence[str], tokens: int, engine: Connection, servers: Sequence[Server]) -> None:
    """One session on every server, turn by turn side by side."""
    paths = [server.create() for server in servers]
    histories: list[list[dict[str, Any]]] = [[] for _ in servers]
    for turn, content in enumerate(results):
        length = tokens * (turn + 1) // len(results)
        bare = {"input_ids": random.choices(range(1000, 8000), k=length), "return_logprob": True}
        direct = {
            stream: engine.post("/generate", orjson.dumps({**bare, "stream": stream}))[1]
            for stream in (False, True)
        }
        for server, path, history in zip(servers, paths, histories, strict=True):
            before = server.seconds_of_cpu()
            seconds = server.turn(path, history, content)
            server.cpu += server.seconds_of_cpu() - before
            server.turns += 1
            if turn == len(server.added):
                server.added.append([])
            server.added[turn].append(1e3 * (seconds - direct[server.stream]))


def measure(
    sessions: int, results: Sequence[str], tokens: int, engine: Connection, servers: Sequence[Server]
) -> None:
    """Warm up with one session, then measure."""
    run_session(results, tokens, engine, servers)
    for server in servers:
        server.added.clear()
        server.cpu, server.turns, server.growth = 0.0, 0, -server.resident()
    for n in range(sessions):
        run_session(results, tokens, engine, servers)
        print(f"session {n + 1} of {sessions}", file=sys.stderr)
    for server in servers:
        server.growth += server.resident()


def accounted(server: Server) -> float:
    """Bytes per session by the gateway's own metrics."""
    lines = server.connection.get("/metrics").splitlines()
    values = {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if not line.startswith("#")}
    return values["titogym_sessions_bytes"] / values["titogym_sessions"]


def report(sessions: int, tokens: int, servers: Sequence[Server]) -> None:
    """One column per server; in brackets how many times better it is than the last one."""
    flat = [[ms for turn in server.added for ms in turn] for server in servers]
    last = [server.added[-1] for server in servers]
    table: list[tuple[str, list[float], str]] = [
        ("added p50, all turns (ms)", [median(values) for values in flat], ".2f"),
        ("added p99, all turns (ms)", [sorted(v)[int(0.99 * len(v))] for v in flat], ".2f"),
        (f"added p50 at {tokens:,} tokens (ms)", [median(values) for values in last], ".2f"),
        ("  the fastest of these (ms)", [min(values) for values in last], ".2f"),
        ("CPU time per turn (ms)", [1e3 * s.cpu / s.turns for s in servers], ".2f"),
        ("turns/s per core", [s.turns / s.cpu for s in servers], ",.0f"),
        ("resident per session (kB)", [s.growth / sessions / 1e3 for s in servers], ",.0f"),
    ]
    print(f"\n{'':<36}" + "".join(f"{server.name:>20}" for server in servers))
    for name, values, form in table:
        cells = [format(value, form) for value in values]
        for i, value in enumerate(values[:-1]):
            ratio = value / values[-1] if "turns/s" in name else values[-1] / value
            cells[i] += f" ({ratio:.1f}x)"
        print(f"{name:<36}" + "".join(f"{cell:>20}" for cell in cells))
    account = "".join(f"{accounted(server) / 1e3:>20,.0f}" for server in servers[:-1])
    print(f"{'  by its own account (kB)':<36}{account}")


@contextmanager
def process(script: str, *arguments: str) -> Iterator[tuple[str, int]]:
    """A server that prints its URL first: that URL, and its process id."""
    command = [sys.executable, str(HERE / script), *arguments]
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}  # as the gateway has it
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert child.stdout
        yield child.stdout.readline().strip(), child.pid
    finally:
        child.terminate()
        child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sessions", type=int, default=8, help="measured sessions (default: 8)")
    parser.add_argument("--turns", type=int, default=30, help="turns of each (default: 30)")
    parser.add_argument(
        "--tokens", type=int, default=65536, help="tokens of each in the end (default: 65536)"
    )
    parser.add_argument("--model-dir", type=Path, help="model folder; default: one made for this")
    parser.add_argument("--family", help="template family; default: recognised from the folder")
    options = parser.parse_args()
    random.seed(0)
    with tempfile.TemporaryDirectory(prefix="titogym-benchmark-") as folder, ExitStack() as stack:
        directory = Path(folder)
        model_dir = options.model_dir or train_model(directory / "model")
        family = options.family or (None if options.model_dir else "quickstart")
        assets = load_model_assets(model_dir, family)
        answer = answer_ids(assets)
        engine, _ = stack.enter_context(process("engine_double.py", "--answer", ",".join(map(str, answer))))
        servers = []
        for name, stream in (("gateway, stream", True), ("gateway, whole", False)):
            served = gateway.launch([engine], model_dir, directory=directory, family=family)
            stack.callback(served.stop)
            servers.append(Server(name, served.child.pid, Connection(served.url, served.admin_key), stream))
            directory = directory / "stream"
        arguments = ["--model-dir", str(model_dir), "--engine", engine]
        url, pid = stack.enter_context(
            process("naive_gateway.py", *arguments, *(["--family", family] if family else []))
        )
        servers.append(Server("naive, whole", pid, Connection(url), False))
        results = tool_results(assets, options.turns, options.tokens, len(answer))
        measure(options.sessions, results, options.tokens, Connection(engine), servers)
        print(f"load average {', '.join(f'{load:.1f}' for load in os.getloadavg())} on {os.cpu_count()} CPUs")
        report(options.sessions, options.tokens, servers)


if __name__ == "__main__":
    main()
