import pytest

from titogym.envs import registry
from titogym.envs.task import Task
from titogym.envs.terminal import TerminalEnvironment
from titogym.errors import UserError


def make_tasks(split, seed, count):
    """A generator of a user's own."""
    return [Task(f"{split}-{seed}-{number}", "do it") for number in range(count)]


def test_environments_by_name_and_by_path():
    assert isinstance(registry.environment("terminal"), TerminalEnvironment)
    found = registry.environment("titogym.envs.terminal:TerminalEnvironment")
    assert isinstance(found, TerminalEnvironment)


def test_unknown_names_list_the_choices():
    with pytest.raises(UserError, match=r"no environment 'cloud'.*terminal"):
        registry.environment("cloud")
    with pytest.raises(UserError, match=r"no tasks at 'nowhere'.*shell, starter"):
        registry.tasks("nowhere")
    with pytest.raises(UserError, match="NoSuchThing"):
        registry.environment("titogym.envs.terminal:NoSuchThing")


def test_tasks_from_directories():
    starter = registry.tasks("starter")
    assert len(starter) >= 8
    assert len({task.id for task in starter}) == len(starter)
    one = registry.tasks(str(registry.STARTER / "csv-totals"))
    assert [task.id for task in one] == ["titogym/csv-totals"]
    assert registry.tasks(str(registry.STARTER), count=2) == starter[:2]


def test_a_directory_without_tasks(tmp_path):
    with pytest.raises(UserError, match=r"has a task\.toml"):
        registry.tasks(str(tmp_path))


def test_a_generator_by_dotted_path():
    made = registry.tasks(f"{__name__}:make_tasks", split="test", seed=4, count=2)
    assert [task.id for task in made] == ["test-4-0", "test-4-1"]


def test_an_installed_package_can_register_environments(tmp_path, monkeypatch):
    metadata = tmp_path / "other-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: other\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[{registry.ENVIRONMENT_GROUP}]\nother = titogym.envs.terminal:TerminalEnvironment\n"
        f"[{registry.GENERATOR_GROUP}]\nothers = {__name__}:make_tasks\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(registry.environment("other"), TerminalEnvironment)
    assert len(registry.tasks("others", count=3)) == 3
