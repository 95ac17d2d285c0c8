"""Qwen3: the models of April 2025, which think or not as asked (https://huggingface.co/Qwen/Qwen3-8B), and
those of July 2025 and Qwen3-Next, which always think or never do.

The published templates drop the reasoning of earlier turns; ours keeps it, because the tokens that the
model sampled are what it is trained on.
"""

from titogym.templates.family import Family, ReasoningFormat, Signs, ToolCallFormat

_CALLS = ToolCallFormat("hermes_json", "<tool_call>", "</tool_call>")
_STOP = ("<|im_end|>", "<|endoftext|>")
_ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM")

QWEN3 = Family(
    name="qwen3",
    models="Qwen3 (April 2025)",
    template="qwen3.jinja",
    closer="<|im_end|>\n",
    stop=_STOP,
    reasoning=ReasoningFormat("<think>", "</think>"),
    tool_calls=_CALLS,
    kwargs={"enable_thinking": (True, False)},
    signs=Signs(
        template=("<tool_response>", "enable_thinking", "<|im_start|>"),
        architectures=_ARCHITECTURES[:2],
        absent=("<function=",),
    ),
    evidence="gated on CPU: append-only rendering and seam proved on the Qwen3 tokenizer, text equal to the "
    "published chat template where that keeps what was written",
)

QWEN3_THINKING = Family(
    name="qwen3-thinking",
    models="Qwen3-Thinking-2507, Qwen3-Next-Thinking",
    template="qwen3.jinja",
    settings={"thinks": "always"},
    closer="<|im_end|>\n",
    stop=_STOP,
    reasoning=ReasoningFormat("<think>", "</think>"),
    tool_calls=_CALLS,
    signs=Signs(
        template=("<tool_response>", "<|im_start|>assistant\\n<think>\\n"),
        architectures=_ARCHITECTURES,
        absent=("enable_thinking", "<function="),
    ),
    evidence="gated on CPU: append-only rendering and seam proved on the Qwen3 tokenizer",
)

QWEN3_INSTRUCT = Family(
    name="qwen3-instruct",
    models="Qwen3-Instruct-2507, Qwen3-Next-Instruct",
    template="qwen3.jinja",
    settings={"thinks": "never"},
    closer="<|im_end|>\n",
    stop=_STOP,
    tool_calls=_CALLS,
    signs=Signs(
        template=("<tool_response>", "<|im_start|>", "For each function call, return a json object"),
        architectures=_ARCHITECTURES,
        absent=("enable_thinking", "<think>", "<function="),
    ),
    evidence="gated on CPU: append-only rendering and seam proved on the Qwen3 tokenizer, text equal to the "
    "published chat template of the 2507 instruct models",
)
