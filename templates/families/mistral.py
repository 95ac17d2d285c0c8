"""Mistral models with the v13 instruct format: Mistral Small 3.2, Magistral, Devstral, Ministral 3
(https://huggingface.co/mistralai/Devstral-Small-2507). Calls have no ids; earlier formats differ.
"""

from titogym.templates.family import CallMarks, Family, ReasoningFormat, Signs, ToolCallFormat

MISTRAL = Family(
    name="mistral",
    models="Mistral Small 3.2, Magistral, Devstral, Ministral 3",
    template="mistral.jinja",
    closer="</s>",
    stop=("</s>",),
    tokens=(
        "<s>",
        "[INST]",
        "[/INST]",
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[TOOL_CALLS]",
        "[ARGS]",
    ),
    reasoning=ReasoningFormat("[THINK]", "[/THINK]"),
    tool_calls=ToolCallFormat(
        "marked_json",
        "[TOOL_CALLS]",
        "",
        CallMarks(call="", named="[ARGS]", end="", id="[CALL_ID]"),
        lead="",
    ),
    signs=Signs(
        template=("[SYSTEM_PROMPT]", "[ARGS]"),
        architectures=(
            "MistralForCausalLM",
            "Mistral3ForConditionalGeneration",
            "Ministral3ForCausalLM",
            "MixtralForCausalLM",
        ),
        absent=("[CALL_ID]",),
    ),
    evidence="gated on CPU: append-only rendering and seam proved on the Tekken vocabulary with the control "
    "tokens of v13",
)
