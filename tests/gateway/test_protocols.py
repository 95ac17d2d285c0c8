"""What holds for every wire protocol alike."""

import asyncio
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from tests.gateway.forest import generation, tree
from tests.gateway.test_fuzz import BODIES
from tests.gateway.test_messages import TOOLS as MESSAGES_TOOLS
from tests.gateway.test_messages import ask as ask_messages
from tests.gateway.test_messages import sdk as anthropic_sdk
from tests.gateway.test_responses import ask as ask_responses
from tests.gateway.test_turns import CALL, THINK, TOOLS, USER, create, inspect, sdk
from titogym.gateway import answering
from titogym.gateway.errors import RequestError
from titogym.gateway.protocols import chat, fields, messages, responses
from titogym.gateway.protocols.base import Context, seal, unseal
from titogym.gateway.sessions.tree import Receipt
from titogym.templates.conversation import Message, Prefix, ToolCall
from titogym.templates.families import QUICKSTART, QWEN3
from titogym.templates.families.gpt_oss import GPT_OSS

PROTOCOLS = {"chat/completions": chat, "messages": messages, "responses": responses}


def parse(path: str, body: Any, family=QWEN3, forest=None, **context):
    return PROTOCOLS[path].PROTOCOL.parse(body, Context(family, "served", forest or tree(), **context))


@pytest.mark.parametrize(
    ("module", "params"), [(messages, MessageCreateParamsBase), (responses, ResponseCreateParamsBase)]
)
def test_every_field_of_the_official_sdk_is_known(module, params):
    """Read, refused or known to be ignored: a field that is new in the SDK needs a decision."""
    known = module._READ | module._REFUSED.keys() | module._IGNORED.keys() | fields.IGNORED.keys()
    assert set(params.__annotations__) - known == set()


@pytest.mark.parametrize("path", PROTOCOLS)
def test_one_conversation_behind_every_door(path):
    """The same history, as each protocol writes it, is the same to the session."""
    turn = parse(path, SAME[path]).turn
    assert turn.prefix == Prefix(tuple(TOOLS), {"enable_thinking": False})
    assert turn.messages == (
        Message("system", "You are an agent."),
        Message("user", "Look around."),
        Message("assistant", "I look.", "hm", (ToolCall("c1", "bash", '{"command":"ls"}'),)),
        Message("tool", "out", tool_call_id="c1"),
        Message("user", "go on"),
    )
    assert (turn.sampling.max_tokens, turn.sampling.temperature) == (5, 0.5)
    assert turn.ignored == {}


SAME: dict[str, Any] = {
    "chat/completions": {
        "messages": [
            {"role": "system", "content": "You are an agent."},
            USER,
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "hm",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "bash", "arguments": '{"command":"ls"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "out"},
            {"role": "user", "content": "go on"},
        ],
        "tools": TOOLS,
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "reasoning_effort": "none",
    },
    "messages": {
        "system": "You are an agent.",
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "c1", "name": "bash", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "out"},
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
        "tools": MESSAGES_TOOLS,
        "max_tokens": 5,
        "temperature": 0.5,
        "thinking": {"type": "disabled"},
    },
    "responses": {
        "instructions": "You are an agent.",
        "input": [
            USER,
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"command":"ls"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "out"},
            {"role": "user", "content": "go on"},
        ],
        "tools": [{"type": "function", **tool["function"]} for tool in TOOLS],
        "max_output_tokens": 5,
        "temperature": 0.5,
        "reasoning": {"effort": "none"},
    },
}


@pytest.mark.parametrize("path", PROTOCOLS)
@pytest.mark.parametrize("name", ["input_ids", "return_logprob", "chat_template", "routed_experts_start_len"])
def test_fields_of_the_engine_are_refused(path, name):
    with pytest.raises(RequestError) as refused:
        parse(path, {**SAME[path], name: [1]})
    assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")


def test_reasoning_effort_in_the_words_of_the_family():
    def kwargs(family, **body):
        return parse("messages", {"max_tokens": 5, "messages": [USER], **body}, family).turn.prefix.kwargs

    assert kwargs(GPT_OSS, output_config={"effort": "max"}) == {"reasoning_effort": "high"}
    assert kwargs(GPT_OSS, thinking={"type": "disabled"}) == {"reasoning_effort": "low"}
    assert kwargs(QWEN3, output_config={"effort": "low"}, thinking={"type": "disabled"}) == {
        "enable_thinking": False
    }
    assert kwargs(QWEN3, thinking={"type": "adaptive"}) == {}
    turn = parse("responses", {"input": "hi", "reasoning": {"effort": "low"}, "tools": []}, QUICKSTART).turn
    assert (turn.prefix.kwargs, turn.ignored.keys()) == ({}, {"reasoning.effort"})


def test_arguments_keep_the_text_that_was_sampled_where_their_value_is_the_same():
    forest = tree()
    answer = Message("assistant", tool_calls=(ToolCall("c1", "bash", '{ "b": 1.0, "a": "\\u00e9" }'),))
    forest.append(forest.draft(None, Prefix(), (Message("user", "hi"),), answer, generation()))

    def sent(value):
        block = {"type": "tool_use", "id": "c1", "name": "bash", "input": value}
        history = [USER, {"role": "assistant", "content": [block]}, USER]
        return parse("messages", {"max_tokens": 5, "messages": history}, forest=forest).turn.messages[1]

    assert sent({"a": "é", "b": 1}) == answer
    assert sent({"a": "é", "b": True}).tool_calls[0].arguments == '{"a":"\xe9","b":true}'


def test_reasoning_of_another_provider_is_listed():
    item = {"type": "reasoning", "id": "rs_x", "summary": [], "encrypted_content": "gAAAA"}
    turn = parse("responses", {"input": [USER, item, USER]}).turn
    assert turn.ignored.keys() == {"reasoning.encrypted_content"}
    block = {"type": "redacted_thinking", "data": "x"}
    history = [USER, {"role": "assistant", "content": [block, {"type": "text", "text": "hi"}]}, USER]
    turn = parse("messages", {"max_tokens": 5, "messages": history}).turn
    assert turn.ignored.keys() == {"redacted_thinking"}
    assert unseal(seal("msg_1")) == "msg_1"
    assert unseal("EqQB") == ""


def test_items_without_ids_are_told_apart_by_their_order():
    said = [{"role": "assistant", "content": text} for text in ("one", "two")]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    turn = parse("responses", {"input": [USER, thought, *said, call, call, thought, said[0]]}).turn
    first = ToolCall("c", "f", "{}")
    assert turn.messages[1:] == (
        Message("assistant", "one", "hm"),
        Message("assistant", "two", tool_calls=(first, first)),
        Message("assistant", "one", "hm"),
    )


def test_ids_tell_items_of_two_answers_apart():
    forest = tree()
    for n in (1, 2):
        receipt = Receipt(id=f"resp_{n:024x}")
        answer = Message("assistant", f"answer {n}")
        asked = (Message("user", "hi"),)
        forest.append(forest.draft(None, Prefix(), asked, answer, generation(), receipt=receipt))
    refs = [{"type": "item_reference", "id": f"msg_{n:024x}"} for n in (1, 2)]
    turn = parse("responses", {"input": [USER, *refs]}, forest=forest).turn
    assert turn.messages[1:] == (Message("assistant", "answer 1"), Message("assistant", "answer 2"))


# --- over HTTP ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
def test_pings_keep_a_silent_stream_alive(serve, monkeypatch, path):
    monkeypatch.setattr(answering, "KEEP_ALIVE_SECONDS", 0.05)
    stand = serve(["hello"], engine={"token_latency": 0.2})
    session = create(stand.url)
    body = {key: value for key, value in SAME[path].items() if key != "tools"}
    response = httpx.post(f"{session.base_url}/{path}", json={**body, "stream": True}, timeout=30)
    ping = "event: ping\n" if path == "messages" else ": keep-alive\n"
    assert response.text.count(ping) > 3
    assert response.text.index("data: ") < response.text.index(ping)  # the stream was opened first
    session = create(stand.url)
    if path == "messages":
        message = ask_messages(anthropic_sdk(session), [USER], stream=True, tools=[])
        assert message.content[0].text == "hello"
    elif path == "responses":
        assert ask_responses(sdk(session), [USER], stream=True, tools=[]).output_text == "hello"
    else:
        with sdk(session).chat.completions.stream(model="m", messages=[USER]) as events:
            assert events.get_final_completion().choices[0].message.content == "hello"


def thought(text: str) -> Any:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def test_a_session_goes_on_through_all_three_doors(serve):
    stand = serve([f"{THINK}I look.\n{CALL}", f"{THINK}{CALL}", f"{THINK}Seen.", "Bye."])
    session = create(stand.url)
    first = ask_messages(anthropic_sdk(session), [USER], system="You are an agent.")
    call = first.content[2]
    items: list[Any] = [
        {"role": "user", "content": "Look around."},
        thought(first.content[0].thinking),
        {"role": "assistant", "content": first.content[1].text},
        {"type": "function_call", "call_id": call.id, "name": "bash", "arguments": '{"command": "ls"}'},
        {"type": "function_call_output", "call_id": call.id, "output": "a.txt"},
    ]  # fmt: skip
    second = ask_responses(sdk(session), items, instructions="You are an agent.")
    history: list[Any] = [{"role": "system", "content": "You are an agent."}, USER]
    for reasoning, said, id in (
        (first.content[0].thinking, first.content[1].text, call.id),
        (second.output[0].content[0].text, None, second.output[1].call_id),
    ):
        function = {"name": "bash", "arguments": '{"command": "ls"}'}
        calls = [{"id": id, "type": "function", "function": function}]
        history += [
            {"role": "assistant", "content": said, "reasoning_content": reasoning, "tool_calls": calls},
            {"role": "tool", "tool_call_id": id, "content": "a.txt"},
        ]
    third = sdk(session).chat.completions.create(model="m", messages=history, tools=TOOLS)
    assert third.choices[0].message.content == "Seen."
    items += [{"type": "item_reference", "id": item.id} for item in second.output]
    items += [
        {"type": "function_call_output", "call_id": second.output[1].call_id, "output": "a.txt"},
        thought("I look first: é🎉."),
        {"role": "assistant", "content": "Seen."},
        USER,
    ]  # fmt: skip
    ask_responses(sdk(session), items, stream=True, instructions="You are an agent.")
    report = inspect(stand.url, session)
    assert (report["turns"], report["counters"]["leaves"]) == (4, 1)
    assert report["tito_session_mismatch"] == {}


async def test_a_second_turn_of_a_linear_session_waits(serve):
    """Whatever the protocol: one after the other, and no answer that is not recorded."""
    stand = serve(["one", "two", "three"], engine={"token_latency": 0.03})
    session = create(stand.url)
    async with httpx.AsyncClient(base_url=session.base_url + "/", timeout=30) as http:
        bodies = {path: {key: v for key, v in body.items() if key != "tools"} for path, body in SAME.items()}
        answers = await asyncio.gather(*(http.post(path, json=body) for path, body in bodies.items()))
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert stand.engine.most_in_flight == 1
    report = await asyncio.to_thread(inspect, stand.url, session)
    assert [node["superseded"] for node in report["tree"]] == [True, True, False]


def test_anthropics_sdk_is_told_not_to_repeat_a_conflict(serve):
    stand = serve(["one", "two"])
    session = create(stand.url)
    client = anthropic_sdk(session).with_options(max_retries=2)
    first = ask_messages(client, [USER])
    ask_messages(client, [USER, {"role": "assistant", "content": first.content}, USER])
    with pytest.raises(anthropic.ConflictError):
        ask_messages(client, [USER])
    assert inspect(stand.url, session)["errors"] == {"conversation_diverged": 1}
