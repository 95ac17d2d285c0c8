import json
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest

from tests.templates import models
from titogym.errors import UserError
from titogym.templates import registry
from titogym.templates.families import BUILT_IN, QUICKSTART, QWEN3, SMOLLM2
from titogym.templates.model import load_model_assets


@pytest.mark.parametrize("family", BUILT_IN, ids=lambda family: family.name)
def test_a_folder_with_our_template_shows_its_family(family, tmp_path):
    assert registry.resolve(models.write_model_dir(tmp_path, family)) is family


def test_published_folders_show_their_family(qwen3_dir, smollm2_dir):
    assert registry.resolve(qwen3_dir) is QWEN3
    assert registry.resolve(smollm2_dir) is SMOLLM2


def test_a_template_in_the_tokenizer_configuration_counts_too(tmp_path):
    models.write_model_dir(tmp_path, QUICKSTART)
    source = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    for stored in (source, [{"name": "default", "template": source}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": stored}))
        assert registry.resolve(tmp_path) is QUICKSTART


def test_a_name_wins_over_what_the_folder_shows(tmp_path):
    assert registry.resolve(models.write_model_dir(tmp_path, QUICKSTART), "qwen3") is QWEN3


def test_dotted_paths_and_entry_points(tmp_path, monkeypatch):
    where = "titogym.templates.families.qwen3"
    assert registry.resolve(tmp_path, f"{where}:QWEN3") is QWEN3
    assert registry.resolve(tmp_path, f"{where}.QWEN3") is QWEN3
    point = EntryPoint("mine", f"{where}:QWEN3", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    assert registry.resolve(tmp_path, "mine") is QWEN3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen9", "no family 'qwen9'; choose one of .*quickstart, qwen2.5, qwen3, .*smollm2"),
        ("titogym.nowhere:X", "Cannot import family titogym.nowhere:X"),
        ("..nowhere", "Cannot import family ..nowhere"),
        ("titogym.templates.families:NOTHING", "Cannot import family"),
        ("titogym.templates.families:BUILT_IN", "must be a titogym Family"),
    ],
)
def test_a_wrong_name_is_answered_with_the_choices(name, message, tmp_path):
    with pytest.raises(UserError, match=message):
        registry.resolve(tmp_path, name)


def test_a_broken_entry_point_is_named(monkeypatch):
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [EntryPoint("mine", "titogym.nowhere:X", group)]
    )
    with pytest.raises(UserError, match="Entry point mine"):
        registry.families()


def test_an_unknown_folder_asks_for_a_family(tmp_path):
    models.write_model_dir(tmp_path, QUICKSTART)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(UserError, match="fit none that is known; give --family"):
        registry.resolve(tmp_path)


PUBLISHED = "{#- named SmolLM, trained by Hugging Face -#}"


def test_two_families_that_fit_are_both_named(tmp_path, monkeypatch):
    (tmp_path / "chat_template.jinja").write_text(PUBLISHED)
    assert registry.resolve(tmp_path) is SMOLLM2
    monkeypatch.setattr(registry, "BUILT_IN", (*BUILT_IN, replace(SMOLLM2, name="twin")))
    with pytest.raises(UserError, match="smollm2 and twin both fit"):
        registry.resolve(tmp_path)


def test_another_architecture_with_the_same_template_does_not_fit(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(PUBLISHED)
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(UserError, match="fit none"):
        registry.resolve(tmp_path)


def test_assets(tmp_path):
    assets = load_model_assets(models.write_model_dir(tmp_path, QUICKSTART, context_length=512))
    token = assets.tokenizer.token_to_id
    assert assets.context_length == 512
    assert assets.stop_ids == {token("<|im_end|>"), token("<|endoftext|>")}
    assert assets.opener_ids == {token("<|endoftext|>")}
    assert assets.tokenizer.decode(assets.closer_ids) == "<|im_end|>\n"
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 64}}')
    assert load_model_assets(tmp_path).context_length == 64
    (tmp_path / "config.json").unlink()
    assert load_model_assets(tmp_path).context_length is None


def test_folders_that_cannot_serve_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        load_model_assets(tmp_path / "nowhere")
    models.write_model_dir(tmp_path, QUICKSTART)
    models.byte_level(["<|im_start|>", "<|im_end|>"]).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"ends turns with <\|endoftext\|>"):
        load_model_assets(tmp_path)
    models.write_model_dir(tmp_path, QUICKSTART)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"Cannot read .*config\.json"):
        load_model_assets(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="should hold a JSON object"):
        load_model_assets(tmp_path)
