"""What an episode keeps of `tito_session_mismatch`, and how a person is shown it."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from tests.harnesses.world import World, call, say, task
from titogym.cli.session import _print_diagnostics
from titogym.cli.transcript import print_result, replay
from titogym.harnesses.episode import EpisodeResult
from titogym.harnesses.evaluation.records import EvaluationDirectory
from titogym.harnesses.findings import MOST_FINDINGS, compared, findings
from titogym.harnesses.openai_loop import OpenAILoop

CAUSE = "model: it sampled control tokens inside its answer"


@pytest.mark.sandbox
async def test_an_episode_tells_what_differs_where_and_why(world: World, tmp_path, capsys) -> None:
    world.script(call("true"), say("one <|im_start|> two"))
    result = await world.run(task(), OpenAILoop(), keep_session=True)
    assert sum(result.mismatches.values()) == len(result.findings) == 1
    (finding,), (trajectory,) = result.findings, result.trajectories
    assert (finding["type"], finding["cause"], finding["role"]) == (
        "special_token_count",
        CAUSE,
        "assistant",
    )
    assert finding["leaf"] == trajectory.leaf
    end = finding["at"] + finding["row_total"]
    assert trajectory.tokens[finding["at"] : end] == finding["row_ids"]
    assert finding["row_ids"] != finding["rendered_ids"]
    where = f"message {finding['message']} (assistant), token {finding['at']}"
    place = f"special_token_count in {where}; {CAUSE}"

    out = io.StringIO()
    print_result(Console(file=out, width=200), result)
    assert f"tito_session_mismatch: 1\n  {place}\n    {compared(finding)}\n" in out.getvalue()

    assert result.session_id
    _print_diagnostics(Console(file=out, width=250), await world.gateway.inspect(result.session_id))
    await world.gateway.delete(result.session_id)
    ids = " ".join(map(str, finding["row_ids"]))
    row = next(line for line in out.getvalue().splitlines() if "│ special_token_count" in line)
    assert f"[{ids}]" in row
    assert CAUSE in row

    directory = EvaluationDirectory(tmp_path)
    directory.create({})
    record = directory.add(result, 0, [])
    kept = json.loads((tmp_path / record.file).read_text())
    assert kept["findings"] == result.findings
    replay(kept)
    assert place in " ".join(capsys.readouterr().out.split())


def difference(cause: str, ids: list[int], text: str = "x") -> dict[str, Any]:
    return {
        "type": "assistant_text",
        "cause": cause,
        "leaf": "3",
        "message": 1,
        "role": "assistant",
        "at": 7,
        "row_ids": ids,
        "rendered_ids": [],
        "row_text": text,
        "rendered_text": "",
    }


def told(*items: dict[str, Any]) -> dict[str, Any]:
    return {"diagnostics": {"mismatches": list(items)}}


def test_findings_are_few_and_short_but_of_every_cause() -> None:
    report = told(*(difference("model: a", [n]) for n in range(90)), difference("parser: b", [5] * 9000))
    found = findings(report)
    assert len(found) == MOST_FINDINGS
    assert [finding["cause"] for finding in found[-2:]] == ["model: a", "parser: b"]
    assert [finding["row_ids"] for finding in found[:3]] == [[0], [1], [2]]
    long = difference("harness: " + "c" * 9000, list(range(9000)), "y" * 9000)
    (short,) = findings(told(long))
    assert short["row_total"] == 9000
    assert len(json.dumps(short)) < 1200


def test_texts_that_look_alike_are_told_apart_by_their_tokens() -> None:
    (finding,) = findings(told({**difference("c", [1, 2], "\ufffd"), "rendered_ids": [3]}))
    finding["rendered_text"] = "\ufffd"
    assert compared(finding) == "row '\ufffd' [1 2], rendered again '\ufffd' [3]"
    (finding,) = findings(told(difference("c", list(range(40)), "\x1b[2J" + "z" * 99)))
    assert compared(finding) == (
        f"row '\\x1b[2J{'z' * 55}…' [0 1 2 3 4 5 6 7 … 40 tokens], rendered again nothing"
    )


def test_an_episode_without_a_session_has_none() -> None:
    out = io.StringIO()
    print_result(Console(file=out), EpisodeResult("t", "setup_error", error="No sandbox."))
    assert "tito_session_mismatch: none" in out.getvalue()
