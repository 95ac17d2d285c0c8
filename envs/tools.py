"""Tools from typed functions, for interactive environments.

class Weather:
    def __init__(self):
        self._tools = Toolbox(self.forecast)

    async def forecast(self, city: str, days: int = 1) -> str:
        "What the weather will be."
        ...

    async def step(self, action):
        return Observation(await self._tools.answer(action))
"""

import inspect
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import TypeAdapter, ValidationError

from titogym.envs.environment import Action, Message, Tool, ToolCall, tool_result

ToolFunction = Callable[..., Awaitable[str]]

ARGUMENT_CHARACTERS = 100_000  # longest arguments that are read


class Toolbox:
    """Offers functions to the model by their names, docstrings and annotations, and answers its calls.

    A function's text is the call's result. What the model got wrong (another tool's name, broken JSON,
    missing or mistyped arguments) is told to it as the result too; so is a `ValueError` of the function.
    Any other exception of a function is the environment's fault, and passes.
    """

    def __init__(self, *functions: ToolFunction) -> None:
        self._functions = {_name(function): _Function(function) for function in functions}
        self.tools = tuple(function.tool for function in self._functions.values())

    async def answer(self, action: Action) -> tuple[Message, ...]:
        """One `tool_result` for each call of `action`, in their order, one call after the other."""
        return tuple([tool_result(call, await self._result(call)) for call in action.tool_calls])

    async def _result(self, call: ToolCall) -> str:
        function = self._functions.get(call.name)
        if function is None:
            return f"error: there is no tool {call.name!r}, only {', '.join(self._functions)}"
        try:
            arguments = function.arguments(call.arguments)
        except ValueError as error:
            return f"error: {error}"
        try:
            return await function.call(**arguments)
        except ValueError as error:
            return f"error: {error}"


class _Function:
    def __init__(self, function: ToolFunction) -> None:
        self.call = function
        self._types: dict[str, TypeAdapter[Any]] = {}
        self._required = []
        properties = {}
        signature = inspect.signature(function, eval_str=True)
        for name, parameter in signature.parameters.items():
            adapter = self._types[name] = TypeAdapter(parameter.annotation)
            properties[name] = {key: value for key, value in adapter.json_schema().items() if key != "title"}
            if parameter.default is parameter.empty:
                self._required.append(name)
        schema = {"type": "object", "properties": properties, "required": self._required}
        self.tool = Tool(_name(function), re.sub(r"\s+", " ", inspect.getdoc(function) or "").strip(), schema)

    def arguments(self, text: str) -> dict[str, Any]:
        """The arguments as the function wants them. Raises `ValueError` with a sentence for the model."""
        example = json.dumps(dict.fromkeys(self._required or self._types, "..."))
        try:
            given = json.loads(text or "{}") if len(text) <= ARGUMENT_CHARACTERS else None
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            raise ValueError(f"the arguments must be JSON like {example}")
        if unknown := given.keys() - self._types.keys():
            raise ValueError(
                f"there is no argument {min(unknown)!r}, only {', '.join(self._types) or 'none'}"
            )
        if missing := [name for name in self._required if name not in given]:
            raise ValueError(f"the argument {missing[0]!r} is missing: write {example}")
        return {name: self._typed(name, value) for name, value in given.items()}

    def _typed(self, name: str, value: Any) -> Any:
        try:
            return self._types[name].validate_python(value)
        except ValidationError as error:
            reason = error.errors(include_url=False, include_input=False)[0]["msg"]
            raise ValueError(f"the argument {name!r} is wrong: {reason}") from None


def _name(function: ToolFunction) -> str:
    name: str = function.__name__
    return name
