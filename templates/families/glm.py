"""GLM-4.5 and 4.6 (https://huggingface.co/zai-org/GLM-4.5), GLM-4.7 and GLM-5 (zai-org/GLM-5)."""

from titogym.templates.family import CallMarks, Family, ReasoningFormat, Signs, ToolCallFormat

_MARKS = CallMarks(
    call="",
    named="",
    key="<arg_key>",
    keyed="</arg_key>",
    value="<arg_value>",
    valued="</arg_value>",
    end="",
)
_TOKENS = ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>")

GLM_4_5 = Family(
    name="glm-4.5",
    models="GLM-4.5, GLM-4.6",
    template="glm.jinja",
    settings={"nl": "\n"},
    closer="",
    stop=("<|endoftext|>",),
    openers=("<|user|>", "<|observation|>"),
    tokens=_TOKENS,
    reasoning=ReasoningFormat("<think>", "</think>"),
    tool_calls=ToolCallFormat("markup", "<tool_call>", "</tool_call>", _MARKS),
    kwargs={"enable_thinking": (True, False)},
    signs=Signs(
        template=("[gMASK]<sop>", "<|observation|>", "/nothink"), architectures=("Glm4MoeForCausalLM",)
    ),
    evidence="gated on CPU, with a synthetic tokenizer: append-only rendering and seam proved, text equal to "
    "the published chat template where that keeps what was written",
)

GLM_4_7 = Family(
    name="glm-4.7",
    models="GLM-4.7, GLM-5",
    template="glm.jinja",
    settings={"nl": ""},
    closer="",
    stop=("<|endoftext|>",),
    openers=("<|user|>", "<|observation|>"),
    tokens=_TOKENS,
    reasoning=ReasoningFormat("<think>", "</think>"),
    tool_calls=ToolCallFormat("markup", "<tool_call>", "</tool_call>", _MARKS, lead=""),
    kwargs={"enable_thinking": (True, False)},
    signs=Signs(
        template=("[gMASK]<sop>", "<|observation|>", "clear_thinking"),
        architectures=("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM"),
        absent=("/nothink",),
    ),
    evidence="gated on CPU, with a synthetic tokenizer: append-only rendering and seam proved",
)
