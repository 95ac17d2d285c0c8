"""What the real harness programs were seen to do: `evidence.json`, and the table of `docs/harnesses.md`.

`TITOGYM_RECORD_HARNESSES=1 pytest tests/harnesses/test_programs.py` records it anew, then
`python -m tests.harnesses.evidence` writes the table.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from titogym.harnesses.agent_program import AgentProgram, load
from titogym.harnesses.doctor import Report
from titogym.harnesses.specification import built_in, read

FILE = Path(__file__).with_name("evidence.json")
PAGE = Path(__file__).parents[2] / "docs" / "harnesses.md"
BEGIN, END = "<!-- begin: made by python -m tests.harnesses.evidence -->", "<!-- end -->"

Evidence = dict[str, Any]


def names() -> list[str]:
    """Every harness that comes along, but for `command`, which is any program."""
    return sorted(["openai_loop", *built_in()])


def seen(report: Report) -> Evidence:
    """The part of the report that another run of the same version must give again."""
    protocols = {one["protocol"] for one in report.endpoints if one["protocol"]}
    return {
        "protocols": sorted(protocols),
        "streaming": report.streaming,
        "needs": report.needs,
        "declared": report.used,
        "policy": "branching" if report.matchers[report.used].refused else "linear",
        "lost_if_strict": report.matchers["strict"].lost,
        "lost": report.matchers[report.used].lost,
        "turns": report.turns,
        "rewrites": sorted(one.field for one in report.rewrites),
        "sub_agents": len(report.sub_agents),
        "side_requests": len(report.side_requests),
        "token_exact": report.token_exact,
        "reward": report.reward,
    }


def recorded() -> dict[str, Evidence]:
    found: dict[str, Evidence] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return found


def record(name: str, evidence: Evidence) -> None:
    tried = {"version": version(name), "tried": datetime.now(UTC).date().isoformat()}
    everything = {**recorded(), name: {**tried, **evidence}}
    FILE.write_text(json.dumps(dict(sorted(everything.items())), indent=1) + "\n", encoding="utf-8")


def version(name: str) -> str:
    """The packages that the harness is installed from."""
    if name == "openai_loop":
        return "openai, of titogym's own environment"
    install = read(built_in()[name]).install
    return ", ".join((*install.pypi, *install.npm))


def table() -> str:
    heads = (
        "Harness",
        "Tried",
        "Protocol",
        "Streams",
        "Matcher",
        "Policy",
        "What it rewrites",
        "Turns that re-root (if strict)",
        "Sub-agents",
        "Side requests",
        "Token-exact",
    )
    rows = [heads, ("---",) * len(heads), *map(_row, names())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(name: str) -> tuple[str, ...]:
    one = recorded()[name]
    specification = read(built_in()[name]) if name in built_in() else None
    title = f"[{specification.title}]({specification.url})" if specification else "OpenAI SDK loop"
    needed = f" (`{one['needs']}` held it)" if one["needs"] not in (None, one["declared"]) else ""
    return (
        f"{title} `{name}`",
        f"{one['version']}; {one['tried']}",
        ", ".join(one["protocols"]),
        one["streaming"],
        f"`{one['declared']}`{needed}",
        specification.policy if specification else "linear",
        ", ".join(one["rewrites"]) or "nothing",
        f"{one['lost']} ({one['lost_if_strict']})",
        "yes" if one["sub_agents"] else "none seen",
        str(one["side_requests"] or "none"),
        f"{'yes' if one['token_exact'] else 'no'}, {one['turns']} turns; reward {one['reward']:g}",
    )


def notes() -> str:
    """What a person should know of each program beyond the table."""
    return "\n".join(_note(load(name, path)) for name, path in built_in().items())


def _note(made: AgentProgram) -> str:
    options = ", ".join(f"`{option}`" for option in made.options())
    told = f"- **{made.specification.title}**: `{made.name}`, options {options}. {made.specification.notes}"
    return told.rstrip()


def page(text: str) -> str:
    """`text` with the table and the notes between the marks made anew."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{table()}\n\n{notes()}\n\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
