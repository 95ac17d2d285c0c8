"""Qwen2.5 instruct models (https://huggingface.co/Qwen/Qwen2.5-7B-Instruct)."""

from titogym.templates.family import Family, Signs, ToolCallFormat

QWEN2_5 = Family(
    name="qwen2.5",
    models="Qwen2.5 instruct",
    template="qwen3.jinja",
    settings={
        "thinks": "never",
        "default_system": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    },
    closer="<|im_end|>\n",
    stop=("<|im_end|>", "<|endoftext|>"),
    tool_calls=ToolCallFormat("hermes_json", "<tool_call>", "</tool_call>"),
    signs=Signs(
        template=("You are Qwen, created by Alibaba Cloud", "<tool_response>"),
        architectures=("Qwen2ForCausalLM", "Qwen2MoeForCausalLM"),
    ),
    evidence="gated on CPU: append-only rendering and seam proved on the Qwen vocabulary, text equal to the "
    "published chat template",
)
