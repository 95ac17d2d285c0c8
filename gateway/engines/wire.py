"""What SGLang's endpoints have in common, for the generation client and the control client."""

from typing import Any

import orjson

from titogym.gateway.engines.base import EngineError, EngineInfo

# SGLang lets prompt and output together be this much longer than the longest prompt that it takes.
_ROOM_AFTER_LONGEST_PROMPT = 4


def engine_info(model_info: dict[str, Any], server_info: dict[str, Any]) -> EngineInfo:
    """From the answers of `/model_info` and `/server_info`.

    The context length is what the server really generates up to, which is a little less than the number
    that it was started with. Raises `EngineError` where the answers are not SGLang's.
    """
    try:
        return EngineInfo(
            model_path=model_info["model_path"],
            context_length=server_info["max_req_input_len"] + _ROOM_AFTER_LONGEST_PROMPT,
            weight_version=model_info["weight_version"],
            tensor_parallel=server_info["tp_size"],
            seeded=bool(server_info.get("enable_deterministic_inference")),
            expert_routes=server_info.get("enable_return_routed_experts", False),
        )
    except KeyError as missing:
        raise EngineError(f"this server is no SGLang 0.5.23: it does not say its {missing}") from None


def error_message(content: bytes) -> str:
    """The sentence in an error response, whose shape differs between endpoints."""
    try:
        body = orjson.loads(content)
        found = body.get("error") or body.get("message") or body.get("detail") or body
        return str(found.get("message", found) if isinstance(found, dict) else found)
    except (orjson.JSONDecodeError, AttributeError):
        return content.decode(errors="replace")[:500]
