"""The start model's tokenizer, corpus and configuration."""

import json
import random
from pathlib import Path

import pytest

from tests.envs.conftest import backend, sandboxes
from titogym.envs.sandboxes.base import SandboxSpec
from titogym.envs.shell_tasks import FOLLOWED, KINDS, names, problem, tasks
from titogym.envs.terminal import TerminalEnvironment
from titogym.harnesses.openai_loop import OpenAILoop, render
from titogym.quickstart import corpus
from titogym.quickstart.corpus import PREFIX, Action, Habits
from titogym.quickstart.model import Recipe, prepare_tokenizer
from titogym.templates.conversation import Prefix
from titogym.templates.model import load_model_assets
from titogym.templates.verify import verify
from titogym.trainer.config.file import load_config

__all__ = ["backend", "sandboxes"]

CONFIG = Path(corpus.__file__).with_name("config.toml")
SMALL = Recipe(demonstrations=400)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("quickstart-model")
    examples = prepare_tokenizer(directory, 0, SMALL)
    conversations = list(corpus.demonstrations(SMALL.demonstrations, 0, SMALL.habits))
    return load_model_assets(directory), conversations, examples


def test_the_family_is_recognised_and_sound(prepared):
    assets, conversations, _ = prepared
    assert assets.family.name == "quickstart"
    assert verify(assets).counter_example is None
    assert len(conversations) == SMALL.demonstrations


def test_rows_are_what_the_turns_add_up_to(prepared):
    """Turn by turn, as the gateway builds them: prompt under mask 0, answer with its stop token under 1."""
    assets, conversations, examples = prepared
    for messages, (tokens, mask) in zip(conversations[:100], examples, strict=False):
        position = 0
        for end, message in enumerate(messages):
            if message.role != "assistant":
                continue
            prompt = assets.encode(messages[:end], PREFIX, add_generation_prompt=True)
            closed = assets.encode(messages[: end + 1], PREFIX, add_generation_prompt=False)
            row = closed[: len(closed) - len(assets.closer_ids) + 1]
            assert tokens[: len(row)] == row
            assert mask[position : len(row)] == [0] * (len(prompt) - position) + [1] * (
                len(row) - len(prompt)
            )
            position = len(row)
        assert position == len(tokens) == len(mask)


def test_the_prompt_is_the_one_that_the_harness_sends(prepared):
    assets, conversations, _ = prepared
    offered = Prefix(tools=(OpenAILoop(system="").bash.as_function(),))
    first = conversations[0][:1]
    assert assets.encode(first, offered, add_generation_prompt=True) == assets.encode(
        first, PREFIX, add_generation_prompt=True
    )


def test_names_are_two_tokens_of_which_training_saw_each(prepared):
    assets, _, examples = prepared
    seen = {token for tokens, _ in examples for token in tokens}
    for name in names("test"):
        ids = assets.tokenizer.encode_inside(name)
        assert len(ids) == 2
        assert seen.issuperset(ids)


def test_the_same_seed_gives_the_same_files_and_another_seed_other_examples(tmp_path, prepared):
    _, _, examples = prepared
    assert prepare_tokenizer(tmp_path / "again", 0, SMALL) == examples
    assert prepare_tokenizer(tmp_path / "other", 1, SMALL) != examples
    files = [(tmp_path / "again" / name).read_bytes() for name in ("tokenizer.json", "config.json")]
    assert files == [
        (prepared[0].model_dir / name).read_bytes() for name in ("tokenizer.json", "config.json")
    ]
    config = json.loads(files[1])
    assert config["vocab_size"] == prepared[0].tokenizer.vocab_size


def test_demonstrations_use_no_name_of_the_test_split(prepared):
    _, conversations, _ = prepared
    texts = [
        text
        for messages in conversations
        for m in messages
        for text in (m.content, *(call.arguments for call in m.tool_calls))
    ]
    assert not any(name in text for name in names("test") for text in texts)


def test_a_demonstrator_without_faults_solves_every_problem():
    for index in range(len(KINDS) * 3):
        made = problem("train", 5, index)
        done = corpus.actions(made, Habits(look=1.0, act=1.0), random.Random(0))
        assert tuple(action.command for action in done) == made.commands


@pytest.mark.sandbox
@pytest.mark.parametrize("index", range(len(KINDS) - 2))
async def test_demonstrated_outputs_are_those_of_the_real_tool_and_mistakes_fail(backend, index):
    made = problem("train", 3, index)
    task = tasks("train", 3, index + 1)[index]
    for done in [[Action(made.job.command)], *corpus.mistakes(made.job, made.files)]:
        sandbox = await backend.create(SandboxSpec.for_task(task, {}))
        try:
            environment = TerminalEnvironment()
            await environment.setup(task, sandbox)
            for action in done:
                assert render(await sandbox.exec(action.command), 8000) == action.output
            await sandbox.kill_processes()
            right = [action.command for action in done] == [made.job.command]
            assert (await environment.grade(task, sandbox)).reward == float(right)
        finally:
            await sandbox.destroy()


def test_every_kind_of_note_has_mistakes():
    assert set(FOLLOWED) < set(KINDS)


def test_the_configuration_evaluates_as_training_samples_and_on_unseen_tasks():
    config = load_config(CONFIG)
    assert config.eval is not None
    assert (config.environment.source, config.environment.split) == ("shell", "train")
    assert (config.eval.split, config.eval.temperature) == ("test", config.rollout.temperature)
    assert config.eval.count % len(KINDS) == 0  # every kind weighs the same
