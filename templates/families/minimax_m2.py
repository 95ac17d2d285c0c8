"""MiniMax-M2 and its successors (https://huggingface.co/MiniMaxAI/MiniMax-M2)."""

from titogym.templates.family import CallMarks, Family, ReasoningFormat, Signs, ToolCallFormat

MINIMAX_M2 = Family(
    name="minimax-m2",
    models="MiniMax-M2, M2.1, M2.5",
    template="minimax_m2.jinja",
    closer="[e~[\n",
    stop=("[e~[",),
    tokens=("]~!b[", "]~b]"),
    reasoning=ReasoningFormat("<think>", "</think>"),
    tool_calls=ToolCallFormat(
        "markup",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        CallMarks(
            call='<invoke name="',
            named='">',
            key='<parameter name="',
            keyed='">',
            valued="</parameter>",
            end="</invoke>",
        ),
    ),
    signs=Signs(template=("]~b]", "<minimax:tool_call>"), architectures=("MiniMaxM2ForCausalLM",)),
    evidence="gated on CPU, with a synthetic tokenizer: append-only rendering and seam proved",
)
