"""Telling a person what happened in an episode."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from titogym.cli.control import visible
from titogym.harnesses.findings import Finding, compared, described

if TYPE_CHECKING:
    from titogym.gateway.trajectories import Trajectory
    from titogym.harnesses.episode import EpisodeResult

_MOST_LINES = 12  # of one message
_MOST_COLUMNS = 200


def print_turns(console: Console, turns: Sequence[dict[str, Any]]) -> None:
    """A session's turns as a conversation: what the agent was told, said and ran."""
    previous = None
    for turn in turns:
        for message in turn["messages"]:
            _print_indented(console, message["role"], _text(message["content"]), "dim")
        line = f"turn {turn['turn']}: {turn['output_tokens']} tokens in {turn['seconds']:.1f} s"
        line += ", cut by length" if turn["finish"] == "length" else ""
        if turn["superseded"]:
            line += ", sampled again later"
        if previous is not None and turn["parent"] != previous:
            line += ", a branch"
        console.print(Text(line, "bold cyan"))
        for style, text in _answer(turn["answer"]):
            _print_indented(console, "", text, style)
        previous = turn["id"]


def replay(episode: Mapping[str, Any]) -> None:
    """An episode of an evaluation, from its first message to its grade."""
    console = Console(highlight=False)
    console.rule(Text(f"{episode['task']} #{episode['attempt']}"))
    print_turns(console, episode["conversation"])
    if episode["outcome"] != "finished" and episode.get("log"):
        console.print(Text(f"The end of the agent's own output:\n{visible(episode['log'][-2000:])}"))
    _print_ending(console, episode["outcome"], episode["turns"], episode["seconds"], episode["error"])
    print_findings(console, episode.get("findings", []), sum(episode["mismatches"].values()))
    print_grade(console, episode["reward"], episode["evidence"])


def print_messages(console: Console, messages: Iterable[Mapping[str, Any]]) -> None:
    """A conversation as Chat Completions messages."""
    for message in messages:
        if message["role"] == "assistant":
            for style, text in _answer(message):
                _print_indented(console, "", text, style)
        else:
            _print_indented(console, message["role"], _text(message["content"]), "dim")


def print_grade(console: Console, reward: float | None, evidence: Mapping[str, Any]) -> None:
    _print_reward(console, reward)
    for name, value in evidence.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        _print_indented(console, name, text, "dim")


def print_result(console: Console, result: "EpisodeResult") -> None:
    """How the episode ended, its reward, and its trajectories in a line each."""
    _print_ending(console, result.outcome, result.turns, result.seconds, result.error)
    _print_reward(console, result.reward)
    if result.reward != 1 and result.evidence.get("output"):
        _print_indented(console, "tests", result.evidence["output"], "dim")
    for number, trajectory in enumerate(result.trajectories):
        console.print(Text(f"trajectory {number}: {_measures(trajectory)}"))
    print_findings(console, result.findings, sum(result.mismatches.values()))


def print_findings(console: Console, findings: Sequence[Finding], total: int) -> None:
    """Type, place and cause of each finding, and both sides; `total` counts those that were not kept too."""
    console.print(Text(f"tito_session_mismatch: {total or 'none'}", "yellow" if total else ""))
    for finding in findings:
        console.print(Text(f"  {visible(described(finding))}", "yellow"), soft_wrap=True)
        console.print(Text(f"    {compared(finding)}", "dim"), soft_wrap=True)
    if total > len(findings) > 0:
        console.print(f"  and {total - len(findings)} more")


def _print_ending(
    console: Console, outcome: str, turns: int, seconds: Mapping[str, float], error: str | None
) -> None:
    phases = ", ".join(f"{name} {passed:.1f} s" for name, passed in seconds.items())
    console.print(Text(f"{outcome} after {turns} turns ({phases})", "bold"))
    if error:
        console.print(Text(visible(error), "red"))


def _print_reward(console: Console, reward: float | None) -> None:
    if reward is None:
        console.print(Text("no reward", "bold red"))
    else:
        console.print(Text(f"reward {reward:g}", "bold green" if reward > 0 else "bold yellow"))


def _measures(trajectory: "Trajectory") -> str:
    trained = [
        logprob for logprob, mask in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if mask
    ]
    versions = sorted({version for _, _, version in trajectory.version_spans})
    mean = f"{sum(trained) / len(trained):.4f}" if trained else "none"
    return (
        f"{len(trajectory.tokens)} tokens, {len(trained)} trained, mean log-prob {mean}, "
        f"weight version {' '.join(versions) or 'none'}, ended by {trajectory.finish_reason}"
    )


def _answer(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Style and text of each part of an assistant's message."""
    if message.get("reasoning_content"):
        yield "italic dim", message["reasoning_content"]
    if message.get("content"):
        yield "", message["content"]
    for call in message.get("tool_calls") or ():
        yield "green", _call(call["function"]["name"], call["function"]["arguments"])


def _call(name: str, arguments: str) -> str:
    """A shell command as one would type it; any other call as a function's."""
    try:
        parsed = json.loads(arguments)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict) and set(parsed) == {"command"} and isinstance(parsed["command"], str):
        return f"$ {parsed['command']}"
    return f"{name}({arguments})"


def _print_indented(console: Console, label: str, text: str, style: str) -> None:
    lines = visible(text).splitlines()
    lines = [line[:_MOST_COLUMNS] + "…" if len(line) > _MOST_COLUMNS else line for line in lines]
    if len(lines) > _MOST_LINES:
        half = _MOST_LINES // 2
        lines = [*lines[:half], f"… {len(lines) - 2 * half} lines …", *lines[-half:]]
    for number, line in enumerate(lines or [""]):
        margin = f"{label if number == 0 else '':>9} " if label else "    "
        console.print(Text.assemble((margin, "bold" if label else ""), (line, style)), soft_wrap=True)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)
