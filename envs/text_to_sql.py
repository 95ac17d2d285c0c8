"""Text to SQL: questions about a small shop's database, asked of SQLite.

The model may run queries with the tool `sql`; the SQL of its first answer without a call counts. It must
give the right rows on the database that the model saw and on a hidden one of the same form with other
rows, so a query that spells out what it saw fails.

Its SQL never runs in this process: it runs in the sandbox, in an interpreter of its own for each query,
read-only, over a database in memory.
"""

import json
import signal
from collections.abc import Sequence
from typing import Any, Literal

from titogym.envs.dealing import Split, deal
from titogym.envs.environment import DONE, Action, Observation, ToolCall, user
from titogym.envs.graders import code_of
from titogym.envs.sandboxes.base import ExecResult, Sandbox, SandboxError
from titogym.envs.sql_problems import SCHEMA, Level, Row, draw
from titogym.envs.task import Grade, GradingError, Limits, Task
from titogym.envs.tools import Toolbox

_INSTRUCTION = (
    "A shop's SQLite database has this schema:\n\n{schema}\n\nDays are like 2024-05-17. Write one SQL query "
    "that answers: {question} Give exactly the columns asked for. End with the query alone, in a block "
    "```sql."
)
_LIMITS = Limits(
    turns=8, agent_seconds=180.0, verifier_seconds=60.0, memory_mb=256, storage_mb=16, processes=16
)
SHOWN_ROWS = 20  # of a query's result that the model sees
_COMPARED_ROWS = 1000
QUERY_STEPS = 20_000_000  # instructions of SQLite's machine: a limit that no busy host moves
_CPU_SECONDS = 10  # for what is long within one instruction
_WALL_SECONDS = 120.0
_WIDEST = 200  # characters of a value

# Runs in the sandbox: a job on stdin, {"columns", "rows", "more"} or {"error"} out.
_RUNNER = """
import json, resource, sqlite3, sys
job = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (job["seconds"], job["seconds"]))
base = sqlite3.connect(":memory:")
base.executescript(job["setup"])
READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
def allowed(action, first, second, database, trigger):
    if action == sqlite3.SQLITE_FUNCTION and second == "load_extension":
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_PRAGMA and first == "table_info":
        return sqlite3.SQLITE_OK
    fine = action in READS or action == sqlite3.SQLITE_FUNCTION
    return sqlite3.SQLITE_OK if fine else sqlite3.SQLITE_DENY
base.set_authorizer(allowed)
base.set_progress_handler(lambda: 1, job["steps"])
def plain(value):
    return "0x" + value.hex() if isinstance(value, bytes) else value
try:
    cursor = base.execute(job["query"])
    found = cursor.fetchmany(job["rows"] + 1)
    rows = [[plain(value) for value in row] for row in found[:job["rows"]]]
    columns = [column[0] for column in cursor.description or ()]
    done = {"columns": columns, "rows": rows, "more": len(found) > job["rows"]}
except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
    done = {"error": str(error)}
    if str(error) == "interrupted":
        done = {"error": "the query takes too long"}
except MemoryError:
    done = {"error": "out of memory"}
print(json.dumps(done))
"""


def tasks(split: Split = "train", seed: int = 0, count: int = 100, level: Level = 1) -> list[Task]:
    """Tasks of one level: 1 one table, 2 groups and joins, 3 joins with conditions on groups."""
    problems = deal(
        f"sql-{level}", split, seed, count, lambda choose: draw(choose, level), lambda p: p.question
    )
    return [
        Task(
            id=f"sql-{level}-{split}-{seed}-{index}",
            instruction=_INSTRUCTION.format(schema=SCHEMA, question=problem.question),
            environment="sql",
            limits=_LIMITS,
            split=split,
            metadata={
                "level": level,
                "query": problem.query,
                "ordered": problem.ordered,
                "shown": problem.shown,
                "hidden": problem.hidden,
                "expected": problem.expected,
            },
        )
        for index, problem in enumerate(problems)
    ]


class TextToSql:
    name = "sql"
    interactive: Literal[True] = True
    needs_sandbox = True

    def __init__(self) -> None:
        self._tools = Toolbox(self.sql)
        self._answer = ""
        self._looked = False

    async def reset(self, task: Task, sandbox: Sandbox | None) -> Observation:
        assert sandbox is not None
        self._task, self._sandbox = task, sandbox
        return Observation((user(task.instruction),), self._tools.tools)

    async def step(self, action: Action) -> Observation:
        if action.tool_calls:
            return Observation(await self._tools.answer(action))
        self._answer = action.content
        return DONE

    async def sql(self, query: str) -> str:
        """Run one SQL query on the database and see its rows."""
        done = await _run(self._sandbox, self._task.metadata["shown"], query, SHOWN_ROWS)
        if "error" in done:
            raise ValueError(done["error"])
        lines = [" | ".join(_cell(value) for value in row) for row in [done["columns"], *done["rows"]]]
        return "\n".join(lines) + ("\n(more rows)" if done["more"] else "")

    async def grade(self, task: Task, sandbox: Sandbox | None) -> Grade:
        assert sandbox is not None
        query = code_of(self._answer).strip().removesuffix(";")
        evidence: dict[str, Any] = {"query": query}
        if not query:
            return Grade(0.0, {**evidence, "why": "there is no query in the answer"})
        known = task.metadata
        for which, expected in zip(("shown", "hidden"), known["expected"], strict=True):
            done = await _run(sandbox, known[which], query, _COMPARED_ROWS)
            if "error" in done:
                return Grade(0.0, {**evidence, "why": f"on the {which} database: {done['error']}"})
            if done["more"] or not same_rows(done["rows"], expected, ordered=known["ordered"]):
                return Grade(0.0, {**evidence, "why": f"other rows than expected on the {which} database"})
        return Grade(1.0, evidence)

    async def close(self) -> None:
        pass

    def reference(self) -> Action:
        """The next action of a perfect player."""
        query = self._task.metadata["query"]
        if not self._looked:
            self._looked = True
            return Action(tool_calls=(ToolCall("look", "sql", json.dumps({"query": query})),))
        return Action(f"```sql\n{query}\n```")


def same_rows(found: Sequence[Row], expected: Sequence[Row], *, ordered: bool) -> bool:
    """Whether two results are equal; without an order as bags of rows. Numbers agree to six decimals."""

    def form(value: Any) -> Any:
        return round(value, 6) if isinstance(value, float) else value

    ours, theirs = ([tuple(form(value) for value in row) for row in rows] for rows in (found, expected))
    return ours == theirs if ordered else sorted(ours, key=repr) == sorted(theirs, key=repr)


async def _run(sandbox: Sandbox, setup: str, query: str, rows: int) -> dict[str, Any]:
    job = {
        "setup": f"{SCHEMA}\n{setup}",
        "query": query,
        "rows": rows,
        "steps": QUERY_STEPS,
        "seconds": _CPU_SECONDS,
    }
    words = ["python3", "-I", "-c", _RUNNER]
    stdin = json.dumps(job).encode()
    return _result(await sandbox.exec(words, stdin=stdin, timeout=_WALL_SECONDS, max_output=1 << 22))


def _result(done: ExecResult) -> dict[str, Any]:
    """What the runner said. A query may exhaust CPU or memory; a host that is too busy is not its fault."""
    if done.timed_out:
        raise SandboxError(f"The sandbox ran no query to its end within {_WALL_SECONDS:g} s.")
    if done.exit_code == 128 + signal.SIGXCPU:
        return {"error": "the query takes too long"}
    if done.out_of_memory or done.truncated:
        return {"error": "the query took too much memory"}
    try:
        result: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise GradingError(
            f"The sandbox cannot run SQL (status {done.exit_code}): {done.stderr.strip()[-300:]}"
        ) from None
    return result


def _cell(value: Any) -> str:
    return "NULL" if value is None else str(value)[:_WIDEST]
