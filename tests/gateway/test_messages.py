"""The Anthropic Messages protocol over HTTP, through the real Anthropic SDK."""

import json
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from tests.doubles.scripted_engine import Fault
from tests.gateway.test_turns import CALL, THINK, create, inspect, trajectories
from tests.gateway.test_turns import TOOLS as CHAT_TOOLS
from tests.gateway.test_turns import sdk as openai_sdk

Json = dict[str, Any]

TOOLS: list[Any] = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in CHAT_TOOLS
]
USER: Any = {"role": "user", "content": "Look around."}
CACHED: Any = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
ODD_CALL = '<tool_call>\n{"name": "bash", "arguments": { "command" : "ls" , "n" : 1.0 }}\n</tool_call>'


def sdk(session, **options) -> Anthropic:
    return Anthropic(base_url=session.anthropic_base_url, api_key=session.api_key, max_retries=0, **options)


def ask(client: Anthropic, messages: list[Any], stream: bool = False, **options) -> anthropic.types.Message:
    options = {"model": "claude", "max_tokens": 500, "tools": TOOLS, **options}
    if not stream:
        return client.messages.create(messages=messages, **options)
    with client.messages.stream(messages=messages, **options) as events:
        return events.get_final_message()


def replay(message: anthropic.types.Message) -> Json:
    return {"role": "assistant", "content": [block.model_dump(mode="json") for block in message.content]}


def result(message: anthropic.types.Message, content: Any = "a.txt\nb.txt", **extra) -> Json:
    calls = [block for block in message.content if block.type == "tool_use"]
    blocks = [{"type": "tool_result", "tool_use_id": c.id, "content": content, **extra} for c in calls]
    return {"role": "user", "content": blocks}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_agents_row_is_exact_under_the_strict_matcher(serve, stream):
    """`input` travels as a value: the spaces and the 1.0 of the model's own text are not lost by it."""
    texts = [f"{THINK}I look.\n{ODD_CALL}", f"{THINK}{CALL}", "All done."]
    stand = serve(texts)
    session = create(stand.url)
    client = sdk(session)
    messages = [USER]
    for _ in range(3):
        message = ask(client, messages, stream, system="You are an agent.")
        messages += [replay(message), result(message)]
    assert [block.type for block in json_blocks(messages[1])] == ["thinking", "text", "tool_use"]
    assert messages[1]["content"][2]["input"] == {"command": "ls", "n": 1}
    assert message.stop_reason == "end_turn"
    [found] = trajectories(stand.url, session)
    sent = [request["input_ids"] for request in stand.engine.requests]
    for prompt, text in zip(sent, texts, strict=True):
        output = stand.assets.tokenizer.encode(f"{text}<|im_end|>")
        assert found["tokens"][: len(prompt) + len(output)] == prompt + output
    report = inspect(stand.url, session)
    assert report["counters"]["leaves"] == 1
    assert report["tito_session_mismatch"] == {}


def json_blocks(message):
    return [anthropic.types.Message.model_construct(**block) for block in message["content"]]


def test_stream_and_whole_give_the_same_message_and_commit(serve):
    texts = [
        f"{THINK}I look.\n{CALL}\n{ODD_CALL}",
        "</think> <tool_call>broken",
        "cut here…",
        f"{CALL[:50]}…",
    ]
    stand = serve(texts * 2)
    kept = []
    for stream in (False, True):
        session = create(stand.url)
        client, messages, answers = sdk(session), [USER], []
        for _ in texts:
            message = ask(client, messages, stream)
            plain = replay(message)["content"]
            for block in plain:
                block.pop("signature", None)
                if block["type"] == "tool_use":
                    assert block.pop("id").startswith("call_")
            usage = message.usage
            prompt = usage.input_tokens + usage.cache_read_input_tokens
            answers.append((plain, message.stop_reason, prompt, usage.output_tokens))
            messages += (
                [replay(message), result(message)]
                if message.stop_reason == "tool_use"
                else [
                    replay(message),
                    USER,
                ]
            )
        [found] = trajectories(stand.url, session)
        kept.append((answers, found["tokens"], found["logprobs"]))
    assert kept[0] == kept[1]
    assert [answer[1] for answer in kept[0][0]] == ["tool_use", "end_turn", "max_tokens", "max_tokens"]


def test_stream_events_in_their_order(serve):
    stand = serve([f"{THINK}I look.\n{CALL}"], engine={"token_latency": 0.01})
    session = create(stand.url)
    events = list(
        sdk(session).messages.create(model="m", max_tokens=500, messages=[USER], tools=TOOLS, stream=True)
    )
    kinds: list[str] = []
    for event in events:
        kind = event.type if event.type != "content_block_delta" else event.delta.type
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    assert kinds == [
        "message_start",
        *("content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    prompt = len(stand.engine.requests[0]["input_ids"])
    assert events[0].message.usage.input_tokens == prompt
    pieces = [event for event in events if event.type == "content_block_delta"]
    assert len([piece for piece in pieces if piece.delta.type == "input_json_delta"]) > 4
    assert [event.index for event in events if event.type == "content_block_start"] == [0, 1, 2]
    usage = events[-2].usage
    assert usage.input_tokens + usage.cache_read_input_tokens == prompt
    assert usage.output_tokens == len(stand.assets.tokenizer.encode(f"{THINK}I look.\n{CALL}<|im_end|>"))


def test_usage_tells_what_was_cached(serve):
    stand = serve(["one", "two"])
    session = create(stand.url)
    client = sdk(session)
    first = ask(client, [USER])
    second = ask(client, [USER, replay(first), USER], stream=True)
    assert second.usage.cache_read_input_tokens == first.usage.input_tokens + first.usage.output_tokens
    prompt = len(stand.engine.requests[1]["input_ids"])
    assert second.usage.input_tokens + second.usage.cache_read_input_tokens == prompt


def test_count_tokens_is_the_prompt_of_the_turn(serve):
    stand = serve([f"{THINK}I look.\n{ODD_CALL}", "done"])
    session = create(stand.url)
    client = sdk(session)
    options: Any = {"model": "m", "tools": TOOLS, "system": [{"type": "text", "text": "You are an agent."}]}
    counted = client.messages.count_tokens(messages=[USER], **options).input_tokens
    first = client.messages.create(messages=[USER], max_tokens=500, **options)
    assert counted == first.usage.input_tokens == len(stand.engine.requests[0]["input_ids"])
    longer: Any = [USER, replay(first), result(first)]
    counted = client.messages.count_tokens(messages=longer, **options).input_tokens
    assert inspect(stand.url, session)["turns"] == 1
    client.messages.create(messages=longer, max_tokens=500, **options)
    assert counted == len(stand.engine.requests[1]["input_ids"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("arguments", "value"),
    [('{"command": "echo', {}), ('{"command": "ls", "x": tru', {"command": "ls"}), ("[1]", {}), ('"ls"', {})],
)
def test_arguments_that_are_no_object_reach_the_client_as_one(serve, stream, arguments, value):
    text = f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'
    stand = serve([text, "ok"])
    session = create(stand.url)
    client = sdk(session)
    message = ask(client, [USER], stream)
    call = message.content[-1]
    assert call.type == "tool_use"
    assert call.input == value
    ask(client, [USER, replay(message), result(message, "bad arguments", is_error=True)], stream)
    report = inspect(stand.url, session)
    assert (report["turns"], report["counters"]["leaves"]) == (2, 1)
    assert "tool_result.is_error" in report["diagnostics"]["ignored"]


def test_a_session_goes_on_in_the_other_protocol(serve):
    """One conversation behind three doors."""
    stand = serve([f"{THINK}I look.\n{CALL}", "Seen.", "Bye."])
    session = create(stand.url)
    first = ask(sdk(session), [USER], system="You are an agent.")
    call = first.content[-1]
    history: Any = [
        {"role": "system", "content": "You are an agent."},
        USER,
        {
            "role": "assistant",
            "content": first.content[1].text,
            "reasoning_content": first.content[0].thinking,
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.input)},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "a.txt"},
    ]
    second = openai_sdk(session).chat.completions.create(model="m", messages=history, tools=CHAT_TOOLS)
    back = [USER, replay(first), result(first, "a.txt"), {"role": "assistant", "content": "Seen."}, USER]
    assert second.choices[0].message.content == "Seen."
    ask(sdk(session), back, system="You are an agent.")
    report = inspect(stand.url, session)
    assert (report["turns"], report["counters"]["leaves"]) == (3, 1)
    assert report["tito_session_mismatch"] == {}


def test_client_options_reach_the_engine(serve):
    stand = serve(["one STOP two"])
    session = create(stand.url)
    message = ask(
        sdk(session),
        [{"role": "user", "content": [{"type": "text", "text": "hi", **CACHED}]}],
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1.2.3; cch=abc;"},
            {"type": "text", "text": "You are"},
            {"type": "text", "text": "an agent.", **CACHED},
        ],
        stop_sequences=["STOP"],
        thinking={"type": "disabled"},
        metadata={"user_id": "me"},
        service_tier="auto",
        extra_headers={"anthropic-beta": "context-management-2025-06-27"},
        extra_body={
            "context_management": {"edits": []},
            "output_config": {"effort": "high", "format": SCHEMA},
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "novelty": 1,
        },
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert message.content[0].text == "one "
    [request] = stand.engine.requests
    params = request["sampling_params"]
    assert {name: params[name] for name in ("temperature", "top_p", "top_k", "stop", "max_new_tokens")} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stop": ["STOP"],
        "max_new_tokens": 500,
    }
    assert params["json_schema"] == '{"type":"object"}'
    prompt = stand.assets.tokenizer.decode(request["input_ids"])
    assert "You are\nan agent.\n" in prompt
    assert "billing" not in prompt
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert inspect(stand.url, session)["diagnostics"]["ignored"].keys() == {
        *("anthropic-beta", "metadata", "service_tier", "context_management", "novelty"),
        *("text.cache_control", "system.x-anthropic-billing-header"),
    }


def test_results_and_remarks_keep_their_order(serve):
    stand = serve([f"{CALL}\n{CALL}", "ok"])
    session = create(stand.url)
    client = sdk(session)
    message = ask(client, [USER])
    one, two = result(message)["content"]
    late = {"role": "user", "content": [{**two, "content": "second"}, {**one, "content": [
        {"type": "text", "text": "first"}, {"type": "text", "text": "part two"}]},
        {"type": "text", "text": "and now?"}]}  # fmt: skip
    system = {"role": "system", "content": "Be brief."}
    ask(client, [USER, replay(message), late, system])
    text = stand.assets.tokenizer.decode(stand.engine.requests[1]["input_ids"])
    places = [text.index(part) for part in ("second", "first\npart two", "and now?", "Be brief.")]
    assert places == sorted(places)
    assert inspect(stand.url, session)["counters"]["leaves"] == 1


def test_reasoning_is_known_by_its_signature(serve):
    stand = serve([f"{THINK}one", "two"])
    session = create(stand.url)
    client = sdk(session)
    message = ask(client, [USER])
    bare = replay(message)
    bare["content"][0]["thinking"] = ""
    ask(client, [USER, bare, USER])
    assert inspect(stand.url, session)["counters"]["leaves"] == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image' blocks"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "tool_use_id",
        ),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "must end with text"),
        ({"messages": [{"role": "assistant", "content": "I"}]}, "cannot come first"),
        (
            {"messages": [USER, {"role": "assistant", "content": "<tool_call>"}], "tools": TOOLS},
            "only the model",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "I"}], "output_config": {"format": SCHEMA}},
            "schema",
        ),
        ({"tools": [{"name": "x", "type": "bash_20250124"}]}, "bash_20250124"),
        ({"tools": [{"input_schema": {}}]}, "name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "look"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "all"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"input_ids": [1]}, "input_ids"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"system": 3}, "system"),
    ],
)
def test_refusals_have_anthropics_shape(fine, body, words):
    response = httpx.post(fine, json={"model": "m", "max_tokens": 5, "messages": [USER], **body})
    assert response.status_code == 400, response.text
    told = response.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert words in told["error"]["message"]


@pytest.fixture
def fine(serve):
    return create(serve(["fine"]).url).base_url + "/messages"


def test_errors_are_those_that_the_sdk_knows(serve):
    stand = serve(["fine"], max_body_bytes=2048)
    session = create(stand.url)
    with pytest.raises(anthropic.NotFoundError):
        ask(Anthropic(base_url=stand.url, api_key="nobody", max_retries=0), [USER])
    bare = {"model": "m", "max_tokens": 5, "messages": [USER]}
    assert httpx.post(f"{stand.url}/v1/messages", json=bare).json()["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.RequestTooLargeError):
        ask(sdk(session), [{"role": "user", "content": "x" * 4000}])
    stand.engine.faults.append(Fault("error", 0, 500))
    with pytest.raises(anthropic.APIStatusError) as failed:
        ask(sdk(session), [USER])
    assert (failed.value.status_code, failed.value.type) == (503, "overloaded_error")
    stand.engine.faults.append(Fault("error", 3, 500))
    with pytest.raises(anthropic.APIStatusError) as failed:
        ask(sdk(session), [USER], stream=True)
    assert failed.value.body["error"]["type"] == "overloaded_error"
    assert inspect(stand.url, session)["turns"] == 0


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(serve):
    stand = serve(["x" * 30], context_length=200)
    session = create(stand.url, limits={"turns": 1})
    client = sdk(session)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 199 maximum"):
        ask(client, [{"role": "user", "content": "long " * 200}])
    message = ask(client, [USER], tools=[])
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* budget of 1 turns"):
        ask(client, [USER, replay(message), USER], tools=[])


def test_session_by_key_or_header_alone(serve):
    stand = serve(["hello"])
    session = create(stand.url)
    for client in (
        Anthropic(base_url=stand.url, api_key=session.api_key, max_retries=0),
        Anthropic(base_url=stand.url, auth_token=session.api_key, max_retries=0),
        Anthropic(base_url=stand.url, api_key="anything", max_retries=0,
                  default_headers={"x-titogym-session": session.id}),
    ):  # fmt: skip
        assert ask(client, [USER]).content[0].text == "hello"
        assert [model.id for model in client.models.list()] == ["qwen3"]
        assert client.models.retrieve("qwen3").display_name == "qwen3"
    assert len(inspect(stand.url, session)["tree"]) == 3


def began(text: str) -> Json:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("family", ["qwen3", "quickstart"])
def test_an_answer_can_be_begun(serve, family, stream):
    """The beginning has no loss, the client is told what follows it, and the row goes on as one answer."""
    stand = serve([" look <at it.", "done"], family=family)
    session = create(stand.url)
    client = sdk(session)
    first = ask(client, [USER, began("So I <")], stream)
    assert [block.text for block in first.content if block.type == "text"] == [" look <at it."]
    ask(client, [USER, began("So I < look <at it."), USER])
    [found] = trajectories(stand.url, session)
    assert found["turns"] == 2
    encode, decode = stand.assets.tokenizer.encode, stand.assets.tokenizer.decode
    prompt = stand.engine.requests[0]["input_ids"]
    assert decode(prompt).endswith("So I <")
    sampled = encode(" look <at it.<|im_end|>")
    assert found["tokens"][: len(prompt) + len(sampled)] == prompt + sampled
    assert found["loss_mask"][: len(prompt) + len(sampled)] == [0] * len(prompt) + [1] * len(sampled)
    assert inspect(stand.url, session)["tito_session_mismatch"] == {}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_begun_answer_is_replayed_as_it_was(serve, stream):
    stand = serve([" look.", "done"])
    client = sdk(create(stand.url))
    key = {"idempotency-key": "k"}
    first, second = (ask(client, [USER, began("I")], stream, extra_headers=key) for _ in range(2))
    assert first.id == second.id
    assert first.content[0].text == second.content[0].text == " look."
    assert len(stand.engine.requests) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_that_was_cut_is_gone_on_with_in_its_own_tokens(serve, stream):
    """The cut answer comes back as the beginning of the next: not encoded again, but as it was sampled."""
    stand = serve([f"{THINK}I lo…", "ok around.", "done"])
    session = create(stand.url)
    client = sdk(session)
    cut = ask(client, [USER], stream)
    assert cut.stop_reason == "max_tokens"
    more = ask(client, [USER, replay(cut)], stream)
    assert [block.model_dump()["text"] for block in more.content] == ["ok around."]
    asked, went_on = (request["input_ids"] for request in stand.engine.requests)
    assert went_on == asked + stand.assets.tokenizer.encode(f"{THINK}I lo")
    merged = replay(cut)
    merged["content"][-1]["text"] += "ok around."
    ask(client, [USER, merged, USER])
    [found] = trajectories(stand.url, session)
    assert found["turns"] == 2
    assert inspect(stand.url, session)["diagnostics"]["divergence"]["turns"] == []
