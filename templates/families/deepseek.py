"""DeepSeek-V3-0324 (https://huggingface.co/deepseek-ai/DeepSeek-V3-0324), V3.1 and V3.2.

V3.2 has no Jinja template; its format is that of the encoding module in its repository.
"""

from titogym.templates.family import CallMarks, Family, ReasoningFormat, Signs, ToolCallFormat

_END = "<｜end▁of▁sentence｜>"
_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_CALL_TOKENS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)

DEEPSEEK_V3 = Family(
    name="deepseek-v3",
    models="DeepSeek-V3-0324",
    template="deepseek_v3.jinja",
    settings={"v": 3},
    closer=_END,
    stop=(_END,),
    tokens=(*_TOKENS, *_CALL_TOKENS, "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    tool_calls=ToolCallFormat(
        "marked_json",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        CallMarks(
            call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            named="\n```json\n",
            end="\n```<｜tool▁call▁end｜>",
        ),
        lead="",
    ),
    signs=Signs(
        template=("<｜tool▁outputs▁begin｜>",),
        architectures=("DeepseekV3ForCausalLM",),
        absent=("<think>",),
    ),
    evidence="gated on CPU: append-only rendering and seam proved on the DeepSeek-V3 tokenizer",
)

DEEPSEEK_V3_1 = Family(
    name="deepseek-v3.1",
    models="DeepSeek-V3.1 and Terminus",
    template="deepseek_v3.jinja",
    settings={"v": 3.1},
    closer=_END,
    stop=(_END,),
    tokens=(*_TOKENS, *_CALL_TOKENS),
    reasoning=ReasoningFormat("<think>", "</think>"),
    tool_calls=ToolCallFormat(
        "marked_json",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        CallMarks(call="<｜tool▁call▁begin｜>", named="<｜tool▁sep｜>", end="<｜tool▁call▁end｜>"),
        lead="",
    ),
    kwargs={"thinking": (False, True)},
    signs=Signs(
        template=("<｜tool▁calls▁begin｜>", "is_last_user", "thinking"),
        architectures=("DeepseekV3ForCausalLM",),
    ),
    evidence="gated on CPU: append-only rendering and seam proved on the DeepSeek-V3 tokenizer with the "
    "reasoning tokens of V3.1",
)

DEEPSEEK_V3_2 = Family(
    name="deepseek-v3.2",
    models="DeepSeek-V3.2",
    template="deepseek_v3_2.jinja",
    closer=_END,
    stop=(_END,),
    tokens=_TOKENS,
    reasoning=ReasoningFormat("<think>", "</think>"),
    tool_calls=ToolCallFormat(
        "markup",
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        CallMarks(
            call='<｜DSML｜invoke name="',
            named='">',
            key='<｜DSML｜parameter name="',
            keyed='">',
            is_string='" string="',
            valued="</｜DSML｜parameter>",
            end="</｜DSML｜invoke>",
        ),
        lead="\n\n",
    ),
    kwargs={"thinking": (False, True)},
    signs=None,
    evidence="gated on CPU: append-only rendering and seam proved on the DeepSeek-V3 tokenizer",
)
