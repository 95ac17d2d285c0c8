"""Every family that comes with titogym, on its real tokenizer where a package ships one, else on one of our
own with its control tokens."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.templates import models, real_models
from tests.templates.test_render import BASH
from titogym.templates import registry
from titogym.templates.conversation import Message, Prefix, ToolCall
from titogym.templates.families import BUILT_IN
from titogym.templates.literal import Guard
from titogym.templates.model import ModelAssets, load_model_assets
from titogym.templates.reference import reference
from titogym.templates.render import Renderer
from titogym.templates.verify import describe, verify

REAL: dict[str, Callable[[], Path]] = {
    "chatml": real_models.qwen3,
    "smollm2": real_models.smollm2,
    "qwen2.5": real_models.qwen2_5,
    "qwen3": real_models.qwen3,
    "qwen3-instruct": real_models.qwen3_instruct,
    "qwen3-thinking": real_models.qwen3,
    "qwen3-coder": real_models.qwen3_coder,
    "qwen3.5": real_models.qwen3_5,
    "nemotron-3": real_models.nemotron_3,
    "deepseek-v3": real_models.deepseek_v3,
    "deepseek-v3.1": real_models.deepseek_v3,
    "deepseek-v3.2": real_models.deepseek_v3,
    "gpt-oss": real_models.gpt_oss,
    "llama-3": real_models.llama_3,
    "mistral": real_models.mistral,
}
SYNTHETIC = [family for family in BUILT_IN if family.name not in REAL]
NAMES = [family.name for family in BUILT_IN]
_loaded: dict[str, ModelAssets] = {}


def load(name: str, folder: Path) -> ModelAssets:
    if name not in _loaded:
        if name in REAL:
            _loaded[name] = load_model_assets(REAL[name](), name)
        else:
            _loaded[name] = load_model_assets(
                models.write_model_dir(folder / name, registry.families()[name])
            )
    return _loaded[name]


@pytest.fixture(params=NAMES)
def assets(request: pytest.FixtureRequest, tmp_path: Path) -> ModelAssets:
    return load(request.param, tmp_path)


def test_it_is_append_only_and_its_seam_is_exact(assets):
    report = verify(assets, count=12)
    assert report.counter_example is None, describe(assets, report)
    assert report.made["seam"] > 10


def test_its_evidence_says_which_tokenizer(assets):
    assert ("synthetic tokenizer" in assets.family.evidence) == (assets.family in SYNTHETIC[1:])


def test_published_folders_show_their_family():
    for name in ("qwen2.5", "qwen3", "qwen3-instruct", "qwen3.5", "nemotron-3", "gpt-oss"):
        assert registry.resolve(REAL[name]()).name == name
    for name in ("qwen3-coder", "llama-3", "smollm2"):
        assert registry.resolve(REAL[name]()).name == name


@pytest.mark.parametrize(
    ("template", "architecture", "name"),
    [
        ("glm4moe", "Glm4MoeForCausalLM", "glm-4.5"),
        ("nemotron_3_nano", "NemotronHForCausalLM", "nemotron-3"),
        ("nemotron_3_super", "NemotronHForCausalLM", "nemotron-3"),
        ("qwen3_5_nothink", "Qwen3_5ForConditionalGeneration", "qwen3.5"),
        ("qwen3_6", "Qwen3_5MoeForConditionalGeneration", "qwen3.5"),
        ("llama3_2", "LlamaForCausalLM", "llama-3"),
    ],
)
def test_published_templates_show_their_family(template, architecture, name, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(real_models.chat_template(template))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert registry.resolve(tmp_path).name == name


ASKED = (Message("system", "Be brief."), Message("user", "List."))
CALL = ToolCall("call_1", "bash", '{"command": "ls", "n": 2}')
CALLED = (
    *ASKED,
    Message("assistant", "Looking.", "Hm.", (CALL, replace(CALL, id="call_2"))),
    Message("tool", "a", tool_call_id="call_1"),
)


@pytest.mark.parametrize(
    ("name", "kwargs", "written"),
    [
        (
            "qwen3-coder",
            {},
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nList.<|im_end|>\n"
            "<|im_start|>assistant\nLooking.\n\n"
            + "\n".join(
                2
                * [
                    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n"
                    "<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>"
                ]
            )
            + "<|im_end|>\n<|im_start|>user\n<tool_response>\na\n</tool_response>\n<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "glm-4.5",
            {},
            "<|system|>\nBe brief.<|user|>\nList.<|assistant|>\n<think>Hm.</think>\nLooking.\n"
            + "\n".join(
                2
                * [
                    "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n"
                    "<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
                ]
            )
            + "<|observation|>\n<tool_response>\na\n</tool_response><|assistant|>",
        ),
        (
            "glm-4.7",
            {},
            "<|system|>Be brief.<|user|>List.<|assistant|><think>Hm.</think>Looking."
            + 2
            * (
                "<tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value>"
                "<arg_key>n</arg_key><arg_value>2</arg_value></tool_call>"
            )
            + "<|observation|><tool_response>a</tool_response><|assistant|><think>",
        ),
        (
            "kimi-k2.5",
            {},
            "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>List.<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|><think>Hm.</think>Looking.<|tool_calls_section_begin|>"
            '<|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{"command": "ls", "n": 2}'
            '<|tool_call_end|><|tool_call_begin|>functions.bash:1<|tool_call_argument_begin|>{"command": "ls", '  # noqa: E501
            '"n": 2}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
            "<|im_system|>tool<|im_middle|>## Return of functions.bash:0\na<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|><think>",
        ),
        (
            "minimax-m2",
            {},
            "]~b]system\nBe brief.[e~[\n]~b]user\nList.[e~[\n]~b]ai\n<think>\nHm.\n</think>\n\nLooking.\n"
            "<minimax:tool_call>\n"
            + 2
            * (
                '<invoke name="bash">\n<parameter name="command">ls</parameter>\n<parameter name="n">2</parameter>\n'  # noqa: E501
                "</invoke>\n"
            )
            + "</minimax:tool_call>[e~[\n]~b]tool\n<response>a</response>[e~[\n]~b]ai\n<think>\n",
        ),
        (
            "deepseek-v3.1",
            {},
            "Be brief.<｜User｜>List.<｜Assistant｜></think>Looking.<｜tool▁calls▁begin｜>"
            + 2 * '<｜tool▁call▁begin｜>bash<｜tool▁sep｜>{"command": "ls", "n": 2}<｜tool▁call▁end｜>'
            + "<｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜tool▁output▁begin｜>a<｜tool▁output▁end｜>",
        ),
        (
            "deepseek-v3.2",
            {"thinking": True},
            "Be brief.<｜User｜>List.<｜Assistant｜><think>Hm.</think>Looking.\n\n<｜DSML｜function_calls>\n"
            + 2
            * (
                '<｜DSML｜invoke name="bash">\n<｜DSML｜parameter name="command" string="true">ls</｜DSML｜parameter>\n'  # noqa: E501
                '<｜DSML｜parameter name="n" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            )
            + "</｜DSML｜function_calls><｜end▁of▁sentence｜>\n\n<function_results>\n<result>a</result>\n"
            "</function_results>\n\n<think>",
        ),
        (
            "mistral",
            {},
            "[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]List.[/INST][THINK]Hm.[/THINK]Looking."
            + 2 * '[TOOL_CALLS]bash[ARGS]{"command": "ls", "n": 2}'
            + "</s>[TOOL_RESULTS]a[/TOOL_RESULTS]",
        ),
        (
            "gpt-oss",
            {},
            "# Instructions\n\nBe brief.<|end|><|start|>user<|message|>List.<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
            "<|start|>assistant<|channel|>commentary<|message|>Looking.<|end|>"
            + 2
            * (
                "<|start|>assistant<|channel|>commentary to=functions.bash <|constrain|>json<|message|>"
                '{"command": "ls", "n": 2}<|call|>'
            )
            + '<|start|>functions.bash to=assistant<|channel|>commentary<|message|>"a"<|end|><|start|>assistant',  # noqa: E501
        ),
    ],
)
def test_it_writes_its_published_format(name, kwargs, written, tmp_path):
    text = load(name, tmp_path).renderer.render(CALLED, Prefix(kwargs=kwargs), add_generation_prompt=True)
    assert text.endswith(written)


def test_every_family_declares_its_tools(assets):
    text = assets.renderer.render(ASKED, Prefix((BASH,)), add_generation_prompt=True)
    assert "bash" in text
    assert "command" in text


@pytest.mark.parametrize("arguments", ["", "not json", "[1]", '{"a": ', "null"])
def test_arguments_that_are_no_object_are_written_somehow(assets, arguments):
    messages = [*ASKED, Message("assistant", tool_calls=(ToolCall("call_1", "bash", arguments),))]
    before = assets.renderer.render(ASKED, Prefix((BASH,)), add_generation_prompt=True)
    text = assets.renderer.render(messages, Prefix((BASH,)), add_generation_prompt=False)
    assert text.startswith(before)
    assert "bash" in text[len(before) :]
    assert arguments in text[len(before) :]


def test_the_models_own_ids_are_kept():
    """What the model called its call is what stands in the result, whatever the harness knows it by."""
    family = registry.families()["kimi-k2"]
    renderer = Renderer(family, Guard(family.control_texts))
    call = ToolCall("call_x", "bash", "{}", native_id="functions.bash:7")
    messages = [*ASKED, Message("assistant", "", "", (call,)), Message("tool", "ok", tool_call_id="call_x")]
    text = renderer.render(messages, Prefix(), add_generation_prompt=False)
    assert "<|tool_call_begin|>functions.bash:7<|" in text
    assert "## Return of functions.bash:7\nok" in text
    assert "call_x" not in text


def test_the_page_of_families_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "families.md"
    assert page.read_text() == reference(), "run: python -m titogym.templates.reference > docs/families.md"
