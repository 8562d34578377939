"""plotly's figure, shown by notebooks in the ink of their page and with alternative text.

A saved notebook holds plotly's description, which JupyterLab and VS Code draw without a network, and the alternative
text. JupyterLab adds a PNG when it has drawn the figure.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from plotly import graph_objects

from fsdplab.figures.page_ink import following
from fsdplab.figures.plotly_go import PLOTLY
from fsdplab.figures.style import alt_text


class Figure(graph_objects.Figure):
    """plotly's figure, of which only the display in notebooks differs."""

    def _ipython_display_(self) -> None:
        from IPython.display import display

        # raw: these are the output's forms; IPython makes none of its own
        display(self._repr_mimebundle_(), raw=True)

    def _repr_mimebundle_(self, *_: Any, **__: Any) -> dict[str, Any]:
        return bundle(self, alt_text(self))


def bundle(figure: graph_objects.Figure, alt: str) -> dict[str, Any]:
    """Return the forms of an output that shows a figure: plotly's, and the alternative text.

    Colab draws no output of plotly's form. It gets HTML that loads plotly from its site.
    """
    described = plotly_json(figure)
    forms: dict[str, Any] = {PLOTLY: described, "text/plain": f"[figure] {alt}"}
    if "google.colab" in sys.modules:
        forms["text/html"] = graph_objects.Figure(described).to_html(full_html=False, include_plotlyjs="cdn")
    return forms


def plotly_json(figure: graph_objects.Figure) -> dict[str, Any]:
    """Return the figure's description as plain JSON, in the ink of the page."""
    described: dict[str, Any] = json.loads(figure.to_json())
    return following(described)
