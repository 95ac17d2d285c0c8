"""Qwen3.5 (https://huggingface.co/Qwen/Qwen3.5-35B-A3B): marked-up calls, reasoning opened by the prompt.

Its larger models think unless told not to, the smaller ones the other way round: set `enable_thinking`.
"""

from titogym.templates.family import CallMarks, Family, ReasoningFormat, Signs, ToolCallFormat

# Shared with Qwen3-Coder and Nemotron-3.
FUNCTION_MARKS = CallMarks(
    call="<function=",
    named=">",
    key="<parameter=",
    keyed=">",
    valued="</parameter>",
    pad="\n",
    end="</function>",
)

QWEN3_5 = Family(
    name="qwen3.5",
    models="Qwen3.5, Qwen3.6",
    template="qwen3_5.jinja",
    closer="<|im_end|>\n",
    stop=("<|im_end|>", "<|endoftext|>"),
    reasoning=ReasoningFormat("<think>", "</think>"),
    tool_calls=ToolCallFormat("markup", "<tool_call>", "</tool_call>", FUNCTION_MARKS, lead="\n\n"),
    kwargs={"enable_thinking": (True, False)},
    signs=Signs(
        template=("<function=", "<tool_response>", "enable_thinking", "<|im_start|>"),
        architectures=(
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
            "Qwen3_5ForCausalLM",
            "Qwen3_5MoeForCausalLM",
        ),
    ),
    evidence="gated on CPU: append-only rendering and seam proved on the Qwen3.5 vocabulary, text equal to "
    "the published chat template where that keeps what was written",
)
