"""Random lives of sessions against a plain model: whatever happens, rows are what the engine saw and said."""

import socket
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.doubles.scripted_engine import Fault

Json = dict[str, Any]

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
ANSWERS = st.sampled_from(
    [
        "hello",
        "the …",
        "<think>\nhm\n</think>\n\nfine",
        '<tool_call>\n{"name": "bash", "arguments": {"c": "ls"}}\n</tool_call>',
        'two\n<tool_call>\n{"name": "bash", "arguments": {"c": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "bash", "arguments": {"c": 2}}\n</tool_call>',
        "<tool_call>broken",
        "a<|im_start|>b",
        "",
    ]
)


@dataclass(eq=False)
class Turn:
    """What the model expects of one committed turn."""

    parent: "Turn | None"
    history: list[Json]  # messages up to and including the answer
    row: list[int]
    children: int = 0
    superseded: bool = False


@dataclass(eq=False)
class Life:
    """One session."""

    url: str
    base_url: str
    policy: str
    turns: list[Turn] = field(default_factory=list)
    alive: bool = True

    @property
    def tail(self) -> Turn | None:
        return self.turns[-1] if self.turns else None


def follow(history: list[Json], n: int) -> list[Json]:
    """What a harness adds: results in another order than their calls, or a question of its own."""
    calls = history[-1].get("tool_calls") or [] if history else []
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result {n}"} for call in reversed(calls)
    ]
    return [*history, *(results or [{"role": "user", "content": f"question {n}"}])]


def test_random_lives_of_sessions(serve, tmp_path):
    answers: list[str] = []
    stand = serve(lambda prompt: answers.pop(0), journal=tmp_path / "journal.sqlite")
    tokenizer = stand.assets.tokenizer
    http = httpx.Client(timeout=20)

    class Machine(RuleBasedStateMachine):
        lives = Bundle("lives")

        def __init__(self) -> None:
            super().__init__()
            self.count = 0
            self.all: list[Life] = []

        @precondition(lambda self: len(self.all) < 3)
        @rule(target=lives, policy=st.sampled_from(["linear", "branching"]))
        def create(self, policy):
            made = http.post(f"{stand.url}/sessions", json={"policy": policy}).json()
            self.all.append(Life(f"{stand.url}/sessions/{made['id']}", made["base_url"], policy))
            return self.all[-1]

        @rule(life=lives, answer=ANSWERS, stream=st.booleans())
        def extend(self, life, answer, stream):
            self.ask(
                life, life.tail, follow(life.tail.history if life.tail else [], self.next()), answer, stream
            )

        @rule(life=lives, answer=ANSWERS, stream=st.booleans())
        def try_again(self, life, answer, stream):
            """The latest turn's answer was lost."""
            if life.tail:
                self.ask(life, life.tail.parent, life.tail.history[:-1], answer, stream, supersedes=life.tail)

        @rule(life=lives, answer=ANSWERS, data=st.data())
        def go_back(self, life, answer, data):
            earlier = [
                turn for turn in life.turns[:-1] if turn is not life.tail.parent and not turn.superseded
            ]
            if life.policy == "branching" and earlier:
                turn = data.draw(st.sampled_from(earlier))
                self.ask(life, turn, follow(turn.history, self.next()), answer, False)
            elif len([turn for turn in life.turns if not turn.superseded]) > 2:
                first = next(turn for turn in life.turns if not turn.superseded)
                refused = self.send(life, follow(first.history[:-1], self.next()), False)
                assert refused.status_code == 409

        @rule(life=lives, kind=st.sampled_from(["error", "drop", "abort"]), stream=st.booleans())
        def engine_fails(self, life, kind, stream):
            if life.alive:
                stand.engine.faults.append(Fault(kind, 2, 500))
                answers.append("never heard")
                response = self.send(
                    life, follow(life.tail.history if life.tail else [], self.next()), stream
                )
                assert response.status_code == 503 or b'"error"' in response.content

        @rule(life=lives, stream=st.booleans())
        def client_leaves(self, life, stream):
            if not life.alive:
                return
            stand.engine.faults.append(Fault("hang", 2))
            answers.append("never heard")
            messages = follow(life.tail.history if life.tail else [], self.next())
            raw = orjson.dumps({"messages": messages, "stream": stream, "tools": TOOLS})
            url = urlsplit(life.base_url)
            known = len(stand.engine.requests)
            with socket.create_connection((url.hostname, url.port)) as connection:
                head = f"POST {url.path}/chat/completions HTTP/1.1\r\ncontent-length: {len(raw)}\r\n"
                connection.sendall(head.encode() + b"host: x\r\n\r\n" + raw)
                while len(stand.engine.requests) == known or not stand.engine.in_flight:
                    time.sleep(0.002)
            start = time.monotonic()
            while stand.engine.in_flight:
                assert time.monotonic() - start < 1.0
                time.sleep(0.002)

        @rule(
            life=lives, broken=st.sampled_from([{"n": 3}, {"messages": []}, {"input_ids": [1]}, {"stop": 1}])
        )
        def nonsense(self, life, broken):
            if life.alive:
                body = {
                    "messages": life.tail.history[:-1] if life.tail else [{"role": "user", "content": "x"}]
                }
                response = http.post(f"{life.base_url}/chat/completions", json={**body, **broken})
                assert response.status_code == 400

        @rule(life=lives)
        def delete(self, life):
            assert http.delete(life.url).status_code == (204 if life.alive else 404)
            life.alive = False

        @rule()
        def restart(self):
            stand.restart()

        @invariant()
        def the_gateway_holds_what_the_engine_saw_and_said(self):
            for life in self.all:
                response = http.get(f"{life.url}/trajectories")
                if not life.alive:
                    assert response.status_code == 404
                    continue
                kept = [t["tokens"] for t in response.json()["trajectories"]]
                leaves = [t.row for t in life.turns if not t.children and not t.superseded]
                assert kept == leaves

        def teardown(self):
            for life in self.all:
                if life.alive:
                    http.delete(life.url)

        # --- the model ---

        def next(self) -> int:
            self.count += 1
            return self.count

        def send(self, life: Life, messages: list[Json], stream: bool) -> httpx.Response:
            body = {"messages": messages, "stream": stream, "tools": TOOLS}
            return http.post(f"{life.base_url}/chat/completions", json=body)

        def ask(self, life, parent, messages, answer, stream, supersedes=None):
            if not life.alive:
                assert self.send(life, messages, stream).status_code == 404
                return
            answers.append(answer)
            response = self.send(life, messages, stream)
            assert response.status_code == 200, response.text
            sent = stand.engine.requests[-1]["input_ids"]
            if parent is not None:
                shared = parent.row
                while sent[: len(shared)] != shared:  # a stop token that the template would not write
                    assert shared[-1] in stand.assets.opener_ids
                    shared = shared[:-1]
            cut = answer.endswith("…")
            said = tokenizer.encode(answer.removesuffix("…") + ("" if cut else "<|im_end|>"))
            message = put_together(response) if stream else response.json()["choices"][0]["message"]
            if supersedes is not None and not supersedes.children:
                supersedes.superseded = True
            if parent is not None:
                parent.children += 1
                parent.superseded = False
            life.turns.append(Turn(parent, [*messages, message], sent + said))

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=10, stateful_step_count=15, deadline=None)
    )


def put_together(response: httpx.Response) -> Json:
    """The message that a client makes of a stream."""
    message: Json = {"role": "assistant", "content": "", "tool_calls": []}
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    for line in lines:
        delta = orjson.loads(line)["choices"][0]["delta"]
        message["content"] += delta.get("content", "")
        if "reasoning_content" in delta:
            message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                message["tool_calls"].append({key: part[key] for key in ("id", "type", "function")})
            else:
                message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return message
