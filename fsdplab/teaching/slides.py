"""Shows the picture of a lesson: an SVG file in `pictures/` that can stand on a slide.

The file's `<title>` is the sentence of the slide, its `<desc>` the alternative text. A picture is edited as any SVG is:
the style in it makes the paper dark, and the words on the paper (`class='ground'`) light, on a dark page.
"""

from __future__ import annotations

import base64
import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fsdplab.teaching.core.display import present

FOLDER = Path(__file__).with_name("pictures")
WIDTH, HEIGHT = 960, 540  # px of every picture
_SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True, repr=False)
class Picture:
    """A picture: its SVG, and the words for those who do not see it."""

    svg: str
    alt: str

    def __str__(self) -> str:
        return f"[picture] {self.alt}"

    __repr__ = __str__

    @property
    def image(self) -> str:
        """The picture as an image of HTML: the SVG in it takes light or dark paper from the page's colour scheme."""
        encoded = base64.b64encode(self.svg.encode()).decode()
        return f"<img src='data:image/svg+xml;base64,{encoded}' alt='{html.escape(self.alt)}' width='{WIDTH}'>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.image, "image/svg+xml": self.svg, "text/plain": str(self)}


def picture(notebook: str) -> None:
    """Show a lesson's picture: `picture("05")`; ValueError names the lessons that have one."""
    drawn = picture_of(notebook)
    if drawn is None:
        lessons = ", ".join(sorted(path.stem for path in FOLDER.glob("*.svg")))
        raise ValueError(f"no picture of {notebook!r}; expected one of {lessons}")
    present(drawn)


def picture_of(notebook: str) -> Picture | None:
    """Return a lesson's picture, or None where it has none."""
    path = FOLDER / f"{notebook}.svg"
    if not path.is_file():
        return None
    svg = path.read_text(encoding="utf-8").strip()
    root = ElementTree.fromstring(svg)
    return Picture(svg, f"{root.findtext(f'{_SVG}title')}. {root.findtext(f'{_SVG}desc')}")
