"""Static forms of the lab for pages without widgets: what it simulated as a table, each figure with its alternative
text.

Live figures are shown by plotly; the whole batch is repeated below the lab, folded, as an ordinary output, because the
widgets' state is not saved in the notebook. There it is the table and the figures' alternative texts; the course's
static pages, which have plotly, draw the figures too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from plotly.graph_objects import Figure

from fsdplab.figures import alt_text
from fsdplab.figures.report.parts import PIECES, PLOTLY

from .lab_state import Batch
from .tabs import Piece, pieces


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


_UNSEEN = "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)"  # there for screen readers only


@dataclass(frozen=True, repr=False)
class Still:
    """The lab in the saved notebook, folded: what the instrument answered as a table, and of a batch the table with
    its figure, and memory.
    """

    batch: Batch | None = None
    answer: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "\n".join(
            [self._headline, self._said, *(alt_text(piece) for piece in self._pieces if isinstance(piece, Figure))]
        )

    @property
    def _pieces(self) -> list[Piece]:
        return [*pieces("Table", self.batch), *pieces("Memory", self.batch)[:1]] if self.batch else []

    @property
    def _headline(self) -> str:
        measured = f"; batch {self.batch.title}" if self.batch else ""
        title = self.answer.get("memory_title", "no answer yet")
        return f"The lab's numbers as a table, for the saved notebook: {title}{measured}"

    @property
    def _said(self) -> str:
        said = f"{self.answer.get('difference', '')} All {self.answer.get('clock', 'is to come')}."
        return f"{said} {self.answer.get('job', '')}".strip()

    @property
    def _table(self) -> str:
        """Memory and step of each run, as HTML."""
        heads = {"name": "strategy", "peak_words": "memory of a rank", "step_words": "step"}
        lines = "".join(_line([str(row[part]) for part in heads], "td") for row in self.answer.get("rows", ()))
        return f"<table>{_line([*heads.values()], 'th')}{lines}</table><p>{escape(self._said)}</p>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """The folded output as HTML, and its pieces for a page that draws figures itself."""
        inside = "".join(
            piece if isinstance(piece, str) else f"<p>{escape(alt_text(piece))}</p>" for piece in self._pieces
        )
        summary = f"<summary style='opacity:.75;cursor:pointer'>{escape(self._headline)}</summary>"
        whole = {"text/html": f"<details>{summary}{self._table}{inside}</details>", "text/plain": repr(self)}
        drawn = [output["data"] for piece in self._pieces for output in outputs(piece)[:1]]
        return whole | ({PIECES: [{"text/html": self._table}, *drawn]} if drawn else {})


def _line(words: Sequence[str], tag: str) -> str:
    style = "text-align:left;padding:2px 14px 2px 0"
    return f"<tr>{''.join(f'<{tag} style={style!r}>{escape(word)}</{tag}>' for word in words)}</tr>"
