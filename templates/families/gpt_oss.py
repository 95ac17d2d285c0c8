"""gpt-oss (https://huggingface.co/openai/gpt-oss-20b) and its harmony format.

A turn ends with `<|return|>` or, after a call, with `<|call|>`. In the history an answer ends with `<|end|>`,
as the format asks: the seam puts it in the place of a sampled `<|return|>`.
"""

from titogym.templates.family import Family, ReasoningFormat, Signs, ToolCallFormat

GPT_OSS = Family(
    name="gpt-oss",
    models="gpt-oss-20b, gpt-oss-120b",
    template="gpt_oss.jinja",
    closer="<|end|>",
    call_closer="<|call|>",
    stop=("<|return|>", "<|call|>"),
    tokens=("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    reasoning=ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>"),
    tool_calls=ToolCallFormat("harmony", "<|channel|>commentary to=functions.", "<|call|>"),
    folds=frozenset({"tool"}),
    kwargs={"reasoning_effort": ("medium", "low", "high")},
    signs=Signs(template=("<|channel|>", "functions"), architectures=("GptOssForCausalLM",)),
    evidence="gated on CPU: append-only rendering and seam proved on the gpt-oss tokenizer, text equal "
    "to the published chat template but for the date and the order of channel and recipient",
)
