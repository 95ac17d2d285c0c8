"""Attempts without a model: by an environment's own reference, or by doing nothing.

They show whether a task can be solved and its grader can tell (see `checking`), for terminal tasks, whose
solution is a script, as for interactive ones, whose environment may have a `reference`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from titogym.envs import registry
from titogym.envs.environment import Action, Environment, InteractiveEnvironment, Message, Observation
from titogym.envs.rewards import verified
from titogym.envs.sandboxes.base import Sandbox, SandboxBackend, SandboxError, SandboxSpec
from titogym.envs.task import Grade, GradingError, Task
from titogym.errors import UserError

Policy = Literal["reference", "nothing"]


@dataclass(frozen=True, slots=True)
class Played:
    """An attempt: the conversation as Chat Completions messages, and its grade."""

    messages: tuple[Message, ...]
    grade: Grade


async def play(task: Task, policy: Policy, backend: SandboxBackend | None = None) -> Played:
    """One attempt at `task`.

    `reference` runs the solution of a terminal task, and asks an interactive environment's `reference()` for
    each action; `nothing` ends at once with an empty answer. `backend` makes the sandbox of an environment
    that needs one. Raises `UserError` where there is no reference, `SandboxError` and `GradingError`.
    """
    environment = registry.environment(task.environment)
    sandbox: Sandbox | None = None
    try:
        if environment.needs_sandbox:
            if backend is None:
                raise UserError(f"The environment {environment.name!r} needs a sandbox, and there is none.")
            sandbox = await backend.create(SandboxSpec.for_task(task, {"purpose": "check"}))
        first = await environment.reset(task, sandbox)
        if environment.interactive:
            messages = await _converse(task, cast(InteractiveEnvironment, environment), first, policy)
        else:
            assert sandbox is not None
            messages = [*first.messages, *await _work(task, environment, sandbox, policy)]
        if sandbox is not None:
            await sandbox.kill_processes()
        grade = verified(await environment.grade(task, sandbox), environment.name)
        return Played(tuple(messages), grade)
    except (UserError, SandboxError, GradingError):
        raise
    except (Exception, SystemExit) as error:  # a user's own code
        raise UserError(
            f"The environment {environment.name!r} failed: {type(error).__name__}: {error}."
        ) from error
    finally:
        await environment.close()
        if sandbox is not None:
            await sandbox.destroy()


async def _converse(
    task: Task, environment: InteractiveEnvironment, first: Observation, policy: Policy
) -> list[Message]:
    messages, observation = list(first.messages), first
    for _ in range(task.limits.turns if policy == "reference" else 1):
        if observation.done:
            break
        action = _reference(environment)() if policy == "reference" else Action()
        messages.append(_message(action))
        observation = await environment.step(action)
        messages += observation.messages
    return messages


def _reference(environment: Environment) -> Callable[[], Action]:
    reference: Callable[[], Action] | None = getattr(environment, "reference", None)
    if reference is None:
        raise UserError(
            f"The environment {environment.name!r} has no `reference`: nothing can play it but a model."
        )
    return reference


async def _work(task: Task, environment: Environment, sandbox: Sandbox, policy: Policy) -> list[Message]:
    if policy == "nothing":
        return []
    solve = getattr(environment, "solve", None)
    if solve is None:
        raise UserError(f"The environment {environment.name!r} has no `solve`: no task of it has a solution.")
    done = await solve(task, sandbox)
    if done.exit_code != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(f"solve.sh ended with status {done.exit_code}: {lines[-1] if lines else 'no output'}")
    return [{"role": "assistant", "content": (done.stdout + done.stderr).strip()}]


def _message(action: Action) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in action.tool_calls
    ]
    return {"role": "assistant", "content": action.content, **({"tool_calls": calls} if calls else {})}
