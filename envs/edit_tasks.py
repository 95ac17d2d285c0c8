"""The generated task family `edit`: small Python modules with a fault, and unit tests that no agent sees.

Level 1 has one function with a fault; level 2 three functions in one module, of which one is wrong; level 3
two modules with a fault each, and a function that is still to be written. These are terminal tasks: any
agent can attempt them.

The tests call each function in a process of its own, over arguments whose right results they know only as
a salted, slow digest: the code under test finds no answers to return.
"""

import hashlib
import json
import random
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from titogym.envs.dealing import Split, deal
from titogym.envs.task import Limits, Task

Level = Literal[1, 2, 3]

LIMITS = Limits(
    turns=12, agent_seconds=180.0, verifier_seconds=90.0, memory_mb=256, storage_mb=16, processes=16
)
_ROUNDS = 10_000  # of the digests: guessing a result costs time that the tests do not give
_CASES = 4  # per function


@dataclass(frozen=True, slots=True)
class Kind:
    """A function to write: `body` with its faulty line put right or wrong. Texts are templates.

    `{a}` and `{b}` are numbers of the problem, `{f}` is the function's name.
    """

    name: str
    parameters: str
    purpose: str
    body: str
    right: str
    wrong: str
    draw: str  # an expression over `r`, a random.Random, that gives a tuple of arguments


_NUMBERS = "([r.randint(-50, 50) for _ in range(r.randint(5, 9))],)"
_WORDS = "(' '.join(r.choice(['ant', 'bee', 'crow', 'lizard', 'ox', 'salamander']) for _ in range(7)),)"

KINDS = (
    Kind(
        "clamp",
        "numbers",
        "returns the list of numbers, each below {a} raised to {a} and each above {b} lowered to {b}",
        "return [{line} for n in numbers]",
        "max({a}, min({b}, n))",
        "max({b}, min({a}, n))",
        _NUMBERS,
    ),
    Kind(
        "every",
        "numbers",
        "returns the first number of the list and from there on every number {a} places further",
        "return {line}",
        "numbers[::{a}]",
        "numbers[{a}::{a}]",
        _NUMBERS,
    ),
    Kind(
        "running",
        "numbers",
        "returns the running totals of the list, starting from {b}",
        "totals, total = [], {b}\nfor n in numbers:\n    {line}\n    totals.append(total)\nreturn totals",
        "total += n",
        "total = n + {b}",
        _NUMBERS,
    ),
    Kind(
        "checksum",
        "numbers",
        "returns the sum of each number times its place (the first place is 1), modulo {b}",
        "return sum({line} for place, n in enumerate(numbers, 1)) % {b}",
        "place * n",
        "(place - 1) * n",
        _NUMBERS,
    ),
    Kind(
        "long_words",
        "text",
        "returns the words of the text that have more than {a} letters, in their order",
        "return [word for word in text.split() if {line}]",
        "len(word) > {a}",
        "len(word) >= {a}",
        _WORDS,
    ),
    Kind(
        "rotate",
        "text",
        "returns the text with its words rotated to the left by {a}: the first {a} words come last",
        "words = text.split()\nk = {a} % len(words)\nreturn ' '.join({line})",
        "words[k:] + words[:k]",
        "words[-k:] + words[:-k]",
        _WORDS,
    ),
    Kind(
        "initials",
        "text",
        "returns the first letter of each word in upper case, joined by '{a}'",
        "return {line}",
        "'{a}'.join(word[0].upper() for word in text.split())",
        "'{a}'.join(word[0] for word in text.upper())",
        _WORDS,
    ),
    Kind(
        "chunks",
        "numbers",
        "returns the list cut into lists of {a} numbers; the last may be shorter",
        "return [{line} for start in range(0, len(numbers), {a})]",
        "numbers[start:start + {a}]",
        "numbers[start:{a}]",
        _NUMBERS,
    ),
)
_SYLLABLES = ["ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "ti", "vo", "ze"]


@dataclass(frozen=True, slots=True)
class Function:
    """A kind with its name and numbers; `cases` are argument lists with their right results."""

    kind: Kind
    name: str
    a: int
    b: int
    cases: tuple[tuple[list[Any], Any], ...]

    @property
    def purpose(self) -> str:
        return f"{self.name}({self.kind.parameters}) {self.kind.purpose.format(a=self.a, b=self.b)}"

    def source(self, *, right: bool) -> str:
        return _source(self.kind, self.name, self.a, self.b, right=right)


@dataclass(frozen=True, slots=True)
class Problem:
    """`modules` name what stands in each file; of `faulty` the fault, and `missing` is not there yet."""

    modules: Mapping[str, tuple[Function, ...]]
    faulty: frozenset[str]
    missing: frozenset[str]

    def files(self, *, right: bool) -> dict[str, str]:
        return {
            f"{module}.py": "\n\n".join(
                function.source(right=right or function.name not in self.faulty)
                for function in functions
                if right or function.name not in self.missing
            )
            for module, functions in self.modules.items()
        }

    @property
    def instruction(self) -> str:
        parts = []
        for module, functions in self.modules.items():
            there = [function for function in functions if function.name not in self.missing]
            wrong = sum(function.name in self.faulty for function in there)
            listed = "\n".join(f"- {function.purpose}." for function in there)
            parts.append(
                f"In {module}.py {'this function' if len(there) == 1 else 'one of these functions'} is "
                f"wrong. "
                f"It should be so:\n{listed}"
                if wrong
                else f"{module}.py is right."
            )
            parts += [
                f"Add to {module}.py the function {function.purpose}."
                for function in functions
                if function.name in self.missing
            ]
        return "\n\n".join(parts) + "\n\nPut it right. Change nothing else."


def tasks(split: Split = "train", seed: int = 0, count: int = 100, level: Level = 1) -> list[Task]:
    """Tasks of one level. Raises `UserError` for a split that does not exist."""
    problems = deal(
        f"edit-{level}", split, seed, count, lambda choose: draw(choose, level), lambda p: p.instruction
    )
    return [_pack(problem, split, seed, index, level) for index, problem in enumerate(problems)]


def draw(choose: random.Random, level: Level) -> Problem:
    names = [_word(choose) for _ in range(2)]
    if level == 3:
        kinds = choose.sample(KINDS, 5)
        first, second = _functions(choose, kinds[:2]), _functions(choose, kinds[2:])
        wrong = {choose.choice(first).name, choose.choice(second[:2]).name}
        return Problem(
            {names[0]: first, names[1] + "_2": second}, frozenset(wrong), frozenset({second[2].name})
        )
    functions = _functions(choose, choose.sample(KINDS, 1 if level == 1 else 3))
    return Problem({names[0]: functions}, frozenset({choose.choice(functions).name}), frozenset())


def _functions(choose: random.Random, kinds: list[Kind]) -> tuple[Function, ...]:
    return tuple(_function(choose, kind) for kind in kinds)


def _function(choose: random.Random, kind: Kind) -> Function:
    """A function whose cases tell the right source from the wrong one."""
    name = f"{kind.name}_{_word(choose)}"
    while True:
        a, b = choose.randint(2, 4), choose.randint(11, 40)
        right, wrong = (_loaded(kind, name, a, b, right=right) for right in (True, False))
        arguments = [list(eval(kind.draw, {"r": choose})) for _ in range(_CASES)]
        cases = tuple((given, right(*given)) for given in arguments)
        if any(_result(wrong, given) != result for given, result in cases):
            return Function(kind, name, a, b, cases)


def _loaded(kind: Kind, name: str, a: int, b: int, *, right: bool) -> Any:
    """Our own source as a function."""
    space: dict[str, Any] = {}
    exec(_source(kind, name, a, b, right=right), space)
    return space[name]


def _result(function: Any, arguments: list[Any]) -> Any:
    try:
        return function(*arguments)
    except (ValueError, IndexError, ZeroDivisionError):
        return None


def _source(kind: Kind, name: str, a: int, b: int, *, right: bool) -> str:
    line = (kind.right if right else kind.wrong).format(a=a, b=b)
    body = kind.body.replace("{line}", line).replace("{a}", str(a)).replace("{b}", str(b))
    return f"def {name}({kind.parameters}):\n{textwrap.indent(body, '    ')}\n"


def _word(choose: random.Random) -> str:
    return "".join(choose.sample(_SYLLABLES, 3))


# --- tests ---------------------------------------------------------------------------------------

_TEST_SH = """#!/bin/sh
python3 -I /tests/check.py && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""
_CALL = """import importlib, json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
sys.path.insert(0, ".")
module, name, cases = json.loads(sys.argv[1])
function = getattr(importlib.import_module(module), name)
print(json.dumps([function(*given) for given in cases]))
"""
_CHECK = """import hashlib, json, subprocess, sys
functions = json.load(open("/tests/functions.json"))
failed = 0
for f in functions:
    words = [sys.executable, "-I", "/tests/call.py", json.dumps([f["module"], f["name"], f["cases"]])]
    done = subprocess.run(words, capture_output=True, text=True)
    said = done.stdout.strip().encode()
    digest = hashlib.pbkdf2_hmac("sha256", said, f["salt"].encode(), f["rounds"]).hex()
    if done.returncode != 0 or digest != f["digest"]:
        failed += 1
        why = (done.stderr.strip().splitlines() or ["returns something else"])[-1]
        print(f"{f['module']}.{f['name']}: {why}")
print(f"{len(functions) - failed} of {len(functions)} functions are right")
sys.exit(failed > 0)
"""


def _pack(problem: Problem, split: Split, seed: int, index: int, level: Level) -> Task:
    before, after = problem.files(right=False), problem.files(right=True)
    name = f"edit-{level}-{split}-{seed}-{index}"
    return Task(
        id=name,
        instruction=problem.instruction,
        files=before,
        tests={
            "test.sh": _TEST_SH,
            "check.py": _CHECK,
            "call.py": _CALL,
            "functions.json": json.dumps(_examined(problem, name)),
        },
        solution={"solve.sh": "".join(_rewrite(path, text) for path, text in after.items())},
        limits=LIMITS,
        split=split,
        metadata={"level": level},
    )


def _examined(problem: Problem, salt: str) -> list[dict[str, Any]]:
    """Every function with the arguments it is called with, and the digest of the right results."""
    return [
        {
            "module": module,
            "name": function.name,
            "cases": [given for given, _ in function.cases],
            "salt": salt,
            "rounds": _ROUNDS,
            "digest": _digest([result for _, result in function.cases], salt),
        }
        for module, functions in problem.modules.items()
        for function in functions
    ]


def _digest(results: list[Any], salt: str) -> str:
    return hashlib.pbkdf2_hmac("sha256", json.dumps(results).encode(), salt.encode(), _ROUNDS).hex()


def _rewrite(path: str, text: str) -> str:
    return f"cat > {path} <<'END'\n{text}END\n"
