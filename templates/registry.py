"""Which families there are, and which one a model folder belongs to.

Families of others join by a Python entry point in group `titogym.families` (its name is the family's,
its value a `Family`), or are named by dotted path (`package.module:FAMILY`) where a run asks for one.
"""

import re
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from titogym.errors import UserError
from titogym.templates import published
from titogym.templates.families import BUILT_IN
from titogym.templates.family import SIGNATURE, Family, Signs

GROUP = "titogym.families"
_SIGNED = re.compile(r"\{#-? " + re.escape(SIGNATURE) + r"(\S+) -?#\}")


def families() -> dict[str, Family]:
    """Every registered family by name. Raises `UserError` when an entry point does not load."""
    registered = {family.name: family for family in BUILT_IN}
    for point in entry_points(group=GROUP):
        try:
            loaded = point.load()
        except (ImportError, AttributeError) as error:
            raise UserError(f"Entry point {point.name} of {GROUP} does not load: {error}") from error
        registered[point.name] = _checked(loaded, point.value)
    return registered


def resolve(model_dir: Path, name: str | None = None) -> Family:
    """The family called `name` (a registered name or a dotted path), else the one that `model_dir` shows.

    Raises `UserError`, with the choices, when there is no such family or not exactly one fits.
    """
    if name is not None and (":" in name or "." in name) and name not in families():
        return _dotted(name)
    known = families()
    choices = ", ".join(sorted((*known, "generic")))
    if name is not None:
        if name not in known:
            raise UserError(
                f"There is no family '{name}'; choose one of {choices}, or give package.module:NAME."
            )
        return known[name]
    template = published.chat_template(model_dir)
    signed = template and _SIGNED.match(template)
    if signed and signed[1] in known:
        return known[signed[1]]
    architectures = published.architectures(model_dir)
    fitting = [
        family
        for family in known.values()
        if family.signs is not None and _fits(family.signs, template, architectures)
    ]
    if len(fitting) == 1:
        return fitting[0]
    found = " and ".join(family.name for family in fitting)
    reason = f"{found} both fit" if fitting else "its architecture and chat template fit none that is known"
    raise UserError(f"Cannot tell the family of {model_dir}: {reason}; give --family, one of {choices}.")


def _fits(signs: Signs, template: str | None, architectures: tuple[str, ...]) -> bool:
    right_model = not architectures or not set(architectures).isdisjoint(signs.architectures)
    return (
        right_model
        and template is not None
        and all(part in template for part in signs.template)
        and not any(part in template for part in signs.absent)
    )


def _dotted(name: str) -> Family:
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    try:
        found = getattr(import_module(module), attribute)
    except Exception as error:  # a module may fail in any way while it is executed
        raise UserError(f"Cannot import family {name}: {type(error).__name__}: {error}") from error
    return _checked(found, name)


def _checked(value: object, where: str) -> Family:
    if not isinstance(value, Family):
        raise UserError(f"{where} is a {type(value).__name__}; a family must be a titogym Family.")
    return value
