"""What the pages about training name is there: figures, keys, links."""

import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titogym.trainer.batch import Group, Sample
from titogym.trainer.config.file import parse_config, sections
from titogym.trainer.config.sections import AlgorithmSection
from titogym.trainer.learning.advantages import Experience
from titogym.trainer.runs.metrics import MEANINGS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("asynchrony.md", "backends.md", "contracts.md", "learning.md", "metrics.md", "troubleshooting.md")
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


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), flags=re.S)


@pytest.mark.parametrize("recipe", blocks("learning.md", "toml"))
def test_every_recipe_is_a_valid_configuration(recipe):
    needed = {"run": {"dir": "d", "steps": 1}, "model": {"dir": "m"}, "environment": {"source": "shell"}}
    parse_config({**needed, **tomllib.loads(recipe)})


def test_functions_of_ones_own_work_as_the_page_shows_them():
    own: dict[str, Any] = {}
    for source in blocks("learning.md", "python"):
        exec(source, own)
    samples = [Sample([1] * 4, [0, 1, 1, 1], [0.0] * 4, [], 1.0), Sample([1] * 2, [0, 1], [0.0] * 2, [], 0.0)]
    masks = [np.array(sample.loss_mask) > 0 for sample in samples]
    experience = Experience([Group("t", samples)], masks, [np.zeros(len(mask)) for mask in masks])
    first, second = own["shorter_is_better"](experience, AlgorithmSection())
    np.testing.assert_allclose(first, [0, 0.997, 0.997, 0.997])
    np.testing.assert_allclose(second, [0, -0.001])
    assert own["long_enough"](experience.groups[0]) == "too short"


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (DOCS / page).read_text()):
        assert (DOCS / target).exists(), target
