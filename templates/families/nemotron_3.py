"""NVIDIA Nemotron-3 (https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16)."""

from titogym.templates.families.qwen3_5 import FUNCTION_MARKS
from titogym.templates.family import Family, ReasoningFormat, Signs, ToolCallFormat

NEMOTRON_3 = Family(
    name="nemotron-3",
    models="Nemotron-3 Nano, Super, Ultra",
    template="nemotron_3.jinja",
    closer="<|im_end|>\n",
    stop=("<|im_end|>",),
    tokens=("<|im_start|>",),
    reasoning=ReasoningFormat("<think>", "</think>"),
    tool_calls=ToolCallFormat("markup", "<tool_call>", "</tool_call>", FUNCTION_MARKS),
    kwargs={"enable_thinking": (True, False)},
    signs=Signs(
        template=("<function=", "truncate_history_thinking", "<|im_start|>"),
        architectures=("NemotronHForCausalLM", "NemotronForCausalLM"),
    ),
    evidence="gated on CPU: append-only rendering and seam proved on the Tekken vocabulary, of which its own "
    "is made, with its control tokens, text equal to the published chat template where that keeps what was "
    "written",
)
