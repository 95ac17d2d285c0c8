"""Small agent programs with the habits of real ones, good and bad: `python agents.py HABIT`.

They are plain HTTP loops, so that nothing but the habit changes what is sent.
"""

import json
import os
import sys
import time
from typing import Any

import httpx

Json = dict[str, Any]
TURNS = 8
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "run_command",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
            "required": ["command"],
        },
    },
}


def faithful(message: Json) -> Json:
    return message


def drops_reasoning_and_reserialises(message: Json) -> Json:
    """Sends back no reasoning, and arguments as its own serialiser writes them."""
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    for call in kept.get("tool_calls") or ():
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
    return kept


def adds_default_arguments(message: Json) -> Json:
    for call in message.get("tool_calls") or ():
        arguments = {"timeout": 60, **json.loads(call["function"]["arguments"])}
        call["function"]["arguments"] = json.dumps(arguments)
    return message


def gives_its_own_ids(message: Json) -> Json:
    """Numbers calls by itself and trims text: nothing is left by which the answer could be known."""
    message["content"] = (message.get("content") or "").strip()
    for n, call in enumerate(message.get("tool_calls") or ()):
        call["id"] = f"tool_{n}"
        call["function"]["arguments"] = json.dumps({"timeout": 60, "command": "echo"})
    return message


HABITS = {
    "faithful": faithful,
    "drops": drops_reasoning_and_reserialises,
    "defaults": adds_default_arguments,
    "ids": gives_its_own_ids,
    "clock": faithful,
    "extras": faithful,
    "title": faithful,
    "refused": faithful,
}


def anthropic(http: httpx.Client, instruction: str) -> None:
    """A loop over Anthropic Messages that sends every block back as it came."""
    function = TOOL["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    messages: list[Json] = [{"role": "user", "content": instruction}]
    for _ in range(TURNS):
        body = {"model": "m", "max_tokens": 4096, "tools": [tool], "messages": messages}
        answer = http.post(f"{os.environ['ANTHROPIC_BASE_URL']}/v1/messages", json=body)
        answer.raise_for_status()
        content: list[Json] = answer.json()["content"]
        messages.append({"role": "assistant", "content": content})
        calls = [block["id"] for block in content if block["type"] == "tool_use"]
        if not calls:
            return
        results = [{"type": "tool_result", "tool_use_id": call, "content": "ok"} for call in calls]
        messages.append({"role": "user", "content": results})


def streams(http: httpx.Client, instruction: str) -> None:
    """The official SDK's own accumulation of a stream, sent back."""
    import openai

    messages: list[Any] = [{"role": "user", "content": instruction}]
    client = openai.OpenAI(http_client=http)
    for _ in range(TURNS):
        stream = client.chat.completions.create(model="m", messages=messages, tools=[TOOL], stream=True)
        message: Json = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
        for chunk in stream:
            delta = chunk.choices[0].delta
            message["content"] += delta.content or ""
            message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            for part in delta.tool_calls or ():
                if part.index == len(message["tool_calls"]):
                    function = {"name": part.function.name, "arguments": ""}
                    message["tool_calls"].append({"id": part.id, "type": "function", "function": function})
                message["tool_calls"][part.index]["function"]["arguments"] += part.function.arguments or ""
        calls = message["tool_calls"]
        messages.append(message if calls else {**message, "tool_calls": None})
        if not calls:
            return
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]


def responses(http: httpx.Client, instruction: str) -> None:
    """OpenAI Responses, each turn naming the one before."""
    tool = {"type": "function", "strict": False, **TOOL["function"]}
    items: list[Json] = [{"role": "user", "content": instruction}]
    previous: Json = {}
    for _ in range(TURNS):
        body = {"model": "m", "input": items, "tools": [tool], **previous}
        answer = http.post(f"{os.environ['OPENAI_BASE_URL']}/responses", json=body)
        answer.raise_for_status()
        told: Json = answer.json()
        previous = {"previous_response_id": told["id"]}
        calls = [item["call_id"] for item in told["output"] if item["type"] == "function_call"]
        if not calls:
            return
        items = [{"type": "function_call_output", "call_id": call, "output": "ok"} for call in calls]


LOOPS = {"anthropic": anthropic, "streams": streams, "responses": responses}


def main(habit: str) -> None:
    base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    http = httpx.Client(headers={"authorization": f"Bearer {key}"}, timeout=30)
    system: Json = {"role": "system", "content": "You are an agent."}
    with open(os.environ["TITOGYM_INSTRUCTION_FILE"], encoding="utf-8") as file:
        instruction = file.read()
    if habit in LOOPS:
        return LOOPS[habit](http, instruction)
    messages: list[Json] = [system, {"role": "user", "content": instruction}]
    fields: Json = {"model": os.environ["OPENAI_MODEL"], "tools": [TOOL]}
    if habit == "extras":
        fields |= {"user": "somebody", "frobnicate": 1, "temperature": 0.5}
    if habit == "refused":
        fields |= {"n": 3}
    if habit == "title":
        side = {"model": "m", "messages": [{"role": "user", "content": "Give this task a title."}]}
        http.post(f"{base}/chat/completions", json=side).raise_for_status()
    for _ in range(TURNS):
        if habit == "clock":
            system["content"] = f"You are an agent. It is {time.time_ns()}."
        answer = http.post(f"{base}/chat/completions", json={**fields, "messages": messages})
        answer.raise_for_status()
        message: Json = answer.json()["choices"][0]["message"]
        calls = message.get("tool_calls")
        messages.append(HABITS[habit](message))
        if not calls:
            return
        for call in messages[-1]["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "titogym doctor\n"})


if __name__ == "__main__":
    main(sys.argv[1])
