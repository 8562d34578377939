"""What goes onto one slide: a text with the code and figures that follow it, as far as a screen has room.

A screen of 1280 x 720 is the smallest that a room has. The height of each cell is estimated in its pixels, from lines
of text and code, rows of tables and pictures. What is a little too high is drawn smaller; code that is much too high
below its text goes on a slide of its own, and scrolls there if it must.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nbformat import NotebookNode

ROOM = 630  # pixels of a slide between its margins, less what an estimate may lack
SMALLEST = 0.75  # letters of 20 pixels become 15
_LETTERS = 98  # of a line of text
_LINE, _BLOCK = 30, 18  # pixels of a line of text, and between two paragraphs
_CODE_LINE, _CODE_FRAME = 20, 36
_ROW, _HEADING, _FOLDED, _FORMULA = 33, 54, 46, 70
_PICTURE = 460  # of most figures: pages.css lets none be higher
_DETAILS = re.compile(r"<details.*?</details>", re.DOTALL | re.IGNORECASE)
_BEGINS_LINE = re.compile(r"<(tr|p|li|br|h[1-6]|blockquote|summary)\b")
_TAG = re.compile(r"<[^>]+>")


class Slide(NamedTuple):
    """The cells of a slide, and by how much they are drawn smaller: 1.0 where they fit as they are."""

    cells: tuple[NotebookNode, ...]
    scale: float


def slides_of(cells: Sequence[NotebookNode]) -> Iterator[Slide]:
    """Yield the slides of a notebook: each text begins one, and code that no longer fits below it begins another."""
    together: list[NotebookNode] = []
    for cell in cells:
        begins = cell.cell_type == "markdown" or not _fit([*together, cell])
        if together and begins:
            yield _slide(together)
            together = []
        together.append(cell)
    if together:
        yield _slide(together)


def _fit(cells: Sequence[NotebookNode]) -> bool:
    return SMALLEST * sum(map(height_of, cells)) <= ROOM


def _slide(cells: Sequence[NotebookNode]) -> Slide:
    scale = ROOM / max(ROOM, sum(map(height_of, cells)))
    return Slide(tuple(cells), max(SMALLEST, scale))


def height_of(cell: NotebookNode) -> int:
    """Estimate the pixels that a cell takes on a slide, with its outputs."""
    if cell.cell_type == "markdown":
        return _of_text(cell.source)
    height = _CODE_FRAME + _CODE_LINE * len(cell.source.splitlines())
    for output in cell.get("outputs") or ():
        height += _of_output(output)
    return height


def _of_text(source: str) -> int:
    """Estimate the height of Markdown: paragraphs, headings, lists, tables, code, formulas and folded parts."""
    height = _FOLDED * len(_DETAILS.findall(source))
    for block in re.split(r"\n\s*\n", _DETAILS.sub("", source).strip()):
        lines = block.strip().splitlines()
        if not lines:
            continue
        first = lines[0]
        if first.startswith("#"):
            height += _HEADING
        elif first.startswith("|"):
            height += _ROW * (len(lines) - 1) + _BLOCK  # but for the line of dashes
        elif first.startswith(("```", "~~~")):
            height += _CODE_LINE * len(lines) + _BLOCK
        elif first.startswith("$$"):
            height += _FORMULA
        elif re.match(r"(- |\* |\d+\. )", first):
            # each item begins a line
            items = re.split(r"\n(?=\s*(?:- |\* |\d+\. ))", block)
            height += sum(map(_lines_of, items)) + _BLOCK
        else:
            height += _lines_of(block) + _BLOCK
    return height


def _lines_of(words: str) -> int:
    """Return the pixels of a paragraph's lines."""
    return _LINE * max(1, math.ceil(len(words) / _LETTERS))


def _of_output(output: NotebookNode) -> int:
    if output.output_type == "stream":
        return _CODE_LINE * (len(output.text.splitlines()) + 1)
    if output.output_type == "error":
        return _CODE_LINE * (len(output.traceback) + 1)
    data = output.get("data") or {}
    if any(kind.startswith("image/") for kind in data):
        return _PICTURE
    shown = str(data.get("text/html") or "")
    if shown:
        # whichever is more: what begins a line, or the lines that the words fill
        words = _TAG.sub(" ", shown)
        return max(_ROW * (1 + len(_BEGINS_LINE.findall(shown))), _lines_of(words))
    words = str(data.get("text/markdown") or data.get("text/plain") or "")
    return _CODE_LINE * (len(words.splitlines()) + 1)
