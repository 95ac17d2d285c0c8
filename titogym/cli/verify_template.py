"""`titogym verify-template`: prove a family on a model's tokenizer, or show where it fails."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Template(StrEnum):
    family = "family"
    own = "own"


def command(
    model_dir: Annotated[
        Path, typer.Argument(help="Model folder in Hugging Face format; weights are not read.")
    ],
    family: Annotated[
        str | None, typer.Option(help="Family name or package.module:NAME. Default: what the folder shows.")
    ] = None,
    template: Annotated[
        Template, typer.Option(help="The family's template, or the model's own, which is rarely append-only.")
    ] = Template.family,
    conversations: Annotated[int, typer.Option(min=1, help="How many conversations to generate.")] = 200,
) -> None:
    """Prove that a chat template only appends, and that sampled tokens join what is rendered after them.

    Generated conversations are rendered and checked at every cut. The first that fails is made as small as
    possible and printed as text and tokens; the exit status is then 1.
    """
    from titogym.templates.model import load_model_assets
    from titogym.templates.verify import describe, verify

    assets = load_model_assets(model_dir, family, own_template=template is Template.own)
    report = verify(assets, count=conversations)
    typer.echo(describe(assets, report))
    if report.counter_example is not None:
        raise typer.Exit(1)
