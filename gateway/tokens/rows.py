"""The tokens that a request adds to the session's row."""

from collections.abc import Sequence
from dataclasses import dataclass

from titogym.gateway.errors import RequestError
from titogym.gateway.sessions.tree import Node
from titogym.templates.conversation import Message, Prefix
from titogym.templates.model import ModelAssets
from titogym.templates.render import RenderError
from titogym.templates.seam import seam, suffix


@dataclass(frozen=True, slots=True)
class Extension:
    """Drop `trim` tokens from the parent's row, then add `prompt_ids`. `opened`: reasoning is left open."""

    trim: int
    prompt_ids: list[int]
    opened: bool
    begun: Sequence[int] = ()  # the last of `prompt_ids`: the answer as far as it is given


def extend(
    assets: ModelAssets,
    parent: Node | None,
    prefix: Prefix,
    messages: Sequence[Message],
    begun: Message | None = None,
) -> Extension:
    """Render `messages` behind `parent` up to the point where the model answers, or goes on with `begun`.

    Only the new messages are rendered, whatever stands before them. Raises `RequestError` for what the
    template refuses.
    """
    reasoning = assets.family.reasoning
    try:
        after = messages[-1].role if messages else "user"
        opened = reasoning is not None and reasoning.open_after(assets.renderer.opener(prefix, after=after))
        added = _added(assets, parent, prefix, messages)
        given = [] if begun is None else _begun(assets, parent, prefix, messages, begun, added)
    except RenderError as error:
        raise RequestError(str(error), param="messages") from error
    if parent is None:
        return Extension(0, added + given, opened, given)
    sampled = parent.generation.output_ids
    closer, openers = assets.closing(parent.answer)
    joint = seam(sampled, closer, added, openers, len(sampled))
    return Extension(joint.trim, joint.append + given, opened, given)


def _added(
    assets: ModelAssets,
    parent: Node | None,
    prefix: Prefix,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
) -> list[int]:
    if parent is None:
        return assets.encode(messages, prefix, add_generation_prompt=add_generation_prompt)
    return suffix(
        assets.renderer,
        assets.tokenizer,
        messages,
        prefix,
        neighbour=parent.answer,
        add_generation_prompt=add_generation_prompt,
    )


def _begun(
    assets: ModelAssets,
    parent: Node | None,
    prefix: Prefix,
    messages: Sequence[Message],
    begun: Message,
    added: list[int],
) -> list[int]:
    """The beginning of an answer behind `added`, as the template writes it, without what closes an answer.

    Raises `RenderError` where the template writes it otherwise than behind a prompt.
    """
    whole = _added(assets, parent, prefix, [*messages, begun], add_generation_prompt=False)
    closer = list(assets.closing(begun)[0])
    if closer and whole[-len(closer) :] == closer:
        del whole[-len(closer) :]
    if whole[: len(added)] != added:
        raise RenderError(f"the {assets.family.name} template cannot go on with an answer that was begun")
    return whole[len(added) :]
