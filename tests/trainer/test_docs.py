"""What the pages about training name is there: figures, keys, links."""

import re
from pathlib import Path

import pytest

from titogym.trainer.config_file import sections
from titogym.trainer.metrics import MEANINGS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("asynchrony.md", "contracts.md", "metrics.md", "troubleshooting.md")
GROUPS = {name.partition("/")[0] for name in MEANINGS} | {"eval"}


def quoted(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", (DOCS / page).read_text())


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_that_a_page_names_exists(page):
    for text in quoted(page):
        group, slash, name = text.partition("/")
        if slash and group in GROUPS and re.fullmatch(r"[a-z0-9_/]+", name) and text != "eval/score":
            assert text in MEANINGS or any(known.startswith(f"{text}/") for known in MEANINGS), text


@pytest.mark.parametrize("page", PAGES)
def test_every_key_that_a_page_names_exists(page):
    tables = {name: set(model.model_fields) for name, model in sections().items()}
    for text in quoted(page):
        if match := re.match(r"([a-z]+)\.([a-z0-9_]+)\b(?!\.|\()", text):
            table, key = match.groups()
            if table in tables and not text.endswith(("json", "jsonl", "html")) and key != "dir":
                assert key in tables[table], text


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (DOCS / page).read_text()):
        assert (DOCS / target).exists(), target
