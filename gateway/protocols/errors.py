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


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """The body that Anthropic's SDKs read into their exceptions."""
    message = error.message
    if error.code == "context_length_exceeded":  # clients look for these words, and compact
        told = "{} tokens > {} maximum".format(*error.overflow) if error.overflow else message
        message = f"prompt is too long: {told}"
    return {"type": "error", "error": {"type": _anthropic_type(error.status), "message": message}}


def _openai_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")


def _anthropic_type(status: int) -> str:
    if status >= 500:
        return "overloaded_error" if status == 503 else "api_error"
    return {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
    }.get(status, "invalid_request_error")
