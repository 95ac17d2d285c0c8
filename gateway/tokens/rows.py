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


def extend(
    assets: ModelAssets, parent: Node | None, prefix: Prefix, messages: Sequence[Message]
) -> Extension:
    """Render `messages` behind `parent` up to the point where the model answers.

    Only the new messages are rendered, whatever stands before them. Raises `RequestError` for what the
    template refuses.
    """
    reasoning = assets.family.reasoning
    try:
        after = messages[-1].role if messages else "user"
        opened = reasoning is not None and reasoning.open_after(assets.renderer.opener(prefix, after=after))
        if parent is None:
            return Extension(0, assets.encode(messages, prefix, add_generation_prompt=True), opened)
        added = suffix(assets.renderer, assets.tokenizer, messages, prefix, neighbour=parent.answer)
    except RenderError as error:
        raise RequestError(str(error), param="messages") from error
    sampled = parent.generation.output_ids
    closer, openers = assets.closing(parent.answer)
    joint = seam(sampled, closer, added, openers, len(sampled))
    return Extension(joint.trim, joint.append, opened)
