"""Turns over HTTP, through the real OpenAI SDK, in front of a scripted engine."""

import asyncio
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion

from tests.doubles.scripted_engine import Fault
from titogym.gateway.client import GatewayClient, GatewayError, SessionHandle

Json = dict[str, Any]

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
THINK = "<think>\nI look first: é🎉.\n</think>\n\n"
USER = {"role": "user", "content": "Look around."}


def create(url: str, **body) -> SessionHandle:
    return SessionHandle(**httpx.post(f"{url}/sessions", json=body).raise_for_status().json())


def sdk(session: SessionHandle, **options) -> OpenAI:
    return OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0, **options)


def inspect(url: str, session: SessionHandle) -> Json:
    report: Json = httpx.get(f"{url}/sessions/{session.id}").raise_for_status().json()
    return report


def trajectories(url: str, session: SessionHandle) -> list[Json]:
    answer = httpx.get(f"{url}/sessions/{session.id}/trajectories").raise_for_status().json()
    found: list[Json] = answer["trajectories"]
    return found


def replay(completion: ChatCompletion) -> Json:
    message: Json = completion.choices[0].message.model_dump(exclude_none=True)
    return message


def agent(session: SessionHandle, turns: int, stream: bool) -> list[Json]:
    """A plain agent loop; returns its final messages."""
    client = sdk(session)
    messages: list[Json] = [{"role": "system", "content": "You are an agent."}, USER]
    for _ in range(turns):
        if stream:
            with client.chat.completions.stream(model="m", messages=messages, tools=TOOLS) as events:
                for _event in events:
                    pass
                completion = events.get_final_completion()
        else:
            completion = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        messages.append(replay(completion))
        for call in completion.choices[0].message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "a.txt\nb.txt"})
        if not completion.choices[0].message.tool_calls:
            break
    return messages


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("family", ["qwen3", "quickstart", "smollm2"])
def test_an_agents_row_is_what_the_engine_was_sent_and_gave_back(serve, family, stream):
    call = (
        CALL.replace("\n", "")
        if family == "quickstart"
        else (
            CALL
            if family != "smollm2"
            else '<tool_call>[{"name": "bash", "arguments": {"command": "ls"}}]</tool_call>'
        )
    )
    think = THINK if family == "qwen3" else ""
    stand = serve([f"{think}I look.\n{call}", f"{think}{call}", "All done."], family=family)
    session = create(stand.url)
    messages = agent(session, 5, stream)
    assert [m["role"] for m in messages[2:]] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert messages[2].get("reasoning_content", "") == ("I look first: é🎉." if think else "")
    [found] = trajectories(stand.url, session)
    sent = [request["input_ids"] for request in stand.engine.requests]
    assert len(sent) == 3
    encode = stand.assets.tokenizer.encode
    outputs = [
        encode(f"{text}<|im_end|>") for text in (f"{think}I look.\n{call}", f"{think}{call}", "All done.")
    ]
    for i, prompt in enumerate(sent):
        row = prompt + outputs[i]
        assert found["tokens"][: len(row)] == row
        assert found["loss_mask"][len(prompt) : len(row)] == [1] * len(outputs[i])
        expected = [stand.engine.logprob(k, token) for k, token in enumerate(outputs[i])]
        assert found["logprobs"][len(prompt) : len(row)] == expected
    assert len(found["tokens"]) == len(sent[-1]) + len(outputs[-1])
    assert sum(found["loss_mask"]) == sum(map(len, outputs))
    assert found["version_spans"] == [
        [len(p), len(p) + len(o), "default"] for p, o in zip(sent, outputs, strict=True)
    ]
    report = inspect(stand.url, session)
    assert report["tito_session_mismatch"] == {}
    assert (report["turns"], report["sampled_tokens"], report["errors"]) == (3, sum(map(len, outputs)), {})


def put_together(chunks) -> tuple[Json, str]:
    """The message that a client makes of a stream, and the finish reason."""
    message: Json = {"role": "assistant", "content": ""}
    finish = ""
    for chunk in chunks:
        [choice] = chunk.choices
        finish = choice.finish_reason or finish
        delta = choice.delta.model_dump(exclude_none=True)
        for name in ("content", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for part in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in part:
                assert part["index"] == len(calls)
                calls.append({"id": part["id"], "type": part["type"], "function": {**part["function"]}})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return message, finish


@pytest.mark.parametrize("family", ["qwen3", "quickstart", "smollm2"])
def test_stream_and_whole_give_the_same_tokens_message_and_commit(serve, family):
    texts = [f"{THINK}I look.\n{CALL}", "</think> <tool_call>broken", f"{CALL[:50]}…", "cut here…"]
    stand = serve(texts * 2, family=family)
    kept = []
    for stream in (False, True):
        session = create(stand.url)
        client = sdk(session)
        messages: list[Json] = [USER]
        answers = []
        for _ in texts:
            answer = client.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=stream)
            if stream:
                message, finish = put_together(answer)
            else:
                message, finish = replay(answer), answer.choices[0].finish_reason
            functions = [call["function"] for call in message.get("tool_calls", ())]
            text = message.get("content", ""), message.get("reasoning_content", "")
            answers.append((*text, functions, finish))
            messages += [message, {"role": "user", "content": "go on"}]
        found = trajectories(stand.url, session)[0]
        report = inspect(stand.url, session)
        kept.append((answers, found["tokens"], found["logprobs"], report["tito_session_mismatch"]))
    assert kept[0] == kept[1]
    assert [answer[-1] for answer in kept[0][0]][1:] == ["stop", "length", "length"]
    assert [request["stream"] for request in stand.engine.requests] == [False] * 4 + [True] * 4


def test_stream_events_in_their_order(serve):
    stand = serve([f"{THINK}I look.\n{CALL}"], engine={"token_latency": 0.01})
    session = create(stand.url)
    chunks = list(
        sdk(session).chat.completions.create(
            model="agent-model",
            messages=[USER],
            tools=TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.model for chunk in chunks} == {"agent-model"}
    assert chunks[0].choices[0].delta.role == "assistant"
    kinds: list[str] = []
    for chunk in chunks[1:-2]:
        [(name, _)] = chunk.choices[0].delta.model_dump(exclude_none=True).items()
        if not kinds or kinds[-1] != name:
            kinds.append(name)
        assert chunk.usage is None
    assert kinds == ["reasoning_content", "content", "tool_calls"]
    calls = [
        chunk.choices[0].delta.tool_calls[0] for chunk in chunks[1:-2] if chunk.choices[0].delta.tool_calls
    ]
    assert calls[0].function.name == "bash"
    assert calls[0].id.startswith("call_")
    assert "".join(call.function.arguments for call in calls) == '{"command": "ls"}'
    assert len(calls) > 4  # while they are sampled
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens == len(stand.engine.requests[0]["input_ids"])


def test_tokens_reach_the_client_while_the_engine_samples(serve):
    stand = serve(["abcdefghij" * 3], engine={"token_latency": 0.03})
    session = create(stand.url)
    stream = sdk(session).chat.completions.create(model="m", messages=[USER], stream=True)
    iterator = iter(stream)
    while not next(iterator).choices[0].delta.content:
        pass
    assert stand.engine.in_flight == 1
    assert inspect(stand.url, session)["in_flight"] == 1
    list(iterator)
    assert inspect(stand.url, session)["turns"] == 1


async def test_many_sessions_at_once(serve):
    stand = serve([f"{THINK}{CALL}"], engine={"token_latency": 0.001})
    async with GatewayClient(stand.url) as gateway:

        async def episode(n: int) -> None:
            session = await gateway.create_session(labels={"n": n})
            client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
            messages: list[Any] = [{"role": "user", "content": f"task {n}"}]
            for _ in range(3):
                completion = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
                [call] = completion.choices[0].message.tool_calls
                messages += [replay(completion), {"role": "tool", "tool_call_id": call.id, "content": f"{n}"}]
            [found] = await gateway.trajectories(session.id)
            assert found.turns == 3
            text = stand.assets.tokenizer.decode(found.tokens)
            assert f"task {n}<" in text
            await client.close()

        await asyncio.gather(*(episode(n) for n in range(24)))
        assert stand.engine.most_in_flight > 8
        assert {session["labels"]["n"] for session in await gateway.sessions()} == set(range(24))


def test_second_request_of_a_linear_session_waits_for_the_first(serve):
    stand = serve(["first answer", "second answer"], engine={"token_latency": 0.02})
    session = create(stand.url)

    async def both():
        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
        one = asyncio.create_task(client.chat.completions.create(model="m", messages=[USER]))
        await asyncio.sleep(0.1)
        two = asyncio.create_task(client.chat.completions.create(model="m", messages=[USER]))
        return await asyncio.gather(one, two)

    one, two = asyncio.run(both())
    assert stand.engine.most_in_flight == 1
    assert (one.choices[0].message.content, two.choices[0].message.content) == (
        "first answer",
        "second answer",
    )
    report = inspect(stand.url, session)
    assert [node["superseded"] for node in report["tree"]] == [True, False]


def test_session_by_api_key_alone(serve):
    stand = serve(["hello"])
    session = create(stand.url)
    client = OpenAI(base_url=f"{stand.url}/v1", api_key=session.api_key, max_retries=0)
    assert client.chat.completions.create(model="m", messages=[USER]).choices[0].message.content == "hello"
    assert client.models.list().data[0].id == "qwen3"
    assert inspect(stand.url, session)["turns"] == 1
    for key in ("Bearer nobody", "Basic bm9ib2R5", "nobody"):
        response = httpx.get(f"{stand.url}/v1/models", headers={"authorization": key})
        assert response.status_code in (401, 404)
        assert "error" in response.json()


# --- sampling -------------------------------------------------------------------------------------


def test_client_options_reach_the_engine_and_forced_ones_win(serve):
    stand = serve(["hello"])
    session = create(stand.url, sampling={"temperature": 0.7, "top_p": 1.0})
    sdk(session).chat.completions.create(
        model="m",
        messages=[USER],
        temperature=0.0,
        top_p=0.5,
        presence_penalty=0.5,
        seed=7,
        stop=["END", "STOP"],
        max_completion_tokens=50,
        extra_body={"top_k": 20, "chat_template_kwargs": {"enable_thinking": False, "colour": "red"}},
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    )
    [request] = stand.engine.requests
    params = request["sampling_params"]
    assert params["temperature"] == 0.7
    assert params["top_p"] == 1.0
    assert params["top_k"] == 20
    assert params["presence_penalty"] == 0.5
    assert params["sampling_seed"] == 7
    assert params["stop"] == ["END", "STOP"]
    assert params["max_new_tokens"] == 50
    assert params["json_schema"] == '{"type":"object"}'
    assert set(params["stop_token_ids"]) == stand.assets.stop_ids
    assert stand.assets.tokenizer.decode(request["input_ids"]).endswith("<think>\n\n</think>\n\n")
    ignored = inspect(stand.url, session)["diagnostics"]["ignored"]
    assert ignored.keys() == {"chat_template_kwargs.colour", "temperature", "top_p"}
    assert "forces" in ignored["temperature"]


def test_a_seed_that_the_engine_does_not_heed_is_listed(serve):
    stand = serve(["hello"])
    stand.engine.seeded = False
    session = create(stand.url)
    for _ in range(2):
        sdk(session).chat.completions.create(model="m", messages=[USER], seed=7)
    ignored = inspect(stand.url, session)["diagnostics"]["ignored"]
    assert "deterministic" in ignored.pop("seed")
    assert ignored == {}


def test_stop_strings_end_the_message_but_stay_in_the_row(serve):
    stand = serve(["one two STOP three", "next"])
    session = create(stand.url)
    client = sdk(session)
    first = client.chat.completions.create(model="m", messages=[USER], stop="STOP")
    assert first.choices[0].message.content == "one two "
    assert first.choices[0].finish_reason == "stop"
    client.chat.completions.create(model="m", messages=[USER, replay(first), USER])
    [found] = trajectories(stand.url, session)
    assert "one two STOP<|im_end|>" in stand.assets.tokenizer.decode(found["tokens"])
    causes = inspect(stand.url, session)["diagnostics"]["mismatch_causes"]
    assert list(causes) == ["stop string: it was sampled, and is no part of the message"]


def test_logprobs_are_the_engines(serve):
    stand = serve(["hi é🎉", "hi é🎉"])
    session = create(stand.url, policy="branching")
    client = sdk(session)
    whole = client.chat.completions.create(model="m", messages=[USER], logprobs=True)
    entries = whole.choices[0].logprobs.content
    chunks = client.chat.completions.create(model="m", messages=[USER], logprobs=True, stream=True)
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    ids = stand.assets.tokenizer.encode("hi é🎉<|im_end|>")
    assert [entry.logprob for entry in entries] == [
        stand.engine.logprob(i, token) for i, token in enumerate(ids)
    ]
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "hi é🎉<|im_end|>"
    assert streamed == entries


# --- limits ---------------------------------------------------------------------------------------


def test_output_is_clipped_to_the_context_and_a_prompt_that_does_not_fit_is_refused(serve):
    stand = serve(["x" * 500 + "…"], context_length=200)
    session = create(stand.url)
    client = sdk(session)
    first = client.chat.completions.create(model="m", messages=[USER], max_tokens=100_000)
    prompt = len(stand.engine.requests[0]["input_ids"])
    assert stand.engine.requests[0]["sampling_params"]["max_new_tokens"] == 200 - prompt
    assert first.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="m", messages=[USER, replay(first), USER])
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.type == "invalid_request_error"
    assert refused.value.param == "messages"
    assert "maximum context length is 200 tokens" in str(refused.value)
    report = inspect(stand.url, session)
    assert (report["turns"], report["errors"]) == (1, {"context_length_exceeded": 1})
    assert report["exhausted"] is None


def test_answer_cut_by_length_is_continued(serve):
    stand = serve(["cut he…", "re and on"])
    session = create(stand.url)
    client = sdk(session)
    first = client.chat.completions.create(model="m", messages=[USER])
    client.chat.completions.create(model="m", messages=[USER, replay(first), USER])
    [found] = trajectories(stand.url, session)
    text = stand.assets.tokenizer.decode(found["tokens"])
    assert "cut he<|im_end|>\n<|im_start|>user\nLook around.<|im_end|>\n" in text
    end = len(stand.engine.requests[0]["input_ids"]) + len("cut he")
    assert found["loss_mask"][end - 1 : end + 1] == [1, 0]  # the closer was not sampled
    assert inspect(stand.url, session)["tito_session_mismatch"] == {}


@pytest.mark.parametrize(("limits", "exhausted"), [({"turns": 2}, "turns"), ({"tokens": 8}, "tokens")])
def test_budget_of_a_session(serve, limits, exhausted):
    stand = serve(["abc"])  # 4 tokens with the stop token
    session = create(stand.url, limits=limits)
    client = sdk(session)
    messages: list[Any] = [USER]
    for _ in range(2):
        messages += [replay(client.chat.completions.create(model="m", messages=messages)), USER]
    again = client.chat.completions.create(model="m", messages=messages[:-2])  # a retry costs nothing
    messages[-2] = replay(again)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="m", messages=messages)
    assert refused.value.code == "context_length_exceeded"
    assert exhausted in str(refused.value)
    report = inspect(stand.url, session)
    assert report["exhausted"] == exhausted
    assert report["last_error"]["code"] == "context_length_exceeded"


def test_token_budget_bounds_the_answer(serve):
    stand = serve(["abcdefgh"])
    session = create(stand.url, limits={"tokens": 5})
    answer = sdk(session).chat.completions.create(model="m", messages=[USER])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("abcde", "length")


# --- retries --------------------------------------------------------------------------------------


def test_invalid_retry_changes_nothing(serve):
    """A retry of the latest turn that is itself refused must not have rolled that turn back."""
    stand = serve(["one", "two", "three"])
    session = create(stand.url)
    client = sdk(session)
    first = client.chat.completions.create(model="m", messages=[USER])
    second_request = [USER, replay(first), USER]
    second = client.chat.completions.create(model="m", messages=second_request)
    before = (inspect(stand.url, session)["tree"], trajectories(stand.url, session))
    for wrong in (
        {"messages": second_request, "temperature": -1},
        {"messages": second_request, "n": 2},
        {"messages": [*second_request, {"role": "tool", "content": "x", "tool_call_id": ""}]},
        {"messages": [*second_request[:-1], {"role": "user", "content": "long " * 3000}]},
        {"messages": [USER, {"role": "assistant", "content": "never said"}, USER]},
    ):
        with pytest.raises(openai.APIStatusError):
            client.chat.completions.create(model="m", **wrong)
    assert (inspect(stand.url, session)["tree"], trajectories(stand.url, session)) == before
    third = client.chat.completions.create(model="m", messages=[*second_request, replay(second), USER])
    assert third.choices[0].message.content == "three"
    assert inspect(stand.url, session)["turns"] == 3


def test_divergence_in_a_linear_session_is_a_conflict(serve):
    stand = serve(["one", "two"])
    session = create(stand.url)
    client = sdk(session)
    first = client.chat.completions.create(model="m", messages=[USER])
    client.chat.completions.create(model="m", messages=[USER, replay(first), USER])
    patient = sdk(session).with_options(max_retries=2)
    with pytest.raises(openai.ConflictError) as refused:
        patient.chat.completions.create(model="m", messages=[USER])
    assert refused.value.code == "conversation_diverged"
    assert inspect(stand.url, session)["errors"] == {"conversation_diverged": 1}  # the SDK did not insist


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        Fault("error", 0, 500),
        Fault("error", 3, 500),
        Fault("drop", 3),
        Fault("abort", 3, 503),
        Fault("null_logprobs"),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.after_tokens}",
)
def test_failed_generation_commits_nothing_and_the_turn_can_be_tried_again(serve, fault, stream):
    stand = serve(["all good"])
    session = create(stand.url)
    client = sdk(session)
    stand.engine.faults.append(fault)

    def ask():
        answer = client.chat.completions.create(model="m", messages=[USER], stream=stream)
        return (
            "".join(c.choices[0].delta.content or "" for c in answer)
            if stream
            else answer.choices[0].message.content
        )

    with pytest.raises(openai.APIError) as failed:
        ask()
    assert failed.value.code == "engine_unavailable"
    if isinstance(failed.value, openai.APIStatusError):
        assert failed.value.status_code == 503
        assert failed.value.response.headers["retry-after"] == "1"
    report = inspect(stand.url, session)
    assert (report["turns"], report["errors"]) == (0, {"engine_unavailable": 1})
    assert ask() == "all good"


def test_dead_engine_gives_a_clear_503(serve):
    stand = serve(["hello"])
    session = create(stand.url)
    assert httpx.get(f"{stand.url}/ready").status_code == 200
    sdk(session).chat.completions.create(model="m", messages=[USER])
    stand.engine.stop()
    assert httpx.get(f"{stand.url}/ready").status_code == 503
    assert httpx.get(f"{stand.url}/health").status_code == 200
    with pytest.raises(openai.InternalServerError) as failed:
        sdk(session).chat.completions.create(model="m", messages=[USER])
    assert failed.value.status_code == 503
    assert failed.value.code == "engine_unavailable"


# --- administration -------------------------------------------------------------------------------


async def test_admin_routes_need_the_admin_key(serve):
    stand = serve(["hello"], admin_key="correct-horse")
    async with GatewayClient(stand.url, "correct-horse") as gateway:
        session = await gateway.create_session()
        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
        await client.chat.completions.create(model="m", messages=[USER])
        assert (await gateway.inspect(session.id))["turns"] == 1
        for key in (None, session.api_key, "correct-hors", "correct-horse-"):
            async with GatewayClient(stand.url, key) as stranger:
                for attempt in (
                    stranger.create_session(),
                    stranger.sessions(),
                    stranger.inspect(session.id),
                    stranger.trajectories(session.id),
                    stranger.delete(session.id),
                ):
                    with pytest.raises(GatewayError) as refused:
                        await attempt
                    assert refused.value.status == 401
        assert await gateway.ready()
    assert httpx.get(f"{stand.url}/metrics").status_code == 401  # noqa: ASYNC210


async def test_turns_as_messages(serve):
    stand = serve([f"{THINK}I look.\n{CALL}", "done"])
    async with GatewayClient(stand.url) as gateway:
        session = await gateway.create_session()
        messages = await asyncio.to_thread(agent, session, 2, False)
        first, second = await gateway.turns(session.id)
    assert first["messages"] == messages[:2]
    assert first["answer"] == {**messages[2], "refusal": None}
    assert second["messages"] == messages[3:4]
    assert second["answer"]["content"] == "done"
    assert (second["id"], second["parent"], second["turn"], second["superseded"]) == (1, 0, 2, False)
    assert second["prompt_tokens"] == len(stand.engine.requests[1]["input_ids"])
    assert second["cached_tokens"] == first["prompt_tokens"] + first["output_tokens"]


async def test_life_of_a_session(serve):
    stand = serve(["hello"])
    async with GatewayClient(stand.url) as gateway:
        session = await gateway.create_session(labels={"task": "t1"}, family="qwen3")
        assert session.base_url == f"{stand.url}/sessions/{session.id}/v1"
        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
        await client.chat.completions.create(model="m", messages=[USER])
        metrics = (await asyncio.to_thread(httpx.get, f"{stand.url}/metrics")).text
        assert 'titogym_turns_total{finish="stop"} 1\n' in metrics
        await gateway.delete(session.id)
        for attempt in (gateway.inspect(session.id), gateway.delete(session.id)):
            with pytest.raises(GatewayError, match="no such session"):
                await attempt
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="m", messages=[USER])
        with pytest.raises(GatewayError, match="serves family qwen3"):
            await gateway.create_session(family="smollm2")
        with pytest.raises(GatewayError, match=r"sampling\.colour"):
            await gateway.create_session(sampling={"colour": 1})


def test_oversized_and_broken_bodies(serve):
    stand = serve(["hello"], max_body_bytes=4096)
    session = create(stand.url)
    url = f"{session.base_url}/chat/completions"
    assert httpx.post(url, content=b"x" * 5000).status_code == 413
    for body in (
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff",
        b'{"messages": "x"}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ):
        response = httpx.post(url, content=body)
        assert response.status_code == 400, body
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert httpx.post(f"{session.base_url}/embeddings", json={}).json()["error"]["code"] == "no_such_endpoint"
    assert stand.engine.requests == []


@pytest.mark.parametrize("by_path", [True, False])
def test_text_completions_are_refused_with_advice(serve, by_path):
    stand = serve(["hi"])
    session = create(stand.url)
    client = sdk(session) if by_path else OpenAI(base_url=f"{stand.url}/v1", api_key=session.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="m", prompt="x")
    assert caught.value.response.json() == {
        "error": {
            "message": "Text completions bypass the chat template: use /v1/chat/completions.",
            "type": "invalid_request_error",
            "param": None,
            "code": "unsupported_endpoint",
        }
    }
    assert stand.engine.requests == []
    assert inspect(stand.url, session)["turns"] == 0
