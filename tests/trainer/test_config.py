"""The configuration refuses what cannot work, by name and with what to change."""

from pathlib import Path

import pytest

from titogym.errors import UserError
from titogym.trainer.config.file import load_config, parse_config, sections

MINIMAL = """
[run]
dir = "runs/x"
steps = 3

[model]
dir = "models/x"

[environment]
source = "shell"
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def problem(tmp_path: Path, text: str, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(UserError) as caught:
        load_config(write(tmp_path, text), overrides)
    return str(caught.value)


def test_minimal_configuration_has_working_defaults(tmp_path):
    config = load_config(write(tmp_path, MINIMAL))
    assert config.run.dir == Path("runs/x")
    assert config.rollout.samples_per_prompt <= config.rollout.episodes_in_flight
    assert config.eval is None


def test_unknown_key_names_line_and_near_miss(tmp_path):
    message = problem(tmp_path, MINIMAL + "\n[rollout]\n# comment\ntemprature = 0.7\n")
    assert "unknown key rollout.temprature (line 14)" in message
    assert "did you mean rollout.temperature?" in message


def test_key_in_the_wrong_table_names_the_right_one(tmp_path):
    assert "did you mean optimizer.lr?" in problem(tmp_path, MINIMAL + "\n[algorithm]\nlr = 1e-4\n")


def test_unknown_table_names_near_miss(tmp_path):
    assert "did you mean optimizer?" in problem(tmp_path, MINIMAL + "\n[optimiser]\nlr = 1e-4\n")


def test_unknown_key_without_near_miss_lists_the_keys_of_the_table(tmp_path):
    message = problem(tmp_path, MINIMAL + "\n[checkpoint]\nxyzzy = 1\n")
    assert "[checkpoint] has every, keep" in message


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('rollout.temperature = "hot"', "rollout.temperature"),
        ("rollout.temperature = 0.0", "rollout.temperature"),
        ("rollout.samples_per_prompt = 0", "rollout.samples_per_prompt"),
        ("algorithm.dual_clip = 1.0", "algorithm.dual_clip"),
        ("algorithm.gamma = 0.0", "algorithm.gamma"),
        ("rollout.samples_per_prompt = true", "rollout.samples_per_prompt"),
        ("rollout.groups_per_step = 2.0", "rollout.groups_per_step"),
        ('buffer.on_stale = "forget"', "buffer.on_stale"),
        ("optimizer.lr = nan", "optimizer.lr"),
        ("engine.urls = 'http://x'", "engine.urls"),
        ('gateway.policy = "any"', "gateway.policy"),
    ],
)
def test_wrong_types_and_values_are_refused_by_name(tmp_path, line, key):
    message = problem(tmp_path, f"{line}\n{MINIMAL}")
    assert f"{key} (line 1) must be" in message or f"{key} (line 1) must have" in message


def test_all_problems_are_listed_at_once(tmp_path):
    message = problem(tmp_path, "[run]\nsteps = 0\n[model]\nfoo = 1\n[environment]\nsource = 'shell'\n")
    assert "4 problems" in message
    for expected in ("run.dir is missing", "run.steps", "model.dir is missing", "model.foo"):
        assert expected in message


def test_missing_table_says_which(tmp_path):
    assert "environment is missing: add the table [environment]" in problem(
        tmp_path, MINIMAL.replace('[environment]\nsource = "shell"', "")
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("rollout.episodes_in_flight=4",), "raise it to at least that"),
        (("rollout.groups_per_step=9",), "buffer.capacity = 8"),
        (("buffer.max_retries=3",), "buffer.max_retries has no effect"),
        (("buffer.max_filtered_in_a_row=3",), "without a buffer.filter"),
        (("buffer.on_stale=wait", "buffer.max_staleness=0"), "set buffer.max_staleness to 1 or more"),
        (("buffer.on_stale=wait", "run.driver=sync"), 'run.driver = "async"'),
        (("rollout.samples_per_prompt=1",), "rollout.min_episodes = 2 is more than"),
        (("rollout.min_episodes=1",), "raise it to at least 2"),
        (("rollout.over_sampling=30",), "can never hold one group"),
        (("rollout.over_sampling_groups=1",), 'no effect with run.driver = "async"'),
        (('engine.placement="colocated"',), 'Set run.driver = "sync"'),
        (("algorithm.kl_coefficient=0.1",), 'set algorithm.kl = "loss"'),
        (("algorithm.value_coefficient=0.1",), 'set algorithm.advantage = "gae"'),
        (("algorithm.gamma=0.9",), "algorithm.gamma has no effect"),
        (("algorithm.sequence_mask_low=0.9",), "algorithm.sequence_mask_low has no effect"),
        (("algorithm.ratio=sequence", "algorithm.advantage=gae"), "one advantage per sequence"),
        (("algorithm.advantage=gropo",), "neither grpo nor grpo_no_std"),
        (("algorithm.loss=gropo",), "nor a dotted path"),
        (('eval.place="dedicated"',), "go together"),
        (('eval.urls=["http://h:1"]',), "go together"),
        (
            ('engine.urls=["http://h:1"]', 'eval.urls=["http://h:1"]', 'eval.place="dedicated"'),
            "dedicated engines serve evaluation alone",
        ),
        (("algorithm.tis_low=2.0",), "algorithm.tis_low"),
        (("rollout.max_tokens=100",), "rollout.max_tokens = 100"),
        (("engine.context_length=512",), "leaves no room for a prompt"),
        (("engine.context_length=9000", "engine.max_total_tokens=8000"), "engine.max_total_tokens = 8000"),
        (('engine.urls=["http://h:1"]', 'engine.dtype="float32"'), "engine.dtype has no effect"),
        (('eval.split="train"',), "the split that training sees"),
        (("trainer.expert_parallel=2",), "does not divide the 1 ranks"),
        (("trainer.backend=fsdp", "trainer.tensor_parallel=2"), "has data parallelism alone"),
        (("trainer.backend=fsdp", "trainer.r3=true"), "trainer.r3 needs"),
        (("trainer.backend=fsdp", "algorithm.advantage=gae"), "needs a value head"),
        (("trainer.true_on_policy=true",), "trains on what older weights have sampled"),
        (("trainer.true_on_policy=true", "run.driver=sync"), 'engine.dtype has to be "float32"'),
        (("optimizer.schedule=linear",), "needs optimizer.decay_steps"),
        (("optimizer.min_lr=1e-7",), "optimizer.min_lr has no effect"),
    ],
)
def test_impossible_combinations_say_what_to_change(tmp_path, overrides, expected):
    assert expected in problem(tmp_path, MINIMAL, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ('run.driver="sync"', 'engine.placement="colocated"', "rollout.over_sampling_groups=2"),
        ('algorithm.advantage="gae"', "rollout.samples_per_prompt=1", "rollout.min_episodes=1"),
        ('algorithm.advantage="reinforce_plus_plus"', "algorithm.gamma=0.9"),
        ('algorithm.kl="reward"', 'algorithm.kl_estimator="k1"'),
        ('algorithm.ratio="sequence"', "algorithm.clip_low=0.0003", "algorithm.clip_high=0.0004"),
        ('algorithm.advantage="mine.advantages:own"', 'algorithm.loss="mine.losses:own"'),
        ('buffer.on_failure="retry"', "buffer.max_retries=3"),
    ],
)
def test_what_belongs_together_is_accepted(tmp_path, overrides):
    load_config(write(tmp_path, MINIMAL), overrides)


def test_eval_on_the_train_split_of_another_seed_is_allowed(tmp_path):
    config = load_config(write(tmp_path, MINIMAL), ['eval.split="train"', "eval.seed=7"])
    assert config.eval is not None


def test_overrides_win_over_the_file_and_take_bare_text_as_a_string(tmp_path):
    config = load_config(
        write(tmp_path, MINIMAL), ["run.steps=7", "model.dir=other/dir", "harness.name=command"]
    )
    assert (config.run.steps, config.model.dir, config.harness.name) == (7, Path("other/dir"), "command")


def test_what_is_wrong_with_an_override_is_not_blamed_on_the_file(tmp_path):
    told = problem(tmp_path, MINIMAL, ("rollout.temprature=1",))
    assert told.startswith("unknown key rollout.temprature (--set rollout.temprature=1): did you mean ")
    both = problem(tmp_path, MINIMAL, ("rollout.temprature=1", "run.stepz=3"))
    assert "(--set run.stepz=3)" in both


@pytest.mark.parametrize("override", ["steps", "steps=3", "=3", "run.=3", "run.steps.x=1"])
def test_malformed_overrides_are_refused(tmp_path, override):
    assert f"--set {override}" in problem(tmp_path, MINIMAL, (override,))


def test_missing_file_and_broken_toml_are_user_errors(tmp_path):
    with pytest.raises(UserError, match="Cannot read the configuration"):
        load_config(tmp_path / "absent.toml")
    assert "not valid TOML" in problem(tmp_path, "[run\n")


def test_configuration_survives_a_round_trip_through_its_dump(tmp_path):
    config = load_config(write(tmp_path, MINIMAL), ["eval.count=3"])
    assert parse_config(config.model_dump(exclude_unset=True)) == config


def test_every_key_is_described():
    for name, section in sections().items():
        assert section.__doc__, name
        for key, field in section.model_fields.items():
            assert field.description, f"{name}.{key}"
