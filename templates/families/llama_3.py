"""Llama 3.1, 3.2 and 3.3 instruct (https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct).

The published template takes one call per message and drops the text beside it; ours writes both.
"""

from titogym.templates.family import Family, Signs, ToolCallFormat

LLAMA_3 = Family(
    name="llama-3",
    models="Llama 3.1, 3.2, 3.3 instruct",
    template="llama_3.jinja",
    closer="<|eot_id|>",
    stop=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    tokens=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    tool_calls=ToolCallFormat("bare_json", "<|python_tag|>", "", lead=""),
    signs=Signs(
        template=("<|start_header_id|>", "ipython"),
        architectures=("LlamaForCausalLM", "MllamaForConditionalGeneration"),
    ),
    evidence="gated on CPU: append-only rendering and seam proved on the Llama 3 vocabulary with the control "
    "tokens of 3.1, text equal to the published chat template of 3.1 for single calls without text",
)
