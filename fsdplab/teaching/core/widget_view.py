"""A widget on the page, and nothing where no widget can live: what it controls is an output of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .display import notebook_display

if TYPE_CHECKING:
    import ipywidgets


@dataclass(frozen=True)
class WidgetView:
    """A widget without the text that would stand for it on static pages (`FloatText(value=200.0, ...)`)."""

    widget: ipywidgets.Widget

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {**self.widget._repr_mimebundle_(), "text/plain": ""}


def present_widget(make: Callable[[], ipywidgets.Widget]) -> None:
    """Make a widget and show it in a notebook; elsewhere there is nobody to move it, and it is not made."""
    display = notebook_display()
    if display:
        display(WidgetView(make()))
