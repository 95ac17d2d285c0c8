"""What an error of the OpenAI SDK says about who failed: the engine, the gateway, or the session's budget."""

import openai

from titogym.harnesses.base import Outcome


def classify(error: openai.OpenAIError) -> tuple[Outcome, str]:
    """The outcome of an agent whose request failed with `error`, and one sentence about it."""
    if isinstance(error, openai.APIStatusError):
        body = error.body if isinstance(error.body, dict) else {}
        message = str(body.get("message") or error.message)
        if error.code == "context_length_exceeded":
            return "context_limit", f"The conversation outgrew what the session may hold: {message}"
        if error.status_code >= 500:
            return "engine_error", f"The gateway could not serve the agent: {message}"
        return "crashed", f"The gateway refused the agent's request: {message}"
    if isinstance(error, openai.APIConnectionError):
        return "engine_error", f"The gateway did not answer: {error}"
    return "crashed", f"The gateway's answer made no sense to the OpenAI SDK: {error}"
