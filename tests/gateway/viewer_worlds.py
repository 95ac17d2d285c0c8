"""Sessions worth looking at: one with everything that can happen to it, and one that is very long."""

from pathlib import Path
from typing import Any

import httpx

from tests.gateway.conftest import Stand
from titogym.gateway.engines.base import VersionSpan
from titogym.gateway.sessions.journal import Journal
from titogym.gateway.sessions.matchers import matcher
from titogym.gateway.sessions.tree import Generation, Tree, logprob_array, token_array
from titogym.gateway.tokens.rows import extend
from titogym.templates.conversation import Message, Prefix
from titogym.templates.model import ModelAssets

KEY = "a key for tests"
MARKUP = '<img src=x onerror="window.hacked = true"><script>window.hacked = true</script>'

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]
ANSWERS = [
    "<think>\nThe task is to find the largest file.\n</think>\n\nI look around first.\n"
    '<tool_call>\n{"name": "bash", "arguments": {"command":  "ls -la"}}\n</tool_call>',
    f"<think>\nhm\n</think>\n\nIt holds {MARKUP} 👩‍💻 done.",
    "<think>\nAgain.\n</think>\n\nThe largest file is notes.txt, naïvely.",
    "<think>\nOther way.\n</think>\n\nWhat else?",
    "<think>\nTitle.\n</think>\n\nLargest files",
]


def surprising(position: int, token: int) -> float:
    return -0.01 if position % 3 else -((token * 7 + position) % 11) / 3


class Busy:
    """A branching session with a fork, a superseded turn, a side request, two versions and a mismatch."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand
        self._http = httpx.Client(base_url=stand.url, headers={"authorization": f"Bearer {KEY}"})
        spec = {
            "policy": "branching",
            "matcher": "call_id",
            "labels": {"task": f"largest {MARKUP}", "attempt": "1"},
        }
        self.id: str = self._http.post("/sessions", json=spec).json()["id"]
        start = [
            {"role": "system", "content": "You are an agent."},
            {"role": "user", "content": f"Find it. {MARKUP}"},
        ]
        looked = self.turn(start)
        looked["tool_calls"][0]["function"]["arguments"] = '{"command": "ls -la", "timeout": 60}'
        result = {
            "role": "tool",
            "tool_call_id": looked["tool_calls"][0]["id"],
            "content": "notes.txt\t42\n",
        }
        asked = [*start, looked, result]
        stand.engine.weight_version = "2"
        self.turn(asked)  # sampled again below: superseded
        answer = self.turn(asked)
        self.turn([*asked, answer, {"role": "user", "content": "And else?"}])
        self.turn([{"role": "user", "content": "Give it a title."}], tools=None)

    def turn(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        body = {"model": "m", "messages": messages, "tools": TOOLS, **fields}
        answer = self._http.post(f"/sessions/{self.id}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message


def write_long_session(path: Path, assets: ModelAssets, turns: int, id: str = "sess_long") -> int:
    """A journal with a session of so many turns; gives the length of its row."""
    journal = Journal(path)
    journal.create(id, {"matcher": "strict", "policy": "linear", "labels": {"task": "long"}}, 1.7e9)
    tree = Tree(matcher("strict"))
    text = "I count on, and then I go on counting."
    output = assets.tokenizer.encode(f"<think>\n\n</think>\n\n{text}<|im_end|>")
    logprobs = [-0.05 * (n % 40) for n in range(len(output))]
    for number in range(turns):
        parent = tree.nodes[-1] if tree.nodes else None
        asked = (Message("user", f"Go on, {number}."),)
        added = extend(assets, parent, Prefix(), asked)
        made = Generation(
            trim=added.trim,
            prompt_ids=token_array(added.prompt_ids),
            output_ids=token_array(output),
            logprobs=logprob_array(logprobs),
            spans=(VersionSpan(0, len(output), str(number // 500)),),
            finish="stop",
            stop=output[-1],
            engine="http://engine",
        )
        node = tree.draft(parent, Prefix(), asked, Message("assistant", text), made)
        tree.append(node)
        journal.append(id, node, (), 1.7e9 + number)
    journal.close()
    return tree.nodes[-1].length
