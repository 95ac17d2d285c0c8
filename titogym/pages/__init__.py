"""What all our pages share: one style sheet, and the frame of a report that needs no other file."""

import datetime
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader

from titogym import __version__


def templates(package: str, folder: str = ".") -> Environment:
    """The templates in a folder of `package`, which may use those beside this file. Values are escaped."""
    loaders = [PackageLoader(package, folder), PackageLoader("titogym.pages", ".")]
    return Environment(loader=ChoiceLoader(loaders), autoescape=True)


def report(package: str, template: str, **values: Any) -> str:
    """The text of a template that extends `page.html.jinja`."""
    date = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    return templates(package).get_template(template).render(version=__version__, date=date, **values)
