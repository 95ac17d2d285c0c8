from dataclasses import replace

import pytest
from tokenizers import normalizers
from typer.testing import CliRunner

from tests.templates import models
from titogym.cli.main import app
from titogym.templates.conversation import Message, Prefix
from titogym.templates.families import QUICKSTART, QWEN3
from titogym.templates.generated import conversations
from titogym.templates.literal import Guard
from titogym.templates.model import load_model_assets
from titogym.templates.render import Renderer
from titogym.templates.verify import CHECKS, describe, verify


def test_every_family_passes_every_check(small_assets):
    report = verify(small_assets, count=40)
    assert report.counter_example is None
    assert report.made.keys() == CHECKS.keys()
    assert report.made["seam"] > 100


def test_the_real_qwen3(qwen3):
    assert verify(qwen3, count=40).counter_example is None


def test_the_real_smollm2(smollm2):
    assert verify(smollm2, count=40).counter_example is None


def test_generated_conversations_cover_what_happens(small_assets):
    made = list(conversations(small_assets, 200))
    assert made == list(conversations(small_assets, 200))
    messages = [message for conversation, _ in made for message in conversation]
    assert {message.role for message in messages} == {"system", "user", "assistant", "tool"}
    assert any(message.role == "assistant" and not message.content for message in messages)
    assert any(len(message.tool_calls) > 1 for message in messages)
    assert any("<|im_end|>" in message.content for message in messages)
    assert any(not message.content.isascii() for message in messages)
    assert any(message.reasoning for message in messages) == (small_assets.family.reasoning is not None)
    assert {bool(prefix.tools) for _, prefix in made} == {True, False}
    assert max(len(conversation) for conversation, _ in made) >= 11


def failed_check(assets):
    failed = verify(assets).counter_example
    return failed and failed.check


def broken(assets, old, new, **changes):
    """The assets with one thing wrong in the template or the family."""
    source = assets.family.source()
    assert old in source
    family = replace(assets.family, **changes)
    renderer = Renderer(family, Guard(assets.tokenizer.special_texts), published=source.replace(old, new))
    return replace(assets, family=family, renderer=renderer)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    return load_model_assets(models.write_model_dir(tmp_path_factory.mktemp("quickstart"), QUICKSTART))


@pytest.mark.parametrize(
    ("old", "new", "check", "roles"),
    [
        # Forgets old answers.
        (
            "message.content or ''",
            "message.content if loop.last or message.role != 'assistant' else ''",
            "append-only text",
            "user assistant user",
        ),
        # Joins what follows to the answer's last token.
        (
            "{{- '<|im_end|>\\n' -}}\n    {%- endif -%}\n{%- endfor",
            "{{- '<|im_end|>\\n' + ('' if loop.last or message.role != 'assistant' else '\\n') -}}\n"
            "    {%- endif -%}\n{%- endfor",
            "append-only tokens",
            "user assistant user",
        ),
        # Asks in other words than it answers.
        ("'<|im_start|>assistant\\n' if", "'<|im_start|>assistant: ' if", "opener", "user assistant"),
        ("{{- joint if message.role == 'assistant' -}}", "", "opener", "user assistant"),
        (
            "{{- '<|im_end|>\\n' -}}\n    {%- endif -%}\n{%- endfor",
            "{%- endif -%}{%- endfor",
            "closer",
            "user assistant",
        ),
        # Writes a user's text where it makes a token together with the template's.
        (
            "+ '\\n' -}}\n        {{- joint",
            "+ '\\n<|im_' -}}\n        {{- joint",
            "typed control text",
            "user",
        ),
        ("message.role + '\\n'", "message.nothing.at_all", "render", "user"),
        # Writes the first answer otherwise than later ones.
        (
            "message.role + '\\n' -}}",
            "message.role + '\\n' + ('!' if loop.index > 3 and message.role == 'user' else '') -}}",
            "seam",
            "user assistant user user",
        ),
    ],
)
def test_each_check_fails_where_it_should(quickstart, old, new, check, roles):
    report = verify(broken(quickstart, old, new))
    assert report.counter_example is not None
    assert report.counter_example.check == check
    assert len(report.counter_example.messages) <= len(roles.split())
    assert "FAIL " + check in describe(quickstart, report)


def test_a_closer_that_the_template_does_not_write(quickstart):
    wrong = replace(quickstart, closer_ids=(*quickstart.closer_ids, 0))
    assert failed_check(wrong) == "closer"


def test_messages_that_are_not_guarded_are_found(quickstart):
    careless = replace(quickstart, renderer=Renderer(QUICKSTART, Guard(())))
    assert failed_check(careless) == "typed control text"


def test_a_tokenizer_that_loses_bytes_is_found(tmp_path):
    models.write_model_dir(tmp_path, QUICKSTART)
    backend = models.byte_level(models.CHATML, models.TAGS)
    backend.normalizer = normalizers.Lowercase()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert failed_check(load_model_assets(tmp_path)) == "round trip"


def test_given_conversations_are_checked_instead(quickstart):
    report = verify(quickstart, [([Message("user", "x"), Message("assistant", "y")], Prefix())])
    assert report.conversations == 1
    assert report.made["seam"] == 3


def run(*arguments):
    return CliRunner().invoke(app, ["verify-template", *map(str, arguments)])


def test_the_command_proves_a_family(tmp_path):
    result = run(models.write_model_dir(tmp_path, QWEN3), "--conversations", 20)
    assert result.exit_code == 0
    assert result.output.splitlines()[-1] == "PASS"
    assert "family qwen3, template qwen3.jinja" in result.output


def test_the_command_shows_why_a_published_template_fails(qwen3_dir):
    result = run(qwen3_dir, "--template", "own")
    assert result.exit_code == 1
    assert "FAIL append-only text" in result.output
    assert "  1. user: ''\n  2. assistant: ''\n  3. tool: ''" in result.output
    assert "151667:'<think>'" in result.output
