"""Refusals in the shape of each wire protocol."""

from typing import Any

from titogym.gateway.errors import RequestError


def openai_error(error: RequestError) -> dict[str, Any]:
    """The body that OpenAI's SDKs read into their exceptions."""
    return {
        "error": {
            "message": error.message,
            "type": _openai_type(error.status),
            "param": error.param,
            "code": error.code,
        }
    }


def _openai_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")
