"""The OpenAPI document, and what schemathesis makes of it: every answer is one that it announces."""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from tests.gateway.test_turns import create
from titogym.gateway.app import create_app
from titogym.gateway.openapi import document

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
OPERATIONS = [
    (method, path)
    for path, item in document("0")["paths"].items()
    for method in item
    if method != "parameters"
]


@pytest.fixture(scope="module")
def schema(module_serve):
    stand = module_serve(["fine"], context_length=4000)
    return stand, schemathesis.openapi.from_url(f"{stand.url}/openapi.json")


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=[f"{m}-{p}" for m, p in OPERATIONS])
def test_every_answer_is_announced(schema, method, path):
    """Paths without a session in them are the same endpoints once more."""
    stand, described = schema
    operation = described[path][method]
    modes = st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    cases = modes.flatmap(lambda mode: operation.as_strategy(generation_mode=mode))

    @settings(
        max_examples=2 if path.startswith("/v1/") else 6,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(case=cases, known=st.sampled_from([True, True, True, False]))
    def answered(case, known):
        session = create(stand.url, policy="branching")
        if known and "id" in (case.path_parameters or {}):
            case.path_parameters["id"] = session.id
        elif known:
            case.headers = {**(case.headers or {}), "x-titogym-session": session.id}
        if known and path == "/engines" and isinstance(case.body, dict):
            case.body["url"] = stand.engine.url
        case.call_and_validate(checks=CHECKS, timeout=20)

    try:
        answered()
    finally:  # the other tests need the one engine that there is
        taken_back = {"url": stand.engine.url, "draining": False}
        assert httpx.post(f"{stand.url}/engines", json=taken_back).json()["state"] == "up"


def test_every_route_but_the_viewers_is_described(schema):
    stand, _ = schema
    described = httpx.get(f"{stand.url}/openapi.json").json()["paths"].keys()
    routes = {
        route.path.replace(":path", "")
        for route in create_app(stand.settings).routes
        if isinstance(route, Route)
    }
    refused = {"/v1/completions", "/sessions/{id}/v1/completions"}
    assert {path for path in routes if "/v1/" in path} - refused <= described <= routes
    assert "/engines" in described
