"""A sheet of 960 x 540 on which a lesson's picture is drawn: boxes, arrows and words, as SVG with alternative text."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fsdplab.figures.style import CATEGORY_COLOURS, DARK_INK, EDGE, FONT, STEP_COLOURS

WIDTH, HEIGHT = 960, 540
SHARD, WHOLE = CATEGORY_COLOURS["sharded_parameters"], CATEGORY_COLOURS["unsharded_parameters"]
GRADIENT, GRADIENTS = CATEGORY_COLOURS["sharded_gradients"], CATEGORY_COLOURS["unsharded_gradients"]
MOMENTS, ACTIVATIONS = CATEGORY_COLOURS["optimizer_state"], CATEGORY_COLOURS["activations"]
COMPUTE, HIDDEN, EXPOSED = "#b3bac4", STEP_COLOURS["overlapped"], STEP_COLOURS["exposed"]
PAPER, PALE, GREY = "#ffffff", "#eef1f5", "#5d6673"
_TITLE = 1500  # px of type over signs: a title of 60 is set in 25 px
_DARK_FILLS = (SHARD, GRADIENT, EXPOSED, MOMENTS, GREY)


@dataclass(frozen=True, repr=False)
class Picture:
    """A finished picture: SVG, and the words for those who do not see it."""

    svg: str
    alt: str

    def __str__(self) -> str:
        return f"[picture] {self.alt}"

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        encoded = base64.b64encode(self.svg.encode()).decode()
        image = f"<img src='data:image/svg+xml;base64,{encoded}' alt='{html.escape(self.alt)}' width='{WIDTH}'>"
        return {"text/html": image, "image/svg+xml": self.svg, "text/plain": str(self)}


@dataclass
class Sheet:
    """A picture in the making; x to the right and y downwards from the upper left corner, in px of 960 x 540.

    `title` is the one sentence of the slide, `note` the line below that says how it was drawn.
    """

    title: str
    note: str = ""
    _parts: list[str] = field(default_factory=list)

    def words(self, x: float, y: float, text: str, size: int = 20, anchor: str = "middle", colour: str = DARK_INK,
              bold: bool = False) -> None:  # fmt: skip
        """Text whose middle stands at y; `anchor`: start, middle or end of it stands at x. A newline begins a line."""
        lines = text.split("\n")
        weight = " font-weight='bold'" if bold else ""
        for number, line in enumerate(lines):
            at = y + (number - (len(lines) - 1) / 2) * size * 1.2 + size * 0.35
            self._parts.append(
                f"<text x='{x:g}' y='{at:g}' font-size='{size}' text-anchor='{anchor}' fill='{colour}'{weight}>"
                f"{html.escape(line)}</text>"
            )

    def box(self, x: float, y: float, width: float, height: float, text: str = "", fill: str = PALE, size: int = 18,
            dashed: bool = False) -> None:  # fmt: skip
        """A rectangle with text in its middle; dashed and unfilled for memory that is not there."""
        look = f"fill='none' stroke='{GREY}' stroke-dasharray='6 5'" if dashed else f"fill='{fill}' stroke='{EDGE}'"
        self._parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='4' stroke-width='1.5' {look}/>"
        )
        if text:
            ink = PAPER if fill in _DARK_FILLS and not dashed else GREY if dashed else DARK_INK
            self.words(x + width / 2, y + height / 2, text, size, colour=ink)

    def line(
        self, *points: tuple[float, float], colour: str = DARK_INK, width: float = 3, dashed: bool = False
    ) -> None:
        """A line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = " stroke-dasharray='7 6'" if dashed else ""
        self._parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='{width:g}'{dash}/>")

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], colour: str = DARK_INK, width: float = 3
    ) -> None:
        """A straight arrow."""
        (x, y), angle = end, math.atan2(end[1] - start[1], end[0] - start[0])
        head = 8 + 2 * width
        sides = [(x - head * math.cos(angle + turn), y - head * math.sin(angle + turn)) for turn in (0.42, -0.42)]
        shaft = (x - 0.8 * head * math.cos(angle), y - 0.8 * head * math.sin(angle))
        self.line(start, shaft, colour=colour, width=width)
        tip = " ".join(f"{a:g},{b:g}" for a, b in [end, *sides])
        self._parts.append(f"<polygon points='{tip}' fill='{colour}'/>")

    def circle(self, x: float, y: float, radius: float, text: str = "", fill: str = PALE, size: int = 20) -> None:
        """A circle with text in its middle."""
        self._parts.append(
            f"<circle cx='{x:g}' cy='{y:g}' r='{radius:g}' fill='{fill}' stroke='{EDGE}' stroke-width='1.5'/>"
        )
        if text:
            self.words(x, y, text, size, colour=PAPER if fill in _DARK_FILLS else DARK_INK)

    def picture(self, alt: str) -> Picture:
        """The finished picture; ValueError without words for it."""
        if len(alt) < 60:
            raise ValueError(f"a picture needs alternative text that tells what it shows; got {alt!r}")
        head, body = Sheet(""), "".join(self._parts)
        head.words(WIDTH / 2, 38, self.title, min(27, _TITLE // len(self.title)), bold=True)
        head.words(WIDTH / 2, HEIGHT - 24, self.note, 16, colour=GREY)
        svg = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' role='img' font-family=\"{FONT}\">"
            f"<title>{html.escape(self.title)}</title><desc>{html.escape(alt)}</desc>"
            f"<rect width='{WIDTH}' height='{HEIGHT}' fill='{PAPER}'/>{''.join(head._parts)}{body}</svg>"
        )
        return Picture(svg, f"{self.title}. {alt}")


Drawing = Callable[[Sheet], str]
PICTURES: dict[str, Callable[[], Picture]] = {}


def drawn(notebook: str, title: str, of: str, how: str = "Drawn from the rule") -> Callable[[Drawing], Drawing]:
    """A decorator: the function draws a notebook's picture on its sheet and returns the words for it.

    `of` and `how` stand below the picture: "Drawn from the rule: 4 ranks, n - 1 = 3 steps".
    """

    def add(draw: Drawing) -> Drawing:
        def picture() -> Picture:
            sheet = Sheet(title, f"{how}: {of}")
            return sheet.picture(draw(sheet))

        PICTURES[notebook] = picture
        return draw

    return add
