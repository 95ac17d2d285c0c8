"""The OpenAI Responses protocol over HTTP, through the real OpenAI SDK."""

from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.doubles.scripted_engine import Fault
from tests.gateway.test_turns import CALL, THINK, create, inspect, sdk, trajectories
from tests.gateway.test_turns import TOOLS as CHAT_TOOLS

Json = dict[str, Any]

TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]
USER: Any = {"role": "user", "content": "Look around."}
ODD_CALL = '<tool_call>\n{"name": "bash", "arguments": { "command" : "ls" }}\n</tool_call>'


def ask(client, items: Any, stream: bool = False, **options) -> Response:
    options = {"model": "agent-model", "tools": TOOLS, **options}
    if not stream:
        response: Response = client.responses.create(input=items, **options)
        return response
    with client.responses.stream(input=items, **options) as events:
        final = None
        for event in events:
            if event.type in ("response.completed", "response.incomplete"):
                final = event.response
        assert final is not None
        return final


def replay(response: Response) -> list[Any]:
    return [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]


def outputs(response: Response, text: str = "a.txt\nb.txt") -> list[Any]:
    calls = [item for item in response.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": call.call_id, "output": text} for call in calls]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("memory", ["previous", "full", "unstored", "bare", "references"])
def test_an_agents_row_is_exact_however_it_keeps_its_history(serve, stream, memory):
    texts = [f"{THINK}I look.\n{ODD_CALL}", f"{THINK}{CALL}\n{CALL}", "All done."]
    stand = serve(texts)
    session = create(stand.url)
    client = sdk(session)
    options: Any = {"instructions": "You are an agent."}
    if memory in ("unstored", "bare"):
        options |= {"store": False, "include": ["reasoning.encrypted_content"]}
    items: Any = [USER]
    for _ in range(3):
        response = ask(client, items, stream, **options)
        if memory == "previous":
            items, options["previous_response_id"] = outputs(response), response.id
            continue
        said = replay(response)
        if memory == "references":
            said = [{"type": "item_reference", "id": item["id"]} for item in said]
        if memory == "bare":  # what a client keeps that shows no reasoning
            for item in said:
                item.pop("content") if item["type"] == "reasoning" else item.pop("id")
        items += [*said, *outputs(response)]
    assert response.output_text == "All done."
    assert response.status == "completed"
    [found] = trajectories(stand.url, session)
    sent = [request["input_ids"] for request in stand.engine.requests]
    for prompt, text in zip(sent, texts, strict=True):
        output = stand.assets.tokenizer.encode(f"{text}<|im_end|>")
        assert found["tokens"][: len(prompt) + len(output)] == prompt + output
    report = inspect(stand.url, session)
    assert (report["counters"]["leaves"], report["tito_session_mismatch"]) == (1, {})


def test_stream_and_whole_give_the_same_response_and_commit(serve):
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
        client, items, answers = sdk(session), [USER], []
        for _ in texts:
            response = ask(client, items, stream)
            plain = replay(response)
            for item in plain:
                for name in ("id", "call_id"):
                    item.pop(name, None)
            reason = response.incomplete_details and response.incomplete_details.reason
            usage = (response.usage.input_tokens, response.usage.output_tokens)
            answers.append((plain, response.status, reason, usage))
            items = [*items, *replay(response), *(outputs(response) or [USER])]
        [found] = trajectories(stand.url, session)
        kept.append((answers, found["tokens"], found["logprobs"]))
    assert kept[0] == kept[1]
    assert [answer[1] for answer in kept[0][0]] == ["completed", "completed", "incomplete", "incomplete"]
    assert kept[0][0][2][2] == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_says_nothing_has_an_item_and_keeps_its_place(serve, stream):
    stand = serve(["", "All done."])
    session = create(stand.url)
    empty = ask(sdk(session), [USER], stream)
    assert [(item.type, item.content[0].text) for item in empty.output] == [("message", "")]
    ask(sdk(session), [USER, *replay(empty), USER], stream)
    counters = inspect(stand.url, session)["counters"]
    assert (counters["roots"], counters["superseded"]) == (1, 0)


def test_stream_events_in_their_order(serve):
    stand = serve([f"{THINK}I look.\n{CALL}"], engine={"token_latency": 0.01})
    session = create(stand.url)
    events = list(sdk(session).responses.create(model="m", input=[USER], tools=TOOLS, stream=True))
    kinds: list[str] = []
    for event in events:
        if not kinds or kinds[-1] != event.type:
            kinds.append(event.type)
    assert [kind.removeprefix("response.") for kind in kinds] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [event for event in events if event.type == "response.output_item.added"]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in added] == [0, 1, 2]
    assert [event.item.id for event in added] == [event.item.id for event in done]
    assert [event.item for event in done] == events[-1].response.output
    pieces = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 4
    assert "".join(piece.delta for piece in pieces) == '{"command": "ls"}'


def test_a_stored_response_comes_back_as_it_was_given(serve):
    stand = serve([f"{THINK}I look.\n{CALL}", "done"])
    session = create(stand.url)
    client = sdk(session)
    options: Any = {"instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5}
    first = ask(client, [USER], **options)
    second = ask(client, outputs(first), previous_response_id=first.id, **options)
    for response in (first, second):
        assert client.responses.retrieve(response.id) == response
    stored = client.responses.retrieve(second.id)
    assert stored.instructions == "Be brief."
    assert (stored.metadata, stored.previous_response_id) == ({"a": "b"}, first.id)
    listed = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in listed] == [
        *("message", "reasoning", "message", "function_call", "function_call_output")
    ]
    page = client.responses.input_items.list(second.id, limit=2)
    assert [item.type for item in page.data] == ["function_call_output", "function_call"]
    assert len(list(page)) == 5
    with pytest.raises(openai.APIStatusError, match="keeps every turn"):
        client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_nothing")
    hidden = ask(
        client, [USER, *replay(first), *outputs(first), *replay(second), USER], store=False, **options
    )
    with pytest.raises(openai.NotFoundError, match="was not stored"):
        client.responses.retrieve(hidden.id)


def test_stored_responses_outlive_the_gateway(serve, tmp_path):
    stand = serve([f"{THINK}I look.\n{CALL}", "done"], journal=tmp_path / "journal.db")
    session = create(stand.url)
    client = sdk(session)
    first = ask(client, [USER])
    stand.restart()
    assert client.responses.retrieve(first.id) == first
    ask(client, outputs(first), previous_response_id=first.id)
    assert inspect(stand.url, session)["counters"]["leaves"] == 1


def test_instructions_hold_for_their_own_response(serve):
    stand = serve(["one", "two"])
    session = create(stand.url, policy="branching")
    client = sdk(session)
    first = ask(client, "hi", instructions="Be brief.")
    ask(client, "and?", instructions="Be long.", previous_response_id=first.id)
    text = stand.assets.tokenizer.decode(stand.engine.requests[1]["input_ids"])
    assert "Be long." in text
    assert "Be brief." not in text
    assert "one<|im_end|>" in text


def test_tools_that_take_text_and_tools_in_namespaces(serve):
    calls = [
        '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n"}}\n</tool_call>',
        '<tool_call>\n{"name": "agents__spawn", "arguments": {"task": "x"}}\n</tool_call>',
    ]
    stand = serve(["\n".join(calls), "ok"] * 2)
    tools = [
        {"type": "custom", "name": "patch", "description": "Apply a patch.", "format": {"type": "text"}},
        {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [
            {"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}]},
        {"type": "web_search"},
    ]  # fmt: skip
    for stream in (False, True):
        session = create(stand.url)
        client = sdk(session)
        response = ask(client, [USER], stream, tools=tools)
        patch, spawn = response.output
        assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", "*** Begin\n")
        assert (spawn.type, spawn.name, spawn.namespace) == ("function_call", "spawn", "agents")
        results = [
            {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "applied"},
            {"type": "function_call_output", "call_id": spawn.call_id, "output": [
                {"type": "input_text", "text": "spawned"}]},
        ]  # fmt: skip
        ask(client, [USER, *replay(response), *results], stream, tools=tools)
        report = inspect(stand.url, session)
        assert report["counters"]["leaves"] == 1
        assert report["diagnostics"]["ignored"].keys() == {"tools.web_search", "tools[].format"}


def test_client_options_reach_the_engine(serve):
    stand = serve(["x"])
    session = create(stand.url)
    response = ask(
        sdk(session),
        "hi",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=50,
        reasoning={"effort": "none", "summary": "auto"},
        text={
            "format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}},
            "verbosity": "low",
        },
        parallel_tool_calls=True,
        tool_choice="auto",
        truncation="disabled",
        prompt_cache_key="k",
        extra_body={"client_metadata": {"a": "b"}},
    )
    assert response.max_output_tokens == 50
    [request] = stand.engine.requests
    params = request["sampling_params"]
    assert (params["temperature"], params["top_p"], params["max_new_tokens"]) == (0.5, 0.9, 50)
    assert params["json_schema"] == '{"type":"object"}'
    assert stand.assets.tokenizer.decode(request["input_ids"]).endswith("<think>\n\n</think>\n\n")
    ignored = inspect(stand.url, session)["diagnostics"]["ignored"]
    assert ignored.keys() == {"client_metadata", "prompt_cache_key", "reasoning.summary", "text.verbosity"}


def test_input_tokens_are_those_of_the_turn(serve):
    stand = serve([f"{THINK}I look.\n{CALL}", "done"])
    session = create(stand.url)
    client = sdk(session)
    first = ask(client, [USER])
    more: Any = {"input": outputs(first), "previous_response_id": first.id, "model": "m", "tools": TOOLS}
    counted = client.responses.input_tokens.count(**more).input_tokens
    client.responses.create(**more)
    assert counted == len(stand.engine.requests[1]["input_ids"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"include": "all"}, "include"),
        ({"store": "yes"}, "store"),
        ({"input_ids": [1]}, "input_ids"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fine, body, param):
    response = httpx.post(fine, json={"model": "m", "input": "hi", **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_an_unknown_reference_is_not_found(fine):
    item = {"type": "item_reference", "id": "rs_" + 24 * "0"}
    response = httpx.post(fine, json={"model": "m", "input": [USER, item]})
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "input[1]"


@pytest.fixture
def fine(serve):
    return create(serve(["fine"]).url).base_url + "/responses"


def test_a_failure_in_mid_stream_ends_it_as_failed(serve):
    stand = serve(["all good"])
    session = create(stand.url)
    stand.engine.faults.append(Fault("error", 3, 500))
    events = list(sdk(session).responses.create(model="m", input="hi", stream=True))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert events[-1].response.error.code == "engine_unavailable"
    assert inspect(stand.url, session)["turns"] == 0
