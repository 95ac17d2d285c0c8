import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titogym.envs.graders import (
    all_of,
    any_of,
    by,
    code_tests,
    exact,
    mean_of,
    numeric,
    regex,
    threshold,
    weighted,
)
from titogym.envs.task import Grade, GradingError


async def test_exact():
    assert (await exact("Paris")(" Paris\n")).reward == 1
    assert (await exact("Paris")("paris")).reward == 0
    assert (await exact("Straße", ignore_case=True)("STRASSE")).reward == 1


async def test_regex():
    grade = await regex(r"\b(\d+) apples")("there are 12 apples")
    assert (grade.reward, grade.evidence["match"]) == (1, "12 apples")
    assert (await regex("^x")("ax")).reward == 0


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("it is 1,234.5", True),
        ("5 then 1234.5.", True),
        ("1234.5 then 5", False),
        ("none", False),
        ("1.2345e3", True),
    ],
)
async def test_numeric_takes_the_last_number(answer, right):
    assert (await numeric(1234.5)(answer)).reward == right


@settings(max_examples=50)
@given(value=st.floats(-1e9, 1e9), off=st.floats(0, 1))
async def test_numeric_tolerance(value, off):
    found = value + off
    assert (await numeric(value, tolerance=0.5)(f"The answer: {found!r}")).reward == (
        abs(found - value) <= 0.5
    )


async def test_combinations():
    yes, no = exact("a"), exact("b")
    grade = await all_of(yes, no)("a")
    assert grade.reward == 0
    assert [part["reward"] for part in grade.evidence["parts"]] == [1, 0]
    assert (await any_of(yes, no)("a")).reward == 1
    assert (await mean_of(yes, yes, no, no)("a")).reward == 0.5
    with pytest.raises(ValueError, match="at least one"):
        all_of()


async def test_a_rubric_weighs_its_parts():
    rubric = weighted({"says": (1, regex("total")), "right": (3, numeric(42))})
    grade = await rubric("the total is 41")
    assert grade.reward == 0.25
    assert grade.evidence["parts"]["right"] == {
        "reward": 0.0,
        "weight": 3,
        "grader": "numeric",
        "expected": 42,
        "found": 41.0,
    }
    assert (await rubric("total: 42")).reward == 1
    assert (await threshold(rubric, 0.7)("42")).reward == 1
    assert (await threshold(rubric, 0.8)("42")).reward == 0
    for weights in ({}, {"a": (0, exact("a"))}, {"a": (-1, exact("a"))}, {"a": (float("nan"), exact("a"))}):
        with pytest.raises(ValueError, match=r"weight|at least one"):
            weighted(weights)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(1e-6, 1e6), st.floats(0, 1)), min_size=1, max_size=6))
async def test_a_rubrics_reward_is_within_bounds(parts):
    rubric = weighted({str(n): (w, by(lambda answer, r=r: r)) for n, (w, r) in enumerate(parts)})
    reward = (await rubric("")).reward
    assert min(r for _, r in parts) - 1e-9 <= reward <= min(1.0, max(r for _, r in parts) + 1e-9)


async def test_a_function_of_ones_own():
    async def later(answer: str, wanted: str) -> bool:
        return answer == wanted

    assert (await by(later, wanted="x")("x")).reward == 1
    assert (await by(len)("")).reward == 0
    graded = await by(lambda answer: Grade(0.5, {"saw": answer}))("x")
    assert (graded.reward, graded.evidence["saw"]) == (0.5, "x")


@pytest.mark.parametrize("value", [1.5, -0.1, float("nan"), float("inf"), "1", None, Grade(2.0)])
async def test_a_function_that_gives_no_reward_is_a_grading_error(value):
    with pytest.raises(GradingError, match="lambda"):
        await by(lambda answer: value)("x")


async def test_a_function_that_fails_is_a_grading_error():
    with pytest.raises(GradingError, match="ZeroDivisionError"):
        await by(lambda answer: 1 / 0)("x")


async def test_long_whole_numbers_are_compared_digit_by_digit():
    assert (await numeric(10**20 + 1)(f"{10**20 + 1}")).reward == 1
    assert (await numeric(10**20 + 1)(f"{10**20}")).reward == 0
    assert (await numeric(4)("4.0")).reward == 1
    assert (await numeric(0.5)("9" * 300)).reward == 0


async def test_a_number_without_end_is_none():
    assert (await numeric(1)("9" * 100_000)).evidence["found"] is None


@pytest.mark.sandbox
async def test_code_tests(backend):
    tests = {
        "test.sh": "cd /workspace && python3 -c 'from solution import double; assert double(4) == 8'\n"
        "[ $? = 0 ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
    }
    grader = code_tests(backend, tests)
    assert (await grader("Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\n")).reward == 1
    assert (await grader("def double(x):\n    return x\n")).reward == 0
