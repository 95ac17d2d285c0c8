"""Our own family, for the model that `titogym quickstart` makes: ChatML, short prompts, no reasoning."""

from titogym.templates.family import Family, ToolCallFormat

QUICKSTART = Family(
    name="quickstart",
    models="the model that `titogym quickstart` makes",
    template="quickstart.jinja",
    closer="<|im_end|>\n",
    stop=("<|im_end|>", "<|endoftext|>"),
    tool_calls=ToolCallFormat("hermes_json", "<tool_call>", "</tool_call>"),
    evidence="gated on CPU: append-only rendering and seam proved on the quickstart tokenizer",
)
