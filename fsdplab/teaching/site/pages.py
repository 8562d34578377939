"""Executed notebooks as pages and as slides, by nbconvert: templates in `templates/`, cleaned HTML, no scripts but one.

A page's one script is the switch between light and dark, which the page's policy knows by its hash. Slides have none.

Readers see the learner's side: the stub of an exercise, and below it the solution, folded, with what its check said. A
notebook may be somebody else's: what it brings as HTML or Markdown loses everything that could run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbconvert.preprocessors.coalescestreams import CoalesceStreamsPreprocessor
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_notebook
from traitlets.config import Config

from fsdplab.common.files import read_file
from fsdplab.figures.plotly_go import PLOTLY
from fsdplab.teaching.authoring.course import STARTS, CourseError, tags_of
from fsdplab.teaching.site.foreign_html import without_scripts
from fsdplab.teaching.site.slides import slides_of

TEMPLATES = Path(__file__).with_name("templates")
WIDGET = "application/vnd.jupyter.widget-view+json"
WITHOUT_A_KERNEL = "In the notebook, controls stand here; this page shows where they begin."
_KINDS = ["text/html", "image/svg+xml", "image/png", "image/jpeg", "text/markdown", "text/plain"]  # the best first
_HIDDEN = {"teacher", "hide-cell", "remove-cell"}
_NUMBERED = re.compile(r"#\s+(\d\d)\s+(.+)")
_BESIDE = re.compile(r'href="([\w-]+)\.ipynb')  # other notebooks are pages of the site too
_HEADING = re.compile(r'<h([1-6])(?: id="[^"]*")?>(.*?)</h\1>', re.DOTALL)
_CHECK = re.compile(r"(teaching\.)?check\([^()]*\)")
_LARGEST_STYLE = 10**6


@dataclass(frozen=True)
class Lesson:
    """What other pages say about a notebook: `minutes` and `question` are "" where it says neither."""

    name: str
    title: str
    minutes: str
    question: str

    @property
    def address(self) -> str:
        """The address of its page: `01_collectives.html`, with signs that no address has in their other form."""
        return quote(f"{self.name}.html")


def lesson_of(name: str, notebook: NotebookNode) -> Lesson:
    """Read title, minutes and question from a notebook's first text; CourseError for one without text."""
    first = next((cell.source for cell in notebook.cells if cell.cell_type == "markdown" and cell.source.strip()), None)
    if first is None:
        raise CourseError(f"{name}.ipynb holds no text; the first Markdown cell of a lesson begins with `# 01 Title`")
    minutes, question = _said(r"\*(\d+) minutes", first), _said(r"^>\s*\*\*(.+?)\*\*\s*$", first)
    return Lesson(name, _title(first, name), minutes, question)


def _title(text: str, name: str) -> str:
    line = text.strip().splitlines()[0]
    if numbered := _NUMBERED.match(line):
        return f"{numbered.group(1)} {numbered.group(2).strip()}"
    return line.lstrip("# ").strip() if line.startswith("#") else name.replace("_", " ")


def _said(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1) if match else ""


def page_of(notebook: NotebookNode, title: str, **resources: Any) -> str:
    """Return a notebook's page; `resources` has `before` and `after` (lessons), and `live` for the planner's link."""
    script = (TEMPLATES / "theme.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    known = {**resources, "switch_script": script, "switch_hash": f"sha256-{digest}"}
    return _converted("lesson", _for_readers(notebook), title, known)


def deck_of(notebook: NotebookNode, title: str) -> str:
    """Return a notebook as slides in one file: each text begins a slide, with the code and figures that follow it as
    far as a screen has room.

    Exercises and their checks are left out.
    """
    shown = _for_readers(notebook)
    shown.cells = [cell for cell in shown.cells if not (_is_of_an_exercise(cell) or _starts(cell))]
    for slide in slides_of(shown.cells):
        for cell in slide.cells:
            cell.metadata.begins_slide = cell is slide.cells[0]
            cell.metadata.ends_slide = cell is slide.cells[-1]
            cell.metadata.scale = f"{slide.scale:.2f}"
    return _converted("deck", shown, title, {"styles": styles()})


def _is_of_an_exercise(cell: NotebookNode) -> bool:
    """Return whether a cell is an exercise or nothing but its check, which says nothing without the exercise."""
    is_check = cell.cell_type == "code" and _CHECK.fullmatch(cell.source.strip())
    return bool(is_check or {"solution", "stub"} & set(tags_of(cell)))


def _starts(cell: NotebookNode) -> bool:
    """Whether it is the lesson's first code: imports, and the edition."""
    return cell.cell_type == "code" and "teaching.start(" in cell.source


def text_page(text: str, title: str, **resources: Any) -> str:
    """Return Markdown as a page."""
    return page_of(new_notebook(cells=[new_markdown_cell(text)]), title, **resources)


def _for_readers(notebook: NotebookNode) -> NotebookNode:
    """A copy with the learner's side of each cell."""
    whole, _ = CoalesceStreamsPreprocessor().preprocess(NotebookNode(**notebook), {})
    return NotebookNode(**{**whole, "cells": list(_cells(whole.cells)), "metadata": NotebookNode()})


def _cells(cells: Sequence[NotebookNode]) -> Iterator[NotebookNode]:
    for place, given in enumerate(cells):
        tags = set(tags_of(given))
        if tags & _HIDDEN or not given.source.strip():
            continue
        cell = NotebookNode(
            **{**given, "id": f"cell-{place}", "metadata": NotebookNode(tags=sorted(tags & {"solution", "stub"}))}
        )
        if "stub" in tags:  # raw in sources, so that no runner executes it
            cell.cell_type, cell.outputs, cell.execution_count = "code", [], None
        if cell.cell_type == "code":
            # the start cell prints its edition and a folder: of the reader's run, not of this one
            cell.outputs = [] if STARTS in cell.source else list(map(_readable, cell.get("outputs") or ()))
            cell.source = cell.source.replace(STARTS, 'edition="learner"').strip("\n")
        if cell.cell_type != "raw":
            yield cell


def _readable(output: NotebookNode) -> NotebookNode:
    """An output with a sentence in the place of controls, which only a kernel can answer, and figures as pictures."""
    data = output.get("data") or {}
    if PLOTLY in data and {"image/svg+xml", "image/png"} & set(data):  # HTML of plotly's needs scripts
        shown = NotebookNode({kind: form for kind, form in data.items() if kind not in (PLOTLY, "text/html")})
        return NotebookNode(output_type="display_data", metadata={}, data=shown)
    if WIDGET in data and "text/html" not in data:
        return NotebookNode(output_type="display_data", metadata={}, data={"text/markdown": WITHOUT_A_KERNEL})
    return output


def _converted(template: str, notebook: NotebookNode, title: str, resources: dict[str, Any]) -> str:
    notebook.metadata.title = title
    page, _ = _exporter(template).from_notebook_node(notebook, resources)
    return str(page)


def _exporter(template: str) -> HTMLExporter:
    """nbconvert's exporter with a template of the site's; all HTML passes the site's cleaner."""
    exporter = HTMLExporter(
        template_name=template,
        extra_template_basedirs=[str(TEMPLATES)],
        extra_template_paths=[str(TEMPLATES)],
        sanitize_html=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        config=Config({"NbConvertBase": {"display_data_priority": _KINDS}}),
    )
    exporter.register_filter("clean_html", lambda text: str(without_scripts(str(text))))
    exporter.register_filter("markdown2html", text_html)
    exporter.register_filter("words", lambda output: _words(output.data.get("text/plain", "")))
    return exporter


def _words(text: str) -> str:
    return text.removeprefix("[figure] ").removeprefix("[picture] ") or "a picture"


def text_html(source: str) -> str:
    """Return Markdown as HTML without scripts, its links to other notebooks and the glossary as pages."""
    rendered = MarkdownWithMath(renderer=IPythonRenderer(escape=False, exclude_anchor_links=True)).render(source)
    made = _HEADING.sub(_addressed, str(without_scripts(rendered)))
    return _BESIDE.sub(r'href="\1.html', made.replace('href="GLOSSARY.md', 'href="glossary.html'))


def _addressed(heading: re.Match[str]) -> str:
    """A heading with the address that GitHub gives it: `emulated-card`."""
    level, content = heading.groups()
    words = html.unescape(re.sub(r"<[^>]+>", "", content)).lower().replace(" ", "-")
    address = "".join(sign for sign in words if sign.isalnum() or sign in "-_")
    return f'<h{level} id="{address}">{content}</h{level}>'


def styles() -> str:
    """Return the style sheet of all pages: JupyterLab's from nbconvert, light and dark, and the pages' own."""
    exporter = _exporter("lesson")
    folders = [Path(folder) / "static" for folder in exporter.template_paths]
    found = next(folder for folder in folders if (folder / "index.css").is_file())
    lab, light, dark = (
        read_file(found / name, _LARGEST_STYLE).decode() for name in ("index.css", "theme-light.css", "theme-dark.css")
    )
    own = (TEMPLATES / "pages.css").read_text(encoding="utf-8")
    return f"{lab}\n{light}\n{_on_screens(dark)}\n{own}"


def _on_screens(dark: str) -> str:
    """The dark theme where the reader has chosen it, or has chosen nothing and the system is dark; never in print."""
    rules = dark[dark.index("\n:root {") :]
    of_the_system = rules.replace(":root {", ":root:not(.light) {")
    chosen = rules.replace(":root {", ":root.dark {")
    return f"@media screen and (prefers-color-scheme: dark) {{\n{of_the_system}\n}}\n@media screen {{\n{chosen}\n}}"
