"""Everything about a model that turning conversations into tokens needs, loaded once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titogym.errors import UserError
from titogym.templates import published, registry
from titogym.templates.conversation import Message, Prefix
from titogym.templates.family import Family
from titogym.templates.literal import Guard
from titogym.templates.render import Renderer
from titogym.templates.tokenizer import Tokenizer, encode_segments


@dataclass(frozen=True, slots=True)
class ModelAssets:
    """A tokenizer and the family that it is used with."""

    model_dir: Path
    family: Family
    tokenizer: Tokenizer
    renderer: Renderer
    context_length: int | None  # tokens of prompt and output together; None where the folder does not say
    closer_ids: tuple[int, ...]
    stop_ids: frozenset[int]  # tokens that end a turn
    control_ids: frozenset[int]  # tokens that only templates and models write
    # Stop tokens that are no part of the closer: at a row's end they stay only where the next message
    # begins with them (see `seam`).
    opener_ids: frozenset[int]
    call_closer_ids: tuple[int, ...] = ()  # in place of `closer_ids` after calls; () where it is the same

    def closing(self, answer: Message) -> tuple[tuple[int, ...], frozenset[int]]:
        """The closer of this assistant message, and the stop tokens that are no part of it."""
        if not (answer.tool_calls and self.call_closer_ids):
            return self.closer_ids, self.opener_ids
        return self.call_closer_ids, self.stop_ids.difference(self.call_closer_ids)

    def encode(
        self, messages: Sequence[Message], prefix: Prefix, *, add_generation_prompt: bool
    ) -> list[int]:
        """The conversation as ids, from its first token. Raises `RenderError`."""
        pieces = self.renderer.render_segments(messages, prefix, add_generation_prompt=add_generation_prompt)
        return encode_segments(self.tokenizer, pieces)


def load_model_assets(
    model_dir: Path, family_name: str | None = None, *, own_template: bool = False
) -> ModelAssets:
    """Load `model_dir` (Hugging Face format; weights are not read).

    With `own_template` conversations are rendered by the model's own chat template: for comparison only,
    most are not append-only. Raises `UserError` when files are missing or the family does not fit.
    """
    model_dir = Path(model_dir)
    if not model_dir.is_dir():
        raise UserError(f"{model_dir} is not a folder; give a model folder in Hugging Face format.")
    if family_name == "generic":
        from titogym.templates import generic  # it verifies what it derives, and so builds on this module

        return generic.load(model_dir)
    family = registry.resolve(model_dir, family_name)
    tokenizer = Tokenizer.load(model_dir)
    guard = Guard((*tokenizer.special_texts, *family.control_texts))
    renderer = _own_renderer(model_dir, family, guard) if own_template else Renderer(family, guard)
    return assemble(model_dir, family, tokenizer, renderer)


def check_vocabulary(model_dir: Path, tokenizer: Tokenizer) -> None:
    """Raises `UserError` where the tokenizer has ids that the model does not know: one in a prompt ends an
    engine."""
    size = published.vocabulary(model_dir)
    if size and tokenizer.highest_id >= size:
        raise UserError(
            f"The tokenizer of {model_dir} has token ids up to {tokenizer.highest_id}, but config.json says "
            f"vocab_size {size}: no engine survives a token beyond it. Take the tokenizer that belongs to "
            "the model, or enlarge the model's embeddings."
        )


def assemble(model_dir: Path, family: Family, tokenizer: Tokenizer, renderer: Renderer) -> ModelAssets:
    """Join the parts. Raises `UserError` when the tokenizer lacks a token that the family ends turns with."""
    closer_ids = tuple(tokenizer.encode_inside(family.closer))
    control_ids, stop_ids = set(tokenizer.special_ids), set()
    for text in family.control_texts:
        token_id = tokenizer.token_to_id(text)
        if token_id is None:
            does = "writes" if text in family.tokens else "ends turns with"
            raise UserError(
                f"Family {family.name} {does} {text}, which the tokenizer of {model_dir} does not have as a "
                "token; choose another --family."
            )
        control_ids.add(token_id)
        if text not in family.tokens:
            stop_ids.add(token_id)
    return ModelAssets(
        model_dir=model_dir,
        family=family,
        tokenizer=tokenizer,
        renderer=renderer,
        context_length=published.context_length(model_dir),
        closer_ids=closer_ids,
        stop_ids=frozenset(stop_ids),
        control_ids=frozenset(control_ids),
        opener_ids=frozenset(stop_ids.difference(closer_ids)),
        call_closer_ids=tuple(tokenizer.encode_inside(family.call_closer)),
    )


def _own_renderer(model_dir: Path, family: Family, guard: Guard) -> Renderer:
    template = published.chat_template(model_dir)
    if template is None:
        raise UserError(f"{model_dir} has no chat template of its own.")
    return Renderer(family, guard, published=template, **published.template_variables(model_dir))
