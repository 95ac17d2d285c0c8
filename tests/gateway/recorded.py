"""Recorded requests of harness programs, to be sent again to a gateway.

A file of `traces/` has the path and the tools (type, name, properties) on its first line, then one line
per request: what it `add`s to the first `keep` messages of request `of`, the other fields where they
change, and the `answer` that the program had been given: reasoning, content, calls (id, name, arguments
as the model wrote them), or `failed`. Long texts stand as marks of their hash and length.

`Replayer` sends them in order. Ids are the gateway's to give: each one that the program had been given
is replaced by the one that the gateway gave in its place.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

FOLDER = Path(__file__).with_name("traces")

Json = dict[str, Any]


@dataclass
class Recorded:
    path: str
    body: Json
    headers: dict[str, str]
    answer: Json


def recorded(name: str) -> Iterator[Recorded]:
    head, *lines = map(json.loads, (FOLDER / f"{name}.jsonl").read_text("utf-8").splitlines())
    histories: list[list[Any]] = []
    fields: Json = {}
    listed = "input" if "responses" in head["path"] else "messages"
    for line in lines:
        history = histories[line["of"]][: line["keep"]] if "of" in line else []
        histories.append([*history, *line["add"]])
        fields = {**fields, **line.get("set", {})}
        for key in line.get("unset", ()):
            del fields[key]
        body = {key: value for key, value in fields.items() if key not in ("tools", "#headers")}
        body[listed] = histories[-1]
        if "tools" in fields:
            body["tools"] = [_tool(head["path"], *head["tools"][i]) for i in fields["tools"]]
        yield Recorded(head["path"], body, fields.get("#headers", {}), line["answer"])


def _tool(path: str, kind: str | None, name: str | None, properties: list[str] | None) -> Json:
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in properties or ()}}
    if "messages" in path:
        return {"name": name, "input_schema": schema}
    if "responses" in path:
        return {"type": kind, "name": name} if kind != "function" else {
            "type": kind, "name": name, "parameters": schema, "strict": False}  # fmt: skip
    return {"type": kind, "function": {"name": name, "parameters": schema}}


def written(answer: Json) -> str:
    """What a model of the Qwen3 family writes to give this answer."""
    text = f"<think>\n{answer['reasoning']}\n</think>\n\n" if answer.get("reasoning") else ""
    text += str(answer.get("content", ""))
    for at, (_, name, arguments) in enumerate(answer.get("calls", ())):
        lead = "\n" if at or answer.get("content") else ""
        text += f'{lead}<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
    return text


@dataclass
class Replayer:
    """Sends recorded requests, and keeps what stands for what."""

    base_url: str
    ids: dict[str, str] = field(default_factory=dict)

    def send(self, http: httpx.Client, request: Recorded) -> httpx.Response:
        body = self._ours(request.body)
        path = request.path.removeprefix("/v1")
        response = http.post(self.base_url + path, json=body, headers=request.headers)
        if response.status_code == 200 and "failed" not in request.answer:
            plain = _read(path, response, bool(body.get("stream")))
            self._learn(request.answer, plain)
        return response

    def _ours(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._ours(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._ours(inner) for inner in value]
        return self.ids.get(value, value) if isinstance(value, str) else value

    def _learn(self, theirs: Json, ours: Json) -> None:
        pairs = [
            *zip((call[0] for call in theirs.get("calls", ())), ours["calls"], strict=True),
            *zip(theirs.get("items", ()), ours["items"], strict=True),
        ]
        pairs += [(theirs[key], ours[key]) for key in ("id", "seal") if key in theirs]
        self.ids.update(pairs)


def _read(path: str, response: httpx.Response, stream: bool) -> Json:
    """The ids of an answer: `id` of it, of its `calls`, of its `items`, and the `seal` of its reasoning."""
    answer = _streamed(response.text) if stream else response.json()
    if "output" in answer:
        output = answer["output"]
        return {
            "id": answer["id"],
            "items": [item["id"] for item in output],
            "calls": [item["call_id"] for item in output if "call_id" in item],
            "seal": next((i["encrypted_content"] for i in output if i["type"] == "reasoning"), None),
        }
    if "choices" in answer:
        calls = answer["choices"][0]["message"].get("tool_calls") or []
        return {"id": answer["id"], "items": [], "calls": [call["id"] for call in calls]}
    blocks = answer["content"]
    return {
        "id": answer["id"],
        "items": [],
        "calls": [block["id"] for block in blocks if block["type"] == "tool_use"],
        "seal": next((block["signature"] for block in blocks if block["type"] == "thinking"), None),
    }


def _streamed(text: str) -> Json:
    """What a stream amounts to, as far as ids go."""
    datas = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(data) for data in datas if data != "[DONE]"]
    if events[-1].get("response"):
        return dict(events[-1]["response"])
    if "choices" in events[0]:
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
        return {"id": events[0]["id"], "choices": [{"message": {"tool_calls": calls}}]}
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    for event in events:
        if event["type"] == "content_block_delta" and "signature" in event["delta"]:
            blocks[event["index"]]["signature"] = event["delta"]["signature"]
    return {"id": events[0]["message"]["id"], "content": blocks}
