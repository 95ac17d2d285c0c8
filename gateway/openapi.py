"""The gateway's OpenAPI document.

The schema of a session's options is that of `SessionSpec`. Request bodies of the three protocols are
described as far as every client must keep to them; further fields are the protocols' own.
"""

from collections.abc import Mapping
from typing import Any

from titogym.gateway.sessions.spec import SessionSpec

Json = dict[str, Any]

_ADMIN: list[Json] = [{"adminKey": []}]
_MODEL: list[Json] = [{"sessionKey": []}, {"sessionHeader": []}, {"anthropicKey": []}]
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}


def document(version: str) -> Json:
    schemas = SessionSpec.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas = {**schemas.pop("$defs", {}), "SessionSpec": schemas, **_SCHEMAS}
    return {
        "openapi": "3.1.0",
        "info": {"title": "titogym gateway", "version": version},
        "paths": {**_admin_paths(), **_model_paths("/sessions/{id}/v1"), **_model_paths("/v1")},
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "adminKey": {"type": "http", "scheme": "bearer"},
                "sessionKey": {"type": "http", "scheme": "bearer"},
                "sessionHeader": {"type": "apiKey", "in": "header", "name": "x-titogym-session"},
                "anthropicKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _admin_paths() -> Json:
    id = [_parameter("id", "path")]
    picker = _parameter("picker", "query", "dotted path of a function that chooses leaves")
    brief = _parameter("brief", "query", "with any value: leave out mismatches, which take long to find")
    texts = _parameter("texts", "query", "with any value: the text of each token too")
    return {
        "/health": {"get": _operation("Whether the gateway runs", _object())},
        "/ready": {"get": _operation("Whether an engine answers", _object(), errors=(503,))},
        "/metrics": {"get": _operation("Metrics for Prometheus", {"text/plain": {}}, security=_ADMIN)},
        "/engines": {
            "get": _operation("The state of each engine", _object(_ref("Engines")), security=_ADMIN),
            "post": _operation(
                "Give an engine no new requests, or give it some again",
                _object(_ref("Engine")),
                (400, 404, 413),
                _ADMIN,
                body=_ref("Drain"),
            ),
        },
        "/sessions": {
            "get": _operation("List sessions", _object(), security=_ADMIN),
            "post": _operation(
                "Create a session",
                _object(_ref("Session")),
                body=_ref("SessionSpec"),
                status=201,
                errors=(400, 413, 429),
                security=_ADMIN,
            ),
        },
        "/sessions/{id}": {
            "parameters": id,
            "get": {
                **_operation("Everything about a session but its tokens", _object(), (404,), _ADMIN),
                "parameters": [brief],
            },
            "delete": _operation("Delete a session", None, (404,), _ADMIN, status=204),
        },
        "/sessions/{id}/turns": {
            "parameters": id,
            "get": _operation("A session's turns as messages", _object(), (404,), _ADMIN),
        },
        "/sessions/{id}/trajectories": {
            "parameters": id,
            "get": {
                **_operation("A session's training sequences", _object(), (400, 404), _ADMIN),
                "parameters": [picker, texts],
            },
        },
    }


def _model_paths(base: str) -> Json:
    """What an agent may ask, under a session's own base URL or under the common one."""
    named = "{id}" in base
    id = [_parameter("id", "path")] if named else []
    security = None if named else _MODEL
    refusals = (400, 401, 404, 409, 413, 503)

    def turn(summary: str, body: str, answer: str, error: str = "OpenAIError") -> Json:
        answers = {**_object(_ref(answer)), "text/event-stream": {}}
        made = _operation(summary, answers, refusals, security, body=_ref(body), error=error)
        return {"parameters": id, "post": made}

    def read(summary: str, *parameters: Json, method: str = "get") -> Json:
        listed = [*id, *parameters]
        return {"parameters": listed, method: _operation(summary, _object(), (401, 404), security)}

    response = _parameter("response", "path")
    stored = read("A stored response", response)
    stored["delete"] = _operation("Not possible: a session keeps every turn", None, (405, 404, 401), security)
    items = read("What a stored response was asked with", response)
    items["get"]["parameters"] = [
        _parameter("order", "query"),
        _parameter("after", "query"),
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
    ]
    items["get"]["responses"]["400"] = _error_response("OpenAIError")
    count = _operation("Count the tokens of a prompt", _object(), refusals, security, body=_ref("Responses"))
    counted = _operation(
        "Count the tokens of a prompt",
        _object(),
        refusals,
        security,
        body=_ref("Messages"),
        error="AnthropicError",
    )
    paths = {
        "/chat/completions": turn("OpenAI Chat Completions", "ChatCompletions", "Answer"),
        "/messages": turn("Anthropic Messages", "Messages", "Answer", "AnthropicError"),
        "/messages/count_tokens": {"parameters": id, "post": counted},
        "/responses": turn("OpenAI Responses", "Responses", "Answer"),
        "/responses/input_tokens": {"parameters": id, "post": count},
        "/responses/{response}": stored,
        "/responses/{response}/input_items": items,
        "/models": read("The model that is served"),
        "/models/{model}": read("The model that is served", _parameter("model", "path")),
    }
    return {base + path: item for path, item in paths.items()}


def _operation(
    summary: str,
    answers: Json | None,
    errors: tuple[int, ...] = (),
    security: list[Json] | None = None,
    *,
    body: Json | None = None,
    status: int = 200,
    error: str = "OpenAIError",
) -> Json:
    """`answers` are the kinds of content of a success."""
    if security is _ADMIN:
        errors = (*errors, 401)
    success: Json = {"description": summary}
    if answers is not None:
        success["content"] = answers
    responses = {str(status): success, **{str(code): _error_response(error) for code in sorted(set(errors))}}
    made: Json = {"summary": summary, "responses": responses}
    if security is not None:
        made["security"] = security
    if body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return made


def _error_response(shape: str) -> Json:
    return {
        "description": "Refused, with the reason",
        "content": {"application/json": {"schema": _ref(shape)}},
    }


def _object(schema: Mapping[str, Any] | None = None) -> Json:
    return {"application/json": {"schema": schema or {"type": "object"}}}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _parameter(name: str, place: str, description: str = "") -> Json:
    parameter = {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
    if place == "path":
        parameter["schema"] = {"type": "string", "minLength": 1}
    return {**parameter, **({"description": description} if description else {})}


def _content(*parts: Json) -> Json:
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": list(parts)}}]}


def _message(roles: list[str], content: Json, **more: Json) -> Json:
    properties = {"role": {"enum": roles}, "content": content, **more}
    return {"type": "object", "properties": properties, "required": ["role", "content"]}


def _body(required: list[str], **properties: Json) -> Json:
    common = {
        "model": {"type": "string"},
        "stream": {"type": "boolean"},
        "temperature": {"type": "number", "minimum": 0},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    }
    return {"type": "object", "properties": {**common, **properties}, "required": required}


_COUNT = {"type": "integer", "minimum": 1}
_STRINGS = {"type": "array", "items": {"type": "string"}}
_OBJECT = {"type": "object"}
_FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "description": {"type": "string"},
        "parameters": _OBJECT,
    },
    "required": ["name"],
}
_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
            "required": ["name", "arguments"],
        },
    },
    "required": ["id", "type", "function"],
}
_SESSION = ["id", "base_url", "anthropic_base_url", "api_key"]
_SCHEMAS: Json = {
    "Engine": {
        "type": "object",
        "properties": {
            "url": {"type": "string"},
            "state": {"enum": ["up", "down", "draining"]},
            "in_flight": {"type": "integer", "minimum": 0},
        },
        "required": ["url", "state", "in_flight"],
    },
    "Engines": {
        "type": "object",
        "properties": {"engines": {"type": "array", "items": _ref("Engine")}},
        "required": ["engines"],
    },
    "Drain": {
        "type": "object",
        "properties": {"url": {"type": "string"}, "draining": {"type": "boolean"}},
        "required": ["url", "draining"],
    },
    "Session": {
        "type": "object",
        "properties": {name: {"type": "string"} for name in _SESSION},
        "required": _SESSION,
    },
    "Answer": _OBJECT,
    "OpenAIError": {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
                "required": ["message", "type", "param", "code"],
            }
        },
        "required": ["error"],
    },
    "AnthropicError": {
        "type": "object",
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
                "required": ["type", "message"],
            },
        },
        "required": ["type", "error"],
    },
    "ChatCompletions": _body(
        ["messages"],
        messages={
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    _message(["system", "developer", "user"], _content(_TEXT_PART)),
                    _message(
                        ["assistant"],
                        {"anyOf": [{"type": "string"}, {"type": "null"}]},
                        reasoning_content={"type": "string"},
                        tool_calls={"type": "array", "items": _CALL},
                    ),
                    _message(["tool"], {"type": "string"}, tool_call_id={"type": "string", "minLength": 1}),
                ]
            },
        },
        tools={
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "function"}, "function": _FUNCTION},
                "required": ["type", "function"],
            },
        },
        tool_choice={"anyOf": [{"enum": ["auto", "none", "required"]}, _OBJECT]},
        max_tokens=_COUNT,
        max_completion_tokens=_COUNT,
        stop={"anyOf": [{"type": "string"}, _STRINGS]},
        seed={"type": "integer"},
        n={"const": 1},
        logprobs={"type": "boolean"},
        stream_options={"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
        response_format=_OBJECT,
        reasoning_effort={"type": "string"},
        chat_template_kwargs=_OBJECT,
    ),
    "Messages": _body(
        ["messages", "max_tokens"],
        messages={
            "type": "array",
            "minItems": 1,
            "items": _message(["user", "assistant", "system"], _content(_TEXT_PART, _OBJECT)),
        },
        system=_content(_TEXT_PART),
        max_tokens=_COUNT,
        top_k={"type": "integer"},
        stop_sequences=_STRINGS,
        tools={
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "minLength": 1}, "input_schema": _OBJECT},
                "required": ["name", "input_schema"],
            },
        },
        tool_choice={"type": "object", "properties": {"type": {"enum": ["auto", "none", "any", "tool"]}}},
        thinking={"type": "object", "properties": {"type": {"enum": ["enabled", "disabled", "adaptive"]}}},
        output_config=_OBJECT,
    ),
    "Responses": _body(
        ["input"],
        input={
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "anyOf": [
                            _message(["system", "developer", "user", "assistant"], _content(_TEXT_PART)),
                            _OBJECT,
                        ]
                    },
                },
            ]
        },
        instructions={"type": "string"},
        previous_response_id={"type": "string"},
        max_output_tokens=_COUNT,
        store={"type": "boolean"},
        include=_STRINGS,
        tools={"type": "array", "items": {**_FUNCTION, "required": ["type", "name"]}},
        tool_choice={"anyOf": [{"enum": ["auto", "none", "required"]}, _OBJECT]},
        reasoning=_OBJECT,
        text=_OBJECT,
        metadata=_OBJECT,
    ),
}
