"""Requests that no client should send: always an answer, never a fault of the gateway's own."""

import copy
from typing import Any

import httpx
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


def test_spoiled_requests_are_answered(serve):
    stand = serve(["fine"])
    with httpx.Client(timeout=20) as http:

        @settings(max_examples=120, suppress_health_check=list(HealthCheck))
        @given(place=st.sampled_from(places(VALID)), value=junk, stream=st.booleans())
        def spoil(place, value, stream):
            session = create(stand.url, policy="branching")
            body = replaced({**VALID, "stream": stream}, place, value)
            response = http.post(f"{session.base_url}/chat/completions", json=body)
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
