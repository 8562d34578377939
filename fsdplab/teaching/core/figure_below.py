"""A widget without a look of its own, beside controls: it redraws the figure below them in the milliseconds that a
slider needs, and tells how wide outputs are.

The figure stays an ordinary output, which a saved notebook keeps; only its pixels come by this way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import page, page_is


class FigureBelow(anywidget.AnyWidget):
    """The figure that the widget's own cell shows."""

    _esm = Path(__file__).with_name("figure_below.js")
    width = traitlets.Int(0).tag(sync=True)
    answers = traitlets.Bool(False).tag(sync=True)  # whether the page has answered a message

    def __init__(self) -> None:
        super().__init__(layout={"width": "100%", "height": "0", "margin": "0"})
        self._page = page()
        self._resized: Callable[[], None] = lambda: None
        self.observe(self._was_measured, names="width")

    def on_resize(self, call: Callable[[], None]) -> None:
        """Call it when the figure must be drawn for another width."""
        self._resized = call

    def draw(self, figure: go.Figure) -> bool:
        """Show another figure in its place; False where the page does not.

        VS Code and Colab draw each update of an output themselves. A page that was busy for 2 s when the widget came
        gets no messages: anywidget gives up on it.
        """
        if self.answers:
            self.send(figure.to_json())
        return bool(self.answers)

    def _was_measured(self, change: Mapping[str, Any]) -> None:
        """Tell the page that its message came, and redraw where it is wide or narrow in another way."""
        self.send("")
        page_is(change["new"])
        if page() != self._page:
            self._page = page()
            self._resized()
