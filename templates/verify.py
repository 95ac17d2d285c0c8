"""Proof by trial that a family is append-only on a tokenizer, and that its seam joins what it should.

Training on the tokens that were sampled is only honest if a conversation that grows keeps its old tokens.
`verify` renders generated conversations, checks every cut of each, and shrinks the first that fails.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from titogym.templates.conversation import Message, Prefix
from titogym.templates.generated import conversations
from titogym.templates.model import ModelAssets
from titogym.templates.render import NotAppendOnlyError, RenderError
from titogym.templates.seam import seam, suffix

# What each check establishes, in the order in which they are made.
CHECKS = {
    "render": "the template accepts the conversation",
    "append-only text": "messages that follow change nothing in the text before them",
    "append-only tokens": "messages that follow change nothing in the tokens before them",
    "opener": "an assistant message begins with the tokens of the generation prompt",
    "closer": "an assistant message ends with the tokens of the family's closer",
    "typed control text": "control-token text in messages, calls and tools gives no control token",
    "round trip": "the tokens decode to the text that was rendered",
    "seam": "sampled tokens, joined by the seam to the rendered suffix, equal the whole rendered",
}


@dataclass(frozen=True, slots=True)
class CounterExample:
    """The smallest conversation found for which `check` fails: what there should be, and what there is."""

    check: str
    detail: str
    messages: tuple[Message, ...]
    prefix: Prefix
    expected: list[int] = field(default_factory=list)  # token ids
    found: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Report:
    """`made` counts the checks of each kind that were made. It passed when there is no counter-example."""

    made: dict[str, int]
    conversations: int
    counter_example: CounterExample | None


@dataclass(frozen=True, slots=True)
class _Failure:
    detail: str
    expected: Sequence[int] = ()
    found: Sequence[int] = ()


Example = tuple[Sequence[Message], Prefix]
Checks = Callable[[ModelAssets, Sequence[Message], Prefix], Iterator[tuple[str, _Failure | None]]]
Failed = tuple[str, _Failure]  # which check, and how


def verify(assets: ModelAssets, examples: Sequence[Example] | None = None, *, count: int = 200) -> Report:
    """Check `examples` (default: `count` generated conversations) and stop at the first that fails.

    A seam presumes history that stays as it is, so every history is checked before any seam.
    """
    examples = list(conversations(assets, count)) if examples is None else examples
    made: Counter[str] = Counter()
    for checks in (_history, _seams):
        for seen, (messages, prefix) in enumerate(examples, 1):
            failed = _examine(checks, assets, messages, prefix, made)
            if failed is not None:
                return Report(dict(made), seen, _shrunk(checks, assets, messages, prefix, failed))
    return Report(dict(made), len(examples), None)


def _examine(
    checks: Checks, assets: ModelAssets, messages: Sequence[Message], prefix: Prefix, made: Counter[str]
) -> Failed | None:
    """The first of `checks` that this conversation fails."""
    try:
        for check, failure in checks(assets, messages, prefix):
            made[check] += 1
            if failure is not None:
                return check, failure
    except NotAppendOnlyError as error:
        return "seam", _Failure(str(error), error.expected, error.found)
    except RenderError as error:
        return "render", _Failure(str(error))
    return None


def _history(
    assets: ModelAssets, messages: Sequence[Message], prefix: Prefix
) -> Iterator[tuple[str, _Failure | None]]:
    """What is written stays written, at every cut of the conversation."""
    whole_text = assets.renderer.render(messages, prefix, add_generation_prompt=False)
    whole = assets.encode(messages, prefix, add_generation_prompt=False)
    yield "render", None
    for index in _answers(messages):
        where = f"message {index + 1} (assistant)"
        opened = assets.encode(messages[:index], prefix, add_generation_prompt=True)
        closed = assets.encode(messages[: index + 1], prefix, add_generation_prompt=False)
        closed_text = assets.renderer.render(messages[: index + 1], prefix, add_generation_prompt=False)
        yield (
            "append-only text",
            _unless(
                whole_text.startswith(closed_text),
                f"{where} or one before it is written differently once others follow",
                closed,
                whole,
            ),
        )
        yield "append-only tokens", _prefix(f"the tokens up to {where}", closed, whole)
        yield "opener", _prefix(f"{where} and the prompt that asks for it", opened, closed)
        closer, _ = assets.closing(messages[index])
        yield "closer", _equal(f"the end of {where}", closer, closed[len(closed) - len(closer) :])
    yield "typed control text", _typed(assets, messages, prefix, whole)
    decoded = assets.tokenizer.decode(whole)
    yield (
        "round trip",
        _unless(
            decoded == whole_text,
            "the decoded tokens are another text",
            assets.tokenizer.encode(whole_text),
            assets.tokenizer.encode(decoded),
        ),
    )


def _seams(
    assets: ModelAssets, messages: Sequence[Message], prefix: Prefix
) -> Iterator[tuple[str, _Failure | None]]:
    """Each assistant message, taken as sampled and ended in every way, joins what follows it."""
    for index, following in pairwise([*_answers(messages), len(messages)]):
        opened = assets.encode(messages[:index], prefix, add_generation_prompt=True)
        closed = assets.encode(messages[: index + 1], prefix, add_generation_prompt=False)
        closer, openers = assets.closing(messages[index])
        body = closed[: len(closed) - len(closer)]
        expected = assets.encode(messages[:following], prefix, add_generation_prompt=True)
        added = suffix(
            assets.renderer,
            assets.tokenizer,
            messages[index + 1 : following],
            prefix,
            neighbour=messages[index],
        )
        for stop in (None, *sorted(assets.stop_ids)):
            row = body if stop is None else [*body, stop]
            joined = seam(row, closer, added, openers, sampled=len(row) - len(opened))
            found = [*row[: len(row) - joined.trim], *joined.append]
            ended = "cut by length" if stop is None else f"ended by {assets.tokenizer.decode([stop])}"
            detail = f"what follows message {index + 1} (assistant), {ended}"
            yield "seam", _equal(detail, expected, found)


def _answers(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message.role == "assistant"]


def _typed(
    assets: ModelAssets, messages: Sequence[Message], prefix: Prefix, whole: Sequence[int]
) -> _Failure | None:
    """The same conversation with every text replaced by "x" shows how many control tokens there should be."""
    control = assets.control_ids
    outline = assets.encode(
        [_outline(message) for message in messages],
        Prefix(tuple({"type": "function", "function": {"name": "x"}} for _ in prefix.tools), prefix.kwargs),
        add_generation_prompt=False,
    )
    expected, found = ([token for token in row if token in control] for row in (outline, whole))
    return _equal("the control tokens of the conversation", expected, found)


def _outline(message: Message) -> Message:
    return replace(
        message,
        content=message.content and "x",
        reasoning=message.reasoning and "x",
        tool_calls=tuple(replace(call, name="x", arguments="{}") for call in message.tool_calls),
    )


def _unless(right: bool, detail: str, expected: Sequence[int], found: Sequence[int]) -> _Failure | None:
    return None if right else _Failure(detail, expected, found)


def _equal(detail: str, expected: Sequence[int], found: Sequence[int]) -> _Failure | None:
    return _unless(list(expected) == list(found), f"{detail} differ", expected, found)


def _prefix(detail: str, head: Sequence[int], whole: Sequence[int]) -> _Failure | None:
    return _equal(detail, head, whole[: len(head)])


def _shrunk(
    checks: Checks, assets: ModelAssets, messages: Sequence[Message], prefix: Prefix, failed: Failed
) -> CounterExample:
    """Simplify while the same check fails."""
    smaller = True
    while smaller:
        smaller = False
        for fewer, lighter in _simpler(messages, prefix):
            again = _examine(checks, assets, fewer, lighter, Counter())
            if again is not None and again[0] == failed[0]:
                messages, prefix, failed, smaller = fewer, lighter, again, True
                break
    check, failure = failed
    return CounterExample(
        check, failure.detail, tuple(messages), prefix, list(failure.expected), list(failure.found)
    )


def _simpler(messages: Sequence[Message], prefix: Prefix) -> Iterator[tuple[Sequence[Message], Prefix]]:
    """Conversations one step simpler, the boldest steps first."""
    for index in range(len(messages)):
        fewer = [*messages[:index], *messages[index + 1 :]]
        # No prompt asks for an answer to nothing.
        if fewer and fewer[0].role != "assistant":
            yield fewer, prefix
    if prefix.tools:
        yield messages, replace(prefix, tools=())
    if prefix.kwargs:
        yield messages, replace(prefix, kwargs={})
    for index, message in enumerate(messages):
        for part in _simpler_message(message):
            yield [*messages[:index], part, *messages[index + 1 :]], prefix


def _simpler_message(message: Message) -> Iterator[Message]:
    if message.tool_calls:
        yield replace(message, tool_calls=message.tool_calls[1:])
    for text in _simpler_text(message.reasoning):
        yield replace(message, reasoning=text)
    for text in _simpler_text(message.content):
        yield replace(message, content=text)
    for index, call in enumerate(message.tool_calls):
        if call.arguments != "{}":
            calls = (
                *message.tool_calls[:index],
                replace(call, arguments="{}"),
                *message.tool_calls[index + 1 :],
            )
            yield replace(message, tool_calls=calls)


def _simpler_text(text: str) -> Iterator[str]:
    half = len(text) // 2
    for simple in ("", "x", text[:half], text[half:]):
        # Never longer and never back again, so that shrinking ends.
        if (len(simple), simple != "x") < (len(text), text != "x"):
            yield simple


def describe(assets: ModelAssets, report: Report) -> str:
    """The report for a person to read."""
    what = "its own chat template" if assets.renderer.published else f"template {assets.family.template}"
    lines = [
        f"{assets.model_dir}: family {assets.family.name}, {what}, {assets.tokenizer.vocab_size} tokens",
        *([f"evidence: {assets.family.evidence}"] if assets.family.evidence else []),
        f"{report.conversations} conversations checked",
        *(
            f"  {report.made[check]:6} x {check:18} {promise}"
            for check, promise in CHECKS.items()
            if check in report.made
        ),
    ]
    failed = report.counter_example
    if failed is None:
        return "\n".join([*lines, "PASS"])
    lines += [f"FAIL {failed.check}: {failed.detail}", "", "Smallest conversation found:"]
    lines += [f"  {number + 1}. {_shown(message)}" for number, message in enumerate(failed.messages)]
    if failed.prefix.tools:
        lines.append(f"  tools: {', '.join(tool['function']['name'] for tool in failed.prefix.tools)}")
    if failed.prefix.kwargs:
        lines.append(f"  template arguments: {failed.prefix.kwargs}")
    if failed.expected or failed.found:
        lines += ["", *_difference(assets, failed.expected, failed.found)]
    return "\n".join(lines)


def _shown(message: Message) -> str:
    parts = [repr(message.content)]
    if message.reasoning:
        parts.insert(0, f"reasoning {message.reasoning!r}")
    parts += [f"calls {call.name}({call.arguments})" for call in message.tool_calls]
    return f"{message.role}: {', '.join(parts)}"


def _difference(assets: ModelAssets, expected: Sequence[int], found: Sequence[int]) -> list[str]:
    """Both token sequences from a little before the place where they part."""
    pairs = zip(expected, found, strict=False)
    same = next(
        (at for at, (left, right) in enumerate(pairs) if left != right), min(len(expected), len(found))
    )
    start = max(0, same - 6)
    lines = [f"The tokens part at position {same}; from position {start} on:"]
    for name, row in (("expected", expected), ("found", found)):
        part = row[start : same + 12]
        tokens = " ".join(f"{token}:{assets.tokenizer.decode([token])!r}" for token in part)
        lines += [
            f"  {name:8} text   {assets.tokenizer.decode(part)!r}",
            f"  {name:8} tokens {tokens or '(none)'}",
        ]
    return lines
