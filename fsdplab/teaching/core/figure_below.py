"""A widget without a look of its own that redraws the figure below it, in the milliseconds that a slider needs.

The figure stays an ordinary output, which a saved notebook keeps; only its pixels come by this way.
"""

from __future__ import annotations

from pathlib import Path

import anywidget

from .display import Shown


class FigureBelow(anywidget.AnyWidget):
    """The figure that the widget's own cell shows; `draw(figure)` replaces what is seen of it."""

    _esm = Path(__file__).with_name("figure_below.js")

    def __init__(self) -> None:
        super().__init__(layout={"display": "none"})

    def draw(self, figure: Shown) -> None:
        """Draw another figure in its place."""
        self.send(figure.figure.to_json())
