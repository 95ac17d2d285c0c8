import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titogym.envs.graders import all_of, any_of, code_tests, exact, mean_of, numeric, regex


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


@pytest.mark.sandbox
async def test_code_tests(backend):
    tests = {
        "test.sh": "cd /workspace && python3 -c 'from solution import double; assert double(4) == 8'\n"
        "[ $? = 0 ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
    }
    grader = code_tests(backend, tests)
    assert (await grader("Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\n")).reward == 1
    assert (await grader("def double(x):\n    return x\n")).reward == 0
