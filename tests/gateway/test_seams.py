"""The seam, as sessions of every family meet it: answers cut anywhere, and ended by whatever stop token."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gateway.forest import generation, tree
from tests.gateway.test_family_parsers import FAMILIES, TOOLS, assets
from tests.gateway.test_parsers import without_ids
from tests.templates import strategies
from titogym.gateway.sessions.tree import row
from titogym.gateway.tokens.parsers.answer import AnswerParser
from titogym.gateway.tokens.rows import extend
from titogym.templates.conversation import Message, Prefix


def parse(name: str, output: list[int], opened: bool, calls: bool) -> Message:
    made = AnswerParser(
        FAMILIES[name],
        assets(name).tokenizer,
        stop_ids=assets(name).stop_ids,
        tools=TOOLS if calls else (),
        opened=opened,
        calls=calls,
    )
    made.push(output)
    made.finish()
    return made.message()


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=24, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data(), tools=st.booleans(), turns=st.integers(1, 3))
def test_a_row_is_the_rendering_but_for_what_was_sampled(name, data, tools, turns):
    """`expected` is put together from whole renderings, which know of no seam."""
    model = assets(name)
    prefix = Prefix(TOOLS if tools else ())
    messages = new = [Message("user", data.draw(strategies.texts))]
    node, forest = None, tree()
    expected = model.encode(messages, prefix, add_generation_prompt=True)
    for _ in range(turns):
        extension = extend(model, node, prefix, new)
        prompt = row(node).tolist()
        assert prompt[: len(prompt) - extension.trim] + extension.prompt_ids == expected

        # What the model would write, were it given the time: a part of it, and perhaps a stop token.
        wanted = data.draw(strategies.assistants(calls=2 if tools else 0))
        asked = model.encode(messages, prefix, add_generation_prompt=True)
        whole = model.encode([*messages, wanted], prefix, add_generation_prompt=False)
        body = whole[len(asked) : len(whole) - len(model.closing(wanted)[0])]
        cut = data.draw(st.integers(0, len(body)) | st.just(len(body)))
        stop = data.draw(st.sampled_from([None, *sorted(model.stop_ids)]))
        output = body[:cut] + ([] if stop is None else [stop])
        answer = parse(name, output, extension.opened, tools)
        made = generation(prompt=extension.prompt_ids, output=output, trim=extension.trim)
        node = forest.draft(node, prefix, tuple(new), answer, made)
        forest.append(node)

        results = [
            Message("tool", data.draw(strategies.texts), tool_call_id=call.id, name=call.name)
            for call in answer.tool_calls
        ]
        messages = [*messages, answer]
        new = [*results, Message("user", data.draw(strategies.texts))]
        closed = model.encode(messages, prefix, add_generation_prompt=False)
        messages = [*messages, *new]
        follows = model.encode(messages, prefix, add_generation_prompt=True)
        closer, openers = model.closing(answer)
        target = follows[len(closed) - len(closer) :]
        text = sampled_text(output, target, openers)
        assert without_ids(parse(name, text, extension.opened, tools)) == without_ids(answer)
        expected = [*expected, *text, *target]
    last = extend(model, node, prefix, new)
    tokens = row(node).tolist()
    assert tokens[: len(tokens) - last.trim] + last.prompt_ids == expected


def sampled_text(output: list[int], target: list[int], openers: frozenset[int]) -> list[int]:
    """The output without the delimiters at its end: as much of `target` as it wrote, or a stop token that
    does not belong there."""
    end = len(output)
    while True:
        for start in range(end):
            if output[start:end] == target[: end - start]:
                return output[:start]
        if not end or output[end - 1] not in openers:
            return output[:end]
        end -= 1


def test_a_message_of_gpt_oss_that_only_began_leaves_no_text():
    """Its first token is where the next message begins, so it cannot be text of this one as well."""
    output = assets("gpt-oss").tokenizer.encode("<|channel|>final<|message|>the<|end|><|start|>")
    assert parse("gpt-oss", output, opened=False, calls=False) == Message("assistant", "the")
