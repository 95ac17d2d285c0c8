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
    with pytest.raises(UserError, match=r"no tasks at 'nowhere'.*shell, sql, starter"):
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


@pytest.mark.parametrize("source", ["my_world", "my_world?level=1&count=1"])
def test_a_package_that_is_not_installed_is_no_folder_of_tasks(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_world").mkdir()
    (tmp_path / "my_world" / "__init__.py").touch()
    with pytest.raises(UserError, match=r"my_world\.tasks:tasks, or install it \(pip install -e \.\)"):
        registry.tasks(source)


def test_a_folder_without_tasks_hides_no_generator_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arithmetic").mkdir()
    assert len(registry.tasks("arithmetic?level=2&count=2")) == 2
    (tmp_path / "arithmetic" / "mine").symlink_to(registry.STARTER / "csv-totals")
    assert [task.id for task in registry.tasks("arithmetic")] == ["titogym/csv-totals"]


@pytest.mark.parametrize("source", ["starter?count=0", "starter?count=-1", "starter?count=-12"])
def test_a_source_is_asked_for_at_least_one_task(source):
    with pytest.raises(UserError, match="at least one"):
        registry.tasks(source)


def test_a_generator_by_dotted_path():
    made = registry.tasks(f"{__name__}:make_tasks", split="test", seed=4, count=2)
    assert [task.id for task in made] == ["test-4-0", "test-4-1"]


class Silent:
    """Says nothing of what it is."""

    name = "silent"


class Deaf(Silent):
    interactive = True
    needs_sandbox = False
    reset = grade = close = None


def test_a_source_has_options_like_a_urls_query():
    made = registry.tasks("arithmetic?level=2&split=test&seed=7&count=3", split="train", seed=0, count=50)
    assert [task.id for task in made] == [f"arithmetic-2-test-7-{n}" for n in range(3)]
    assert len(registry.tasks("arithmetic")) == 100
    assert len(registry.tasks("starter?count=2")) == 2
    assert registry.Source.parse("x?a=1&b=text&c=%26").options == {"a": 1, "b": "text", "c": "&"}


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("arithmetic?leval=2", "it takes split, seed, count, level"),
        ("arithmetic?level", "KEY=VALUE"),
        ("arithmetic?level=1&level=2", "gives 'level' twice"),
        ("arithmetic?split=dev", "split = 'dev'"),
        ("arithmetic?seed=x", "seed = 'x'"),
        ("arithmetic?count=0", "at least one"),
        ("starter?level=1", "take no option 'level'"),
        ("starter?count=x", "count = 'x'"),
        (f"{__name__}:make_tasks?level=1", "unexpected keyword argument 'level'"),
    ],
)
def test_wrong_options_of_a_source_are_named(source, sentence):
    with pytest.raises(UserError, match=sentence):
        registry.tasks(source)


@pytest.mark.parametrize(("name", "sentence"), [("Silent", "`interactive`"), ("Deaf", "has no `step`")])
def test_what_is_no_environment_is_refused(name, sentence):
    with pytest.raises(UserError, match=sentence):
        registry.environment(f"{__name__}:{name}")


class Needy(Silent):
    def __init__(self, world):
        pass


def broken_tasks(split, seed, count):
    raise KeyError("oops")


def no_tasks(split, seed, count):
    return ["a task?"]


def twins(split, seed, count):
    return [Task("same", "do it"), Task("same", "do that")]


def leaving(split, seed, count):
    raise SystemExit(3)


def test_faults_of_a_users_own_code_are_told_in_a_sentence():
    with pytest.raises(UserError, match=r"cannot be made: TypeError.*'world'"):
        registry.environment(f"{__name__}:Needy")
    with pytest.raises(UserError, match="failed: KeyError: 'oops'"):
        registry.tasks(f"{__name__}:broken_tasks")
    with pytest.raises(UserError, match="must return a list of tasks"):
        registry.tasks(f"{__name__}:no_tasks")
    with pytest.raises(UserError, match=r"Two tasks of .* are called 'same'"):
        registry.tasks(f"{__name__}:twins")
    with pytest.raises(UserError, match="failed: SystemExit: 3"):
        registry.tasks(f"{__name__}:leaving")


def test_a_long_source_is_no_path():
    made = registry.Source.parse("x?text=" + "a" * 5000)
    assert (made.name, len(made.options["text"])) == ("x", 5000)


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
