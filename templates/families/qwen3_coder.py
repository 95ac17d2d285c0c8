"""Qwen3-Coder and Qwen3-Coder-Next (https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct)."""

from titogym.templates.families.qwen3_5 import FUNCTION_MARKS
from titogym.templates.family import Family, Signs, ToolCallFormat

QWEN3_CODER = Family(
    name="qwen3-coder",
    models="Qwen3-Coder, Qwen3-Coder-Next",
    template="qwen3_coder.jinja",
    closer="<|im_end|>\n",
    stop=("<|im_end|>", "<|endoftext|>"),
    tool_calls=ToolCallFormat("markup", "<tool_call>", "</tool_call>", FUNCTION_MARKS, lead="\n\n"),
    signs=Signs(
        template=("<function=", "<tool_response>", "<IMPORTANT>", "<|im_start|>"),
        architectures=("Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3ForCausalLM"),
        absent=("<think>",),
    ),
    evidence="gated on CPU: append-only rendering and seam proved on the Qwen3 tokenizer, which it shares",
)
