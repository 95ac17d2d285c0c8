"""Plain ChatML, for models that have its tokens and no format of their own; only by name."""

from titogym.templates.family import Family, ToolCallFormat

CHATML = Family(
    name="chatml",
    models="any with ChatML tokens; only by name",
    template="chatml.jinja",
    closer="<|im_end|>\n",
    stop=("<|im_end|>",),
    tokens=("<|im_start|>",),
    tool_calls=ToolCallFormat("hermes_json", "<tool_call>", "</tool_call>"),
    evidence="gated on CPU: append-only rendering and seam proved on the Qwen3 tokenizer",
)
