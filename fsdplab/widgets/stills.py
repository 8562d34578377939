"""Static forms of the lab for pages without widgets or scripts: a picture of each figure, and its alternative text.

Live figures are shown by plotly together with these; the whole batch is repeated below the lab, folded, as an ordinary
output, because the widgets' state is not saved in the notebook.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from typing import Any

from plotly.graph_objects import Figure

from fsdplab.figures import alt_text
from fsdplab.figures.report.parts import picture

from .lab_state import Batch
from .tabs import EMPTY, Piece, note, pieces


def outputs(piece: Piece) -> list[dict[str, Any]]:
    """One piece as outputs of a notebook: a figure in three forms with its alternative text; HTML unchanged."""
    if isinstance(piece, str):
        return [_output({"text/html": piece})]
    words = alt_text(piece)
    figure = {
        "application/vnd.plotly.v1+json": (
            json.loads(piece.to_json()) | {"config": {"displaylogo": False, "responsive": False}}
        ),
        "text/html": picture(piece),
        "text/plain": f"[figure] {words}",
    }
    return [_output(figure), _output({"text/html": f"<div style='{_UNSEEN}'>{escape(words)}</div>"})]


def _output(data: dict[str, Any]) -> dict[str, Any]:
    return {"output_type": "display_data", "data": data, "metadata": {}}


_UNSEEN = "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)"  # there for screen readers only


@dataclass(frozen=True, repr=False)
class Still:
    """A batch in the saved notebook: one line, and folded below it the table with its figure, and memory."""

    batch: Batch | None = None

    def __repr__(self) -> str:
        return "\n".join([self._headline, *(alt_text(piece) for piece in self._pieces if isinstance(piece, Figure))])

    @property
    def _pieces(self) -> list[Piece]:
        return [*pieces("Table", self.batch), *pieces("Memory", self.batch)[:1]] if self.batch else []

    @property
    def _headline(self) -> str:
        return f"Still picture of batch {self.batch.title}" if self.batch else f"Strategy lab: {EMPTY}"

    def _repr_html_(self) -> str:
        if not self.batch:
            return note(self._headline)
        inside = "".join(piece if isinstance(piece, str) else picture(piece) for piece in self._pieces)
        return (
            f"<details><summary style='opacity:.75;cursor:pointer'>{escape(self._headline)}</summary>{inside}</details>"
        )
