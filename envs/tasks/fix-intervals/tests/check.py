"""Calls the agent's module in a process of its own, on chosen and on random intervals."""

import json
import random
import subprocess

CALL = """
import json, sys
sys.path.insert(0, "/app")
import intervals
print("\\n" + json.dumps([getattr(intervals, name)(*arguments) for name, arguments in json.load(sys.stdin)]))
"""


def minutes(intervals):
    return {minute for start, end in intervals for minute in range(start, end)}


def as_intervals(covered):
    found = []
    for minute in sorted(covered):
        if found and found[-1][1] == minute:
            found[-1][1] = minute + 1
        else:
            found.append([minute, minute + 1])
    return found


def expected(name, arguments):
    covered = minutes(arguments[0])
    if name == "merge":
        return as_intervals(covered)
    if name == "total":
        return len(covered)
    _, start, end = arguments
    return as_intervals(set(range(start, end)) - covered)


def calls():
    chosen = [[], [[1, 4], [2, 3]], [[1, 2], [2, 3]], [[5, 6], [1, 2]], [[0, 9], [3, 4], [8, 12]], [[-5, -1], [-2, 3]]]
    chance = random.Random(3)
    for _ in range(60):
        starts = [chance.randrange(-20, 40) for _ in range(chance.randrange(7))]
        chosen.append([[start, start + chance.randrange(1, 15)] for start in starts])
    for intervals in chosen:
        yield "merge", [intervals]
        yield "total", [intervals]
        start = chance.randrange(-25, 40)
        yield "gaps", [intervals, start, start + chance.randrange(1, 30)]


requests = list(calls())
done = subprocess.run(
    ["python3", "-c", CALL], input=json.dumps(requests), capture_output=True, text=True, timeout=20, cwd="/tmp"
)
assert done.returncode == 0, done.stderr
answers = json.loads(done.stdout.splitlines()[-1])
assert len(answers) == len(requests), "the module did not answer every call"
for (name, arguments), answer in zip(requests, answers):
    wanted = expected(name, arguments)
    assert answer == wanted, f"{name}{tuple(arguments)} is {wanted}, not {answer}"
print(f"all {len(answers)} calls are right")
