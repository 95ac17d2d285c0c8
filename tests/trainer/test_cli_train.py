"""`titogym train` up to the point where processes would start."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.templates.models import write_model_dir
from tests.trainer.test_config import MINIMAL
from titogym.cli.main import app
from titogym.errors import UserError
from titogym.templates.families import QUICKSTART
from titogym.trainer.config.reference import reference

ROOT = Path(__file__).parents[2]


def test_the_configuration_page_is_what_the_models_say():
    assert (ROOT / "docs" / "configuration.md").read_text() == reference(), (
        "run: titogym train --print-config-reference > docs/configuration.md"
    )


def test_the_smallest_configuration_of_the_page_is_valid(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(reference().split("```toml\n")[1].split("```")[0])
    found = [f"model.dir={write_model_dir(tmp_path / 'model', QUICKSTART)}", "environment.source=shell"]
    sets = [word for each in found for word in ("--set", each)]
    result = CliRunner().invoke(app, ["train", str(path), "--check", *sets])
    assert result.exit_code == 0, result.exception


@pytest.mark.parametrize(
    "named",
    [
        "model.dir=nowhere",
        "environment.source=nope",
        "harness.name=nope",
        "algorithm.advantage=no.such:function",
        "algorithm.loss=no.such:function",
        "buffer.filter=no.such:function",
        "buffer.implementation=no.such:Class",
    ],
)
def test_check_refuses_what_is_not_there(tmp_path, named):
    path = tmp_path / "config.toml"
    path.write_text(MINIMAL)
    model = write_model_dir(tmp_path / "model", QUICKSTART)
    sets = ["--set", f"model.dir={model}", "--set", "environment.source=starter", "--set", named]
    result = CliRunner().invoke(app, ["train", str(path), "--check", *sets])
    assert isinstance(result.exception, UserError)
    assert named.partition("=")[2] in str(result.exception)


def test_check_refuses_a_wrong_override(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(MINIMAL)
    result = CliRunner().invoke(app, ["train", str(path), "--check", "--set", "rollout.temprature=1"])
    assert isinstance(result.exception, UserError)
    assert "did you mean rollout.temperature?" in str(result.exception)


def test_a_model_directory_without_a_model_is_refused_before_anything_starts(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(MINIMAL)
    run = tmp_path / "run"
    result = CliRunner().invoke(app, ["train", str(path), "--set", f"run.dir={run}"])
    assert isinstance(result.exception, UserError)
    assert "models/x" in str(result.exception)
    assert not run.exists()
