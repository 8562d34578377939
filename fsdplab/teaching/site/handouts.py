"""Handouts: one page of HTML to print, a sheet a lesson, with its question, its picture, its recap and its tasks."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

from fsdplab.figures.style import FONT
from fsdplab.teaching.authoring.course import notebooks_in, read
from fsdplab.teaching.core import registry
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.site.pages import text_html
from fsdplab.teaching.slides import picture_of

_STYLE = f"""body{{font:15px/1.45 {FONT};max-width:48em;margin:2em auto;padding:0 1em;color:#14171c}}
section{{break-after:page}} blockquote{{font-weight:bold;margin:0.5em 0}}
img{{width:100%;box-sizing:border-box;border:1px solid #cfd3d9}} table{{display:block;overflow-x:auto}}
pre{{white-space:pre-wrap}} code{{overflow-wrap:anywhere}} h1{{font-size:1.4em;margin-bottom:0}}
h2{{font-size:1.1em}}"""
_RECAP = re.compile(r"^## Recap\s*$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)


def handouts(sources: Path | str) -> str:
    """The page of all lessons of a folder: no solution and no answer of a prediction stands in it."""
    sheets = "\n".join(f"<section>{''.join(_pieces(path))}</section>" for path in notebooks_in(sources))
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Handouts of the course</title>"
        f"<style>{_STYLE}</style><body>{sheets}</body></html>\n"
    )


def _pieces(path: Path) -> Iterator[str]:
    """Title and question, picture, recap, and the statements of the exercises."""
    notebook, number = read(path), path.name[:2]
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    yield text_html(texts[0])
    picture = picture_of(number)
    if picture is not None:
        yield picture.image
    recap = _RECAP.search("\n\n".join(_FOLDED.sub("", text) for text in texts))
    if recap:
        yield text_html(f"## Recap\n{recap.group(1)}")
    tasks = [item for item in registry.items_of(number) if isinstance(item, Exercise)]
    if tasks:
        yield "<h2>Exercises</h2>"
    for each in tasks:
        yield f"<p><b>{each.id}: {html.escape(each.title)}.</b> {html.escape(each.statement)}</p>"
