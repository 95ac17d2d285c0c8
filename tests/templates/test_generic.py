"""Families derived from a model's own chat template."""

import json

import pytest

from tests.templates import models, real_models
from titogym.errors import UserError
from titogym.templates.conversation import Message, Prefix
from titogym.templates.families import BUILT_IN, QUICKSTART
from titogym.templates.model import load_model_assets

FAMILIES = {family.name: family for family in BUILT_IN}


def folder(path, template, tokenizer=None, eos="<|endoftext|>"):
    path.mkdir(exist_ok=True)
    (tokenizer or models.byte_level(models.CHATML, models.TAGS)).save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(template)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return path


def test_smollm2_from_its_own_files():
    assets = load_model_assets(real_models.smollm2(), "generic")
    assert assets.family.closer == "<|im_end|>\n"
    assert assets.family.stop == ("<|im_end|>",)
    assert assets.family.tool_calls is None  # its template has no tools
    assert "best effort" in assets.family.evidence


def test_qwen_from_the_published_template():
    known = load_model_assets(real_models.qwen2_5())
    derived = load_model_assets(real_models.qwen2_5(), "generic")
    assert (derived.family.closer, derived.family.tool_calls) == (
        known.family.closer,
        known.family.tool_calls,
    )
    asked = [Message("user", "x")]
    assert derived.encode(asked, Prefix(), add_generation_prompt=True) == known.encode(
        asked, Prefix(), add_generation_prompt=True
    )


@pytest.mark.parametrize(
    "name", ["quickstart", "smollm2", "glm-4.5", "minimax-m2", "deepseek-v3.2", "llama-3", "mistral"]
)
def test_our_own_templates_are_recognised(name, tmp_path):
    """Each has a format of its own, which probing finds again: closer, stop, openers, calls."""
    family = FAMILIES[name]
    # Published templates write each argument, given as an object; so do ours where arguments are marked up.
    path = folder(tmp_path / "model", family.source(), models.tokenizer_for(family), eos=family.stop[0])
    derived = load_model_assets(path, "generic").family
    assert derived.closer == family.closer
    assert set(derived.stop) <= set(family.stop)
    assert set(derived.openers) == set(family.openers)
    assert family.tool_calls is not None
    assert derived.tool_calls is not None
    assert derived.tool_calls.kind == family.tool_calls.kind
    assert derived.tool_calls.begin == family.tool_calls.begin


def test_a_template_that_forgets_is_refused_with_the_reason(qwen3_dir):
    with pytest.raises(UserError, match=r"not append-only \(.*\); choose another --family"):
        load_model_assets(qwen3_dir, "generic")


SOURCE = QUICKSTART.source()


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("'<|im_start|>assistant\\n' if", "'<|im_start|>assistant: ' if", "does not begin as the prompt"),
        (
            "message.content or ''",
            "message.content if loop.last or message.role != 'assistant' else ''",
            "once a message follows",
        ),
        (
            "message.content or ''",
            "'> ' + message.content if message.role == 'assistant' else message.content",
            "text of its own",
        ),
    ],
)
def test_a_template_that_does_not_append_is_refused(old, new, reason, tmp_path):
    assert old in SOURCE
    with pytest.raises(UserError, match=reason):
        load_model_assets(folder(tmp_path, SOURCE.replace(old, new)), "generic")


def test_a_folder_that_gives_nothing_to_derive_from(tmp_path):
    path = folder(tmp_path, "{{ raise_exception('no') }}")
    with pytest.raises(UserError, match="refuses a plain conversation"):
        load_model_assets(path, "generic")
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    (path / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"Nothing in the chat template .* ends an answer"):
        load_model_assets(path, "generic")
    (path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template to derive a family from"):
        load_model_assets(path, "generic")
