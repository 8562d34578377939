"""From templates to HTML: the files in `templates/`, with everything that is put into them escaped.

`parts.html` holds the small pieces as macros; the other HTML files are each one fragment or the page. CSS and
JavaScript are plain files, which go in as they are.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fsdplab.common.sizes import size
from fsdplab.figures.style import ALARM, DARK_TEXT, FONT, TEXT


@lru_cache
def _templates() -> Environment:
    loader = PackageLoader("fsdplab.figures.report")
    made = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )  # fmt: skip
    made.globals.update(verbatim=_verbatim, size=size, ink=TEXT, ink_on_dark=DARK_TEXT, alarm=ALARM, font=FONT)
    made.filters["in_script"] = in_script
    return made


def rendered(template: str, **values: Any) -> Markup:
    """The HTML of a whole template: `rendered("tabs.html", panels={"Summary": body})`."""
    return Markup(_templates().get_template(template).render(values))


def part(macro: str, **values: Any) -> Markup:
    """The HTML of a macro of `parts.html`: `part("note", text="a < b") == "<figure><p>a &lt; b</p></figure>"`."""
    made: Markup = getattr(_templates().get_template("parts.html").module, macro)(**values)
    return made


def in_script(json_text: str) -> Markup:
    """JSON that no text in it can end: `in_script('"</script>"')` has `\\u003c` for `<`, which JSON reads back."""
    return Markup(json_text.replace("<", "\\u003c"))


def _verbatim(file: str) -> Markup:
    return Markup(Path(__file__).with_name("templates").joinpath(file).read_text(encoding="utf-8"))
