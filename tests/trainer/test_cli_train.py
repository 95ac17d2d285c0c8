"""`titogym train` up to the point where processes would start."""

from pathlib import Path

from typer.testing import CliRunner

from tests.trainer.test_config import MINIMAL
from titogym.cli.main import app
from titogym.errors import UserError
from titogym.trainer.config_reference import reference

ROOT = Path(__file__).parents[2]


def test_the_configuration_page_is_what_the_models_say():
    assert (ROOT / "docs" / "configuration.md").read_text() == reference(), (
        "run: titogym train --print-config-reference > docs/configuration.md"
    )


def test_the_smallest_configuration_of_the_page_is_valid(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(reference().split("```toml\n")[1].split("```")[0])
    result = CliRunner().invoke(app, ["train", str(path), "--check"])
    assert result.exit_code == 0, result.exception


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
