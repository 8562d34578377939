"""A widget on the page, and nothing where no widget can live: what it controls is an output of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ipywidgets
from IPython import get_ipython
from IPython.display import display


@dataclass(frozen=True)
class WidgetView:
    """A widget without the text that would stand for it on static pages (`FloatText(value=200.0, ...)`)."""

    widget: ipywidgets.Widget

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {**self.widget._repr_mimebundle_(), "text/plain": ""}


def present_widget(widget: ipywidgets.Widget) -> None:
    """Show a widget in a notebook; elsewhere there is nobody to move it."""
    if get_ipython():
        display(WidgetView(widget))
