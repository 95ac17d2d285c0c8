"""SmolLM2 instruct models (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct).

Their chat template has no tools; definitions and calls follow the function-calling prompt that the model
card of the 1.7B model publishes.
"""

from titogym.templates.family import Family, Signs, ToolCallFormat

SMOLLM2 = Family(
    name="smollm2",
    models="SmolLM2 instruct",
    template="smollm2.jinja",
    closer="<|im_end|>\n",
    stop=("<|im_end|>", "<|endoftext|>"),
    tool_calls=ToolCallFormat("json_list", "<tool_call>", "</tool_call>"),
    signs=Signs(template=("named SmolLM, trained by Hugging Face",), architectures=("LlamaForCausalLM",)),
    evidence="gated on CPU: append-only rendering and seam proved on the tokenizer of SmolLM2-135M-Instruct, "
    "text equal to its own chat template where no tools are used",
)
