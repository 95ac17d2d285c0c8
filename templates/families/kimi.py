"""Kimi-K2 (https://huggingface.co/moonshotai/Kimi-K2-Instruct), K2-Thinking and K2.5.

Their calls carry ids such as `functions.bash:0`, counted through the conversation.
"""

from titogym.templates.family import CallMarks, Family, ReasoningFormat, Signs, ToolCallFormat

_CALLS = ToolCallFormat(
    "marked_json",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    CallMarks(
        call="<|tool_call_begin|>",
        named="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
    ),
    lead="",
    ids="functions.{name}:{number}",
)
_TOKENS = (
    "<|im_system|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_middle|>",
    _CALLS.begin,
    _CALLS.end,
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_ARCHITECTURES = ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM", "KimiK25ForConditionalGeneration")
_EVIDENCE = "gated on CPU, with a synthetic tokenizer: append-only rendering and seam proved"

KIMI_K2 = Family(
    name="kimi-k2",
    models="Kimi-K2-Instruct",
    template="kimi.jinja",
    settings={"thinks": "no"},
    closer="<|im_end|>",
    stop=("<|im_end|>",),
    tokens=_TOKENS,
    tool_calls=_CALLS,
    folds=frozenset({"tool"}),
    signs=Signs(
        template=("<|im_middle|>", "<|im_assistant|>"), architectures=_ARCHITECTURES, absent=("<think>",)
    ),
    evidence=_EVIDENCE,
)

KIMI_K2_THINKING = Family(
    name="kimi-k2-thinking",
    models="Kimi-K2-Thinking",
    template="kimi.jinja",
    settings={"thinks": "itself"},
    closer="<|im_end|>",
    stop=("<|im_end|>",),
    tokens=_TOKENS,
    reasoning=ReasoningFormat("<think>", "</think>"),
    tool_calls=_CALLS,
    folds=frozenset({"tool"}),
    signs=Signs(
        template=("<|im_middle|>", "<|im_assistant|>", "<think>"),
        architectures=_ARCHITECTURES,
        absent=("thinking is defined",),
    ),
    evidence=_EVIDENCE,
)

KIMI_K2_5 = Family(
    name="kimi-k2.5",
    models="Kimi-K2.5",
    template="kimi.jinja",
    settings={"thinks": "opened"},
    closer="<|im_end|>",
    stop=("<|im_end|>",),
    tokens=_TOKENS,
    reasoning=ReasoningFormat("<think>", "</think>"),
    tool_calls=_CALLS,
    folds=frozenset({"tool"}),
    kwargs={"thinking": (True, False)},
    signs=Signs(
        template=("<|im_middle|>", "<|im_assistant|>", "<think>", "thinking is defined"),
        architectures=_ARCHITECTURES,
    ),
    evidence=_EVIDENCE + "; tools are declared as JSON, where the published template may write TypeScript",
)
