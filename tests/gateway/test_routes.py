"""Expert routes of sessions: asked for once, kept small, and never paired with the wrong log-probs."""

import json
import struct
import threading
from base64 import b64decode
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.forest import answer, tree, turn, user
from tests.gateway.test_disconnect import until
from tests.gateway.test_turns import CALL, TOOLS, USER, agent, create, sdk, trajectories
from titogym.gateway.client import GatewayClient
from titogym.gateway.engines.control import EngineControl
from titogym.gateway.routes import RouteShape, first_missing, route_shape
from titogym.gateway.trajectories import cut

LAYERS, TOP_K, EXPERTS = SHAPE = 3, 2, 60
MOE = {"num_hidden_layers": LAYERS, "num_experts_per_tok": TOP_K, "num_experts": EXPERTS}


@pytest.fixture
def moe(model_dirs):
    """The model folder of the tests, as that of a mixture-of-experts model."""
    path = model_dirs["qwen3"] / "config.json"
    before = path.read_text()
    path.write_text(json.dumps({**json.loads(before), **MOE}))
    yield
    path.write_text(before)


def rows(trajectory: dict[str, Any]) -> list[list[int]]:
    routes = trajectory["routes"]
    assert (routes["layers"], routes["top_k"], routes["itemsize"]) == (LAYERS, TOP_K, 1)
    data, size = b64decode(routes["data"]), LAYERS * TOP_K
    return [list(data[i : i + size]) for i in range(0, len(data), size)]


def test_a_sessions_routes_are_asked_for_once_and_cover_its_row(serve, moe):
    stand = serve([f"one\n{CALL}", f"two\n{CALL}", "three"], engine={"experts": SHAPE})
    session = create(stand.url, routes=True)
    agent(session, 5, stream=True)
    [found] = trajectories(stand.url, session)
    tokens = found["tokens"]
    assert rows(found) == [stand.engine.routes(i, token) for i, token in enumerate(tokens[:-1])]
    starts = [request["routed_experts_start_len"] for request in stand.engine.requests]
    assert starts == [0, *(len(row) - 1 for row in list(stand.engine._served)[:-1])]
    assert all(request["return_routed_experts"] for request in stand.engine.requests)


def test_turns_that_were_cut_by_length_leave_no_gap(serve, moe):
    stand = serve(["never ending…", "again…", "done"], engine={"experts": SHAPE})
    session = create(stand.url, routes=True)
    client, messages = sdk(session), [USER]
    for _ in range(3):
        answer = client.chat.completions.create(model="m", messages=messages)
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}, USER]
    [found] = trajectories(stand.url, session)
    assert rows(found) == [stand.engine.routes(i, t) for i, t in enumerate(found["tokens"][:-1])]


def test_sessions_that_do_not_ask_get_none(serve, moe):
    stand = serve(["x"], engine={"experts": SHAPE})
    session = create(stand.url)
    sdk(session).chat.completions.create(model="m", messages=[USER])
    assert trajectories(stand.url, session)[0]["routes"] is None
    assert "return_routed_experts" not in stand.engine.requests[0]


def test_a_model_without_experts_has_no_routes(serve):
    stand = serve(["x"])
    refused = httpx.post(f"{stand.url}/sessions", json={"routes": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "routes")


def test_missing_routes_fail_the_turn(serve, moe):
    stand = serve(["x"])  # an engine that was not told to return them
    session = create(stand.url, routes=True)
    with pytest.raises(openai.APIStatusError, match="enable-return-routed-experts") as caught:
        sdk(session).chat.completions.create(model="m", messages=[USER])
    assert (caught.value.status_code, caught.value.code) == (502, "routes_missing")
    assert trajectories(stand.url, session) == []
    stand.engine.experts = (LAYERS + 1, TOP_K, EXPERTS)
    with pytest.raises(openai.APIStatusError, match="rows of expert routes"):
        sdk(session).chat.completions.create(model="m", messages=[USER])


def test_routes_survive_a_restart(serve, moe, tmp_path):
    stand = serve([f"one\n{CALL}", "two"], engine={"experts": SHAPE}, journal=tmp_path / "j.sqlite")
    session = create(stand.url, routes=True)
    agent(session, 5, stream=False)
    before = trajectories(stand.url, session)
    stand.restart()
    assert trajectories(stand.url, session) == before


async def test_the_client_reads_them(serve, moe):
    stand = serve(["x"], engine={"experts": SHAPE})
    async with GatewayClient(stand.url) as client:
        session = await client.create_session(routes=True)
        await openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key).chat.completions.create(
            model="m", messages=[USER]
        )
        [found] = await client.trajectories(session.id)
        assert found.routes is not None
        assert len(found.routes.data) == (len(found.tokens) - 1) * LAYERS * TOP_K


@pytest.mark.parametrize("asked", [True, False])
def test_tokens_sampled_before_a_retraction_carry_no_loss_where_routes_do(serve, moe, asked):
    """Their log-probs are of the first pass through the model, the routes of the second."""
    stand = serve(["abcdefgh"], engine={"experts": SHAPE, "token_latency": 0.1})
    session = create(stand.url, routes=asked)
    thread = threading.Thread(
        target=lambda: sdk(session).chat.completions.create(model="m", messages=[USER], tools=TOOLS)
    )
    thread.start()
    until(lambda: stand.engine.in_flight == 1)
    generation = next(iter(stand.engine._in_flight.values()))
    until(lambda: len(generation.output) >= 3)
    with EngineControl(stand.engine.url) as control:
        control.pause("retract")
        control.set_weight_version("new")
        control.resume()
    thread.join(20)
    [found] = trajectories(stand.url, session)
    (start, switch, _), (_, end, version) = found["version_spans"]
    assert (version, end) == ("new", len(found["tokens"]))
    assert start + 3 <= switch < end
    assert found["loss_mask"][start:end] == [0 if asked else 1] * (switch - start) + [1] * (end - switch)
    assert [lp != 0.0 for lp in found["logprobs"]] == [mask == 1 for mask in found["loss_mask"]]
    if asked:
        assert rows(found) == [stand.engine.routes(i, t, 1) for i, t in enumerate(found["tokens"][:-1])]


@given(st.data())
def test_packing_keeps_every_number(data):
    experts = data.draw(st.sampled_from([2, 8, 256, 257, 1000, 65536]))
    shape = RouteShape(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), experts)
    count = data.draw(st.integers(0, 5))
    size = count * shape.layers * shape.top_k
    numbers = data.draw(st.lists(st.integers(0, experts - 1), min_size=size, max_size=size))
    packed = shape.pack(struct.pack(f"<{size}i", *numbers), count)
    assert len(packed) == count * shape.row
    assert list(struct.unpack(f"<{size}{'B' if shape.itemsize == 1 else 'H'}", packed)) == numbers
    assert shape.itemsize == (1 if experts <= 256 else 2)


@pytest.mark.parametrize("number", [-1, 60, 1 << 20])
@pytest.mark.parametrize("experts", [60, 300])
def test_a_number_that_is_no_expert_is_refused(number, experts):
    number = experts if number == 60 else number
    with pytest.raises(ValueError, match="expert"):
        RouteShape(1, 1, experts).pack(struct.pack("<2i", 0, number), 2)
    with pytest.raises(ValueError, match="1 rows"):
        RouteShape(1, 1, experts).pack(bytes(4), 2)


def test_the_shape_is_read_from_the_models_config(tmp_path):
    assert route_shape(tmp_path) is None
    for config in (MOE, {"text_config": {**MOE, "n_routed_experts": EXPERTS, "num_experts": None}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert route_shape(tmp_path) == RouteShape(LAYERS, TOP_K, EXPERTS)


def test_what_a_parent_holds():
    assert [first_missing(*case) for case in ((0, 0), (9, 0), (9, 1), (9, 2))] == [0, 8, 8, 7]


@pytest.mark.parametrize("trim", [0, 1, 2])
def test_trimmed_tokens_take_their_routes_along(trim):
    grown = tree("strict")
    first = turn(grown, [user("a")], answer("b"), prompt=(1, 2), output=(3, 4, 5), routes=bytes([1, 2, 3, 4]))
    kept = first_missing(first.length, trim)
    fresh = range(100 + kept, 100 + first.length - trim + 2)
    turn(
        grown,
        [user("a"), answer("b"), user("c")],
        answer("d"),
        trim=trim,
        prompt=(6, 7),
        output=(8,),
        routes=bytes(fresh),
    )
    [found] = cut("s", grown, shape=RouteShape(1, 1, 256))
    assert found.routes is not None
    assert list(found.routes.data) == [*range(1, kept + 1), *fresh]
    assert len(found.routes.data) == len(found.tokens) - 1


def test_a_row_with_a_gap_in_its_routes_is_never_given_out():
    grown = tree("strict")
    turn(grown, [user("a")], answer("b"), routes=bytes(2))
    with pytest.raises(ValueError, match="lacks expert routes"):
        cut("s", grown, shape=RouteShape(1, 1, 256))
