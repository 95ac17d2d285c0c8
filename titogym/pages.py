"""Reports as one HTML file that needs nothing else: their templates extend `page.html.jinja` beside this."""

import datetime
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader

from titogym import __version__


def render(package: str, template: str, **values: Any) -> str:
    """The page of a template in the folder of `package`; what stands in `values` is escaped."""
    loader = ChoiceLoader([PackageLoader(package, "."), PackageLoader("titogym", ".")])
    return (
        Environment(loader=loader, autoescape=True)
        .get_template(template)
        .render(version=__version__, date=datetime.datetime.now().strftime("%Y-%m-%d %H:%M"), **values)
    )
