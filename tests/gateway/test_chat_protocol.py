"""Reading Chat Completions requests."""

from typing import Any

import pytest

from tests.gateway.forest import tree
from titogym.gateway.errors import RequestError
from titogym.gateway.protocols import chat
from titogym.gateway.protocols.base import Context
from titogym.gateway.protocols.fields import ENGINE_FIELDS, IGNORED
from titogym.gateway.sessions.turn import ToolChoice
from titogym.templates.conversation import Message, ToolCall
from titogym.templates.families import QUICKSTART, QWEN3

USER = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


def parse(family=QWEN3, **body):
    return chat.parse({"messages": [USER], **body}, Context(family, "served", tree()))


@pytest.mark.parametrize(
    ("wire", "canonical"),
    [
        ({"role": "user", "content": "hi"}, Message("user", "hi")),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, Message("user", "ab")),  # noqa: E501
        ({"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}], "name": "joe"}, Message("user", "a")),  # noqa: E501
        ({"role": "developer", "content": "x"}, Message("system", "x")),
        ({"role": "assistant", "content": None}, Message("assistant")),
        ({"role": "assistant", "content": [], "tool_calls": [], "reasoning_content": None}, Message("assistant")),  # noqa: E501
        ({"role": "assistant", "reasoning": "hm", "annotations": None, "audio": None}, Message("assistant", "", "hm")),  # noqa: E501
        ({"role": "assistant", "content": None, "refusal": "no"}, Message("assistant", "no")),
        (
            {
                "role": "assistant",
                "content": "",
                "parsed": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "index": 0,
                        "function": {"name": "bash", "arguments": "{ }", "parsed_arguments": {}},
                    }
                ],
            },
            Message("assistant", tool_calls=(ToolCall("call_1", "bash", "{ }"),)),
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}]},  # noqa: E501
            Message("assistant", tool_calls=(ToolCall("c", "f", '{"a":1}'),)),
        ),
        ({"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]}, Message("tool", "x", tool_call_id="c")),  # noqa: E501
        ({"role": "tool", "tool_call_id": "c", "content": "x", "name": "bash"}, Message("tool", "x", tool_call_id="c", name="bash")),  # noqa: E501
    ],
)  # fmt: skip
def test_messages_in_their_canonical_form(wire, canonical):
    assert chat.messages([wire]) == (canonical,)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [USER, {"role": "function", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content"),  # noqa: E501
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "messages[0].content"),  # noqa: E501
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}]}, "messages[0].tool_calls[0]"),  # noqa: E501
        ({"messages": [{"role": "assistant", "function_call": {"name": "x"}}]}, "messages[0]"),
        ({"input_ids": [1, 2]}, "input_ids"),
        ({"prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"logprob_start_len": 0}, "logprob_start_len"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"return_logprob": True}, "return_logprob"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "0.5"}, "temperature"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"stop": 3}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"model": 3}, "model"),
        ({"tools": {"x": 1}}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0]"),
        ({"tools": [TOOL, {"type": "function", "function": {"name": "x", "parameters": []}}]}, None),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": "none"}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "must"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
            "response_format",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(body, param):
    if param is None:
        parse(**body)
        return
    with pytest.raises(RequestError) as refused:
        parse(**body)
    assert refused.value.param == param
    assert refused.value.status == 400


def test_fields_that_have_no_effect_are_named_with_a_reason():
    turn = parse(
        user="u1",
        store=True,
        parallel_tool_calls=False,
        prompt_cache_key="k",
        return_token_ids=True,
        service_tier=None,
        metadata={"a": "b"},
        never_heard_of=1,
        reasoning_effort="low",
        return_logprob=False,
        logit_bias={},
        top_logprobs=0,
        n=1,
    ).turn
    assert set(turn.ignored) == {
        *("user", "store", "prompt_cache_key", "return_token_ids", "metadata"),
        "never_heard_of",
    }
    assert all(turn.ignored.values())
    assert parse(QUICKSTART, reasoning_effort="low").turn.ignored.keys() == {"reasoning_effort"}


def test_tools_that_are_not_held_to_their_schemas_are_named():
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    assert parse(tools=[TOOL, strict]).turn.ignored.keys() == {"tools[].function.strict"}


def test_every_field_of_the_official_sdk_is_known():
    """Read, refused or known to be ignored: a field that is new in the SDK needs a decision."""
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase

    known = chat._READ | chat._REFUSED.keys() | chat._IGNORED.keys() | ENGINE_FIELDS.keys() | IGNORED.keys()
    undecided = set(CompletionCreateParamsBase.__annotations__) - known
    assert undecided == set()


def test_template_arguments_belong_to_the_root_only_where_they_matter():
    assert parse(reasoning_effort="none").turn.prefix.kwargs == {"enable_thinking": False}
    assert parse(reasoning_effort="high").turn.prefix.kwargs == {}
    assert parse(chat_template_kwargs={"enable_thinking": False}).turn.prefix.kwargs == {
        "enable_thinking": False
    }
    assert parse(chat_template_kwargs={"enable_thinking": True}).turn.prefix == parse().turn.prefix


def test_calls_are_looked_for_only_where_tools_are_offered():
    assert parse(tools=[TOOL]).turn.choice.may
    assert parse(tools=[TOOL], tool_choice="auto").turn.choice.may
    assert not parse(tools=[TOOL], tool_choice="none").turn.choice.may
    assert not parse(tools=[]).turn.choice.may
    assert parse(tools=[TOOL], tool_choice="none").turn.prefix == parse(tools=[TOOL]).turn.prefix


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": TOOL["function"]["name"]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}},
    ],
)
def test_a_call_may_be_asked_for(choice):
    asked = parse(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False).turn
    name = TOOL["function"]["name"]
    assert asked.choice == ToolChoice(may=True, must=(name,), single="parallel_tool_calls")
    assert asked.prefix == parse(tools=[TOOL]).turn.prefix
    assert asked.ignored == {}


def test_sampling_and_answer_options():
    asked = parse(
        max_tokens=5, max_completion_tokens=7, stop="x", stream=True, stream_options={"include_usage": True}
    )
    assert (asked.turn.sampling.max_tokens, asked.turn.sampling.stop) == (7, ("x",))
    assert (asked.include_usage, asked.turn.stream, asked.model) == (True, True, "served")
    assert parse(response_format={"type": "json_object"}).turn.sampling.json_schema == '{"type": "object"}'
    assert parse(response_format={"type": "text"}).turn.sampling.json_schema is None
    assert parse(model="mine", logprobs=True).logprobs
