"""plotly's `graph_objects`, loaded when a figure is first drawn: `from fsdplab.figures.plotly_go import go`.

Lessons and figures then import where plotly is not installed (a GPU machine may have torch and numpy alone); only
drawing needs it, and says so.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["go"]


class _WhenUsed:
    """Stands for the module until a name of it is asked for."""

    def __getattr__(self, name: str) -> object:
        try:
            return getattr(import_module("plotly.graph_objects"), name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError('figures need plotly: pip install "fsdplab[lab]"', name="plotly") from error


if TYPE_CHECKING:
    from plotly import graph_objects as go
else:
    go = _WhenUsed()
