"""plotly's `graph_objects`, loaded when a figure is first drawn: `from fsdplab.figures.plotly_go import go`.

So lessons and figures can be imported without plotly (a GPU machine may have only torch and numpy); only drawing needs
it, with a clear error.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fsdplab.common.places import how_to_install

__all__ = ["PLOTLY", "go"]

PLOTLY = "application/vnd.plotly.v1+json"  # the form of a cell's output that plotly's renderers draw


class _WhenUsed:
    """A proxy for the module, imported when a name is first used."""

    def __getattr__(self, name: str) -> object:
        try:
            if name == "Figure":  # one that notebooks show in the ink of their page
                return import_module("fsdplab.figures.notebook_figure").Figure
            return getattr(import_module("plotly.graph_objects"), name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"figures need plotly: {how_to_install('lab')}", name="plotly") from error


if TYPE_CHECKING:
    from plotly import graph_objects as go
else:
    go = _WhenUsed()
