"""Static forms of the lab for pages without widgets: each figure with its alternative text.

Live figures are shown by plotly; the whole batch is repeated below the lab, folded, as an ordinary output, because the
widgets' state is not saved in the notebook. There it is the table and the figures' alternative texts; the course's
static pages, which have plotly, draw the figures too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from typing import Any

from plotly.graph_objects import Figure

from fsdplab.figures import alt_text

from .lab_state import Batch
from .tabs import EMPTY, Piece, note, pieces


def outputs(piece: Piece) -> list[dict[str, Any]]:
    """One piece as outputs of a notebook: a figure with its alternative text; HTML unchanged."""
    if isinstance(piece, str):
        return [_output({"text/html": piece})]
    config = {"config": {"displaylogo": False, "responsive": False}}
    words = {"text/html": f"<p>{escape(alt_text(piece))}</p>", "text/plain": f"[figure] {alt_text(piece)}"}
    unseen = f"<div style='{_UNSEEN}'>{escape(alt_text(piece))}</div>"
    return [_output({PLOTLY: json.loads(piece.to_json()) | config, **words}), _output({"text/html": unseen})]


def _output(data: dict[str, Any]) -> dict[str, Any]:
    return {"output_type": "display_data", "data": data, "metadata": {}}


PLOTLY = "application/vnd.plotly.v1+json"
PIECES = "application/vnd.fsdplab.pieces+json"  # bundles of outputs, one below the other
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
        return f"Batch {self.batch.title}, as it is saved" if self.batch else f"Strategy lab: {EMPTY}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """The folded output as HTML, and its pieces for a page that draws figures itself."""
        if not self.batch:
            return {"text/html": note(self._headline), "text/plain": repr(self)}
        inside = "".join(
            piece if isinstance(piece, str) else f"<p>{escape(alt_text(piece))}</p>" for piece in self._pieces
        )
        summary = f"<summary style='opacity:.75;cursor:pointer'>{escape(self._headline)}</summary>"
        return {
            "text/html": f"<details>{summary}{inside}</details>",
            "text/plain": repr(self),
            PIECES: [output["data"] for piece in self._pieces for output in outputs(piece)[:1]],
        }
