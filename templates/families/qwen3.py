"""Qwen3, the models of April 2025 that think or not as asked (https://huggingface.co/Qwen/Qwen3-8B).

The published template drops the reasoning of earlier turns; ours keeps it, because the tokens that the
model sampled are what it is trained on. Not for the 2507 models: their templates differ.
"""

from titogym.templates.family import Family, ReasoningFormat, Signs, ToolCallFormat

QWEN3 = Family(
    name="qwen3",
    template="qwen3.jinja",
    closer="<|im_end|>\n",
    stop=("<|im_end|>", "<|endoftext|>"),
    reasoning=ReasoningFormat("<think>", "</think>"),
    tool_calls=ToolCallFormat("hermes_json", "<tool_call>", "</tool_call>"),
    kwargs={"enable_thinking": (True, False)},
    signs=Signs(
        template=("<tool_response>", "enable_thinking", "<|im_start|>"),
        architectures=("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    ),
    evidence="gated on CPU: append-only rendering and seam proved on the Qwen3 tokenizer, text equal to the "
    "published chat template where that keeps what was written",
)
