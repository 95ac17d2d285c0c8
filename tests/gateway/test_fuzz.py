"""Requests that no client should send: always an answer, never a fault of the gateway's own."""

import copy
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gateway.test_turns import TOOLS, USER, create, inspect

VALID: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "out"},
        USER,
    ],
    "tools": TOOLS,
    "tool_choice": "auto",
    "temperature": 0.5,
    "max_tokens": 5,
    "stop": ["x"],
    "seed": 3,
    "stream": False,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "text"},
    "chat_template_kwargs": {"enable_thinking": True},
    "logprobs": True,
}

MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "titogym.msg_0"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "out"}]},
                {"type": "text", "text": "go on"},
            ],
        },
        {"role": "system", "content": "Be brief."},
    ],
    "tools": [{"name": "bash", "input_schema": TOOLS[0]["function"]["parameters"]}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "stop_sequences": ["x"],
    "top_k": 3,
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "You are an agent.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "reasoning",
            "id": "rs_" + "0" * 24,
            "summary": [{"type": "summary_text", "text": "hm"}],
            "encrypted_content": "titogym.resp_0",
        },
        {
            "type": "message",
            "id": "msg_" + "0" * 24,
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": "{}", "namespace": "n"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "o"}]},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "out"},
        USER,
    ],
    "tools": [
        {"type": "function", **TOOLS[0]["function"]},
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
    ],
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "json_schema", "schema": {}}},
    "include": ["reasoning.encrypted_content"],
    "store": True,
    "metadata": {"a": "b"},
    "max_output_tokens": 5,
}
BODIES = {"chat/completions": VALID, "messages": MESSAGES, "responses": RESPONSES}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"command": {"type": "string", "enum": ["ls"]}, "n": {"$ref": "#/$defs/n"}},
    "required": ["command"],
    "$defs": {"n": {"type": "integer"}},
}
FUNCTION = {"name": "bash", "parameters": PARAMETERS}
FORCED: list[tuple[str, dict[str, Any]]] = [  # a call is asked for, or the answer is begun
    (
        "chat/completions",
        {
            "messages": [USER],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "bash"}},
            "parallel_tool_calls": False,
        },
    ),
    (
        "responses",
        {
            "input": "hi",
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "bash"}],
            },
            "parallel_tool_calls": False,
        },
    ),
    (
        "messages",
        {
            "max_tokens": 5,
            "messages": [USER],
            "tools": [{"name": "bash", "input_schema": PARAMETERS}],
            "tool_choice": {"type": "tool", "name": "bash", "disable_parallel_tool_use": True},
        },
    ),
    ("messages", {"max_tokens": 5, "messages": [USER, {"role": "assistant", "content": "I"}]}),
]

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.sampled_from("a<|im_start|>\n\x00é🎉{}\\\"'"), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path] + [place for key in keys for place in places(value[key], (*path, key))]


def replaced(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    body = copy.deepcopy(body)
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return body


@pytest.mark.parametrize(("path", "body"), FORCED)
def test_spoiled_requests_for_a_call_are_answered(serve, path, body):
    stand = serve(["fine"], family="qwen3.5")
    with httpx.Client(timeout=20) as http:

        @settings(max_examples=25, suppress_health_check=list(HealthCheck))
        @given(place=st.sampled_from(places(body)), value=junk)
        def spoil(place, value):
            session = create(stand.url, policy="branching")
            response = http.post(f"{session.base_url}/{path}", json=replaced(body, place, value))
            assert response.status_code in (200, 400), response.text

        spoil()


@pytest.mark.parametrize("path", BODIES)
def test_spoiled_requests_are_answered(serve, path):
    stand = serve(["fine"])
    with httpx.Client(timeout=20) as http:

        @settings(max_examples=80, suppress_health_check=list(HealthCheck))
        @given(place=st.sampled_from(places(BODIES[path])), value=junk, stream=st.booleans())
        def spoil(place, value, stream):
            session = create(stand.url, policy="branching")
            body = replaced({**BODIES[path], "stream": stream}, place, value)
            response = http.post(f"{session.base_url}/{path}", json=body)
            assert response.status_code in (200, 400), response.text
            if response.status_code == 400:
                assert response.json()["error"]["message"]
            assert inspect(stand.url, session)["turns"] == (response.status_code == 200)

        spoil()


def test_spoiled_session_options_are_answered(serve):
    stand = serve(["fine"])
    valid = {
        "matcher": "strict",
        "policy": "linear",
        "sampling": {"temperature": 1},
        "limits": {"turns": 3},
        "labels": {},
    }
    with httpx.Client(timeout=20) as http:

        @settings(max_examples=60, suppress_health_check=list(HealthCheck))
        @given(place=st.sampled_from(places(valid)), value=junk)
        def spoil(place, value):
            response = http.post(f"{stand.url}/sessions", json=replaced(valid, place, value))
            assert response.status_code in (201, 400), response.text

        spoil()
