"""Running an agent program inside its sandbox: what it is told, and how its end is read."""

from collections.abc import Mapping, Sequence

from titogym.envs.sandboxes.base import ExecResult, Sandbox, SandboxError
from titogym.envs.task import Task
from titogym.harnesses.base import Connection, HarnessResult

INSTRUCTION_FILE = "/run/titogym/instruction.md"
LOG_DIRECTORY = "/logs/agent"
LOG_TAIL_BYTES = 16_384


async def run_program(
    arguments: Sequence[str],
    *,
    name: str,
    task: Task,
    sandbox: Sandbox,
    connection: Connection,
    env: Mapping[str, str],
) -> HarnessResult:
    """Run `arguments` in the sandbox until they end or the task's limit of agent seconds kills them all.

    The instruction is in `INSTRUCTION_FILE`. Output goes to `/logs/agent/NAME.log`; its tail is the log.
    """
    log = f"{LOG_DIRECTORY}/{name}.log"
    try:
        await sandbox.upload({"instruction.md": task.instruction}, INSTRUCTION_FILE.rpartition("/")[0])
        result = await sandbox.exec(
            ["sh", "-c", f'mkdir -p {LOG_DIRECTORY} && exec "$@" >{log} 2>&1', "sh", *arguments],
            timeout=task.limits.agent_seconds,
            env={**environment(connection), **connection.env, **env},
        )
        tail = await read_tail(sandbox, log)
    except SandboxError as error:
        return HarnessResult("crashed", f"The sandbox failed the agent: {error}")
    return _judge(result, name, task.limits.agent_seconds, tail)


def environment(connection: Connection) -> dict[str, str]:
    """The variables by which SDKs and agent programs find their model."""
    return {
        "OPENAI_BASE_URL": connection.base_url,
        "OPENAI_API_BASE": connection.base_url,
        "OPENAI_API_KEY": connection.api_key,
        "OPENAI_MODEL": connection.model,
        "ANTHROPIC_BASE_URL": connection.anthropic_base_url,
        "ANTHROPIC_API_KEY": connection.api_key,
        "ANTHROPIC_AUTH_TOKEN": connection.api_key,
        "ANTHROPIC_MODEL": connection.model,
        "TITOGYM_INSTRUCTION_FILE": INSTRUCTION_FILE,
    }


async def read_tail(sandbox: Sandbox, path: str, size: int = LOG_TAIL_BYTES) -> str:
    """The last `size` bytes of a regular file inside, "" when there is none.

    The agent may have put anything in its place: reading a pipe, say, would never end.
    """
    script = 'test -f "$1" && exec tail -c "$2" "$1"'
    words = ["sh", "-c", script, "sh", path, str(size)]
    return (await sandbox.exec(words, timeout=30, max_output=size)).stdout


def _judge(result: ExecResult, name: str, limit: float, log: str) -> HarnessResult:
    code = result.exit_code
    if result.timed_out:
        return HarnessResult("timeout", f"The agent was stopped at its limit of {limit:g} s.", log, code)
    if code == 0:
        return HarnessResult("finished", "", log, code)
    lines = [line.strip() for line in (result.stderr or log).splitlines() if line.strip()]
    last = f"; its last words: {lines[-1][:300]}" if lines else " and said nothing"
    if result.out_of_memory:
        return HarnessResult("crashed", f"The agent program {name} ran out of memory{last}", log, code)
    return HarnessResult("crashed", f"The agent program {name} ended with status {code}{last}", log, code)
