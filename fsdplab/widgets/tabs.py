"""The content of each tab of the strategy lab: pure functions from records to pieces of a page, without widgets.

A piece is a plotly figure or HTML. A figure without data is replaced by one line that says so.

Live figures are shown by plotly; the whole batch is repeated below the lab, folded, as an ordinary output, because the
widgets' state is not saved in the notebook. There it is the table and the figures' alternative texts; the course's
static pages, which have plotly, draw the figures too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, TypeAlias

from plotly.graph_objects import Figure

from fsdplab import figures
from fsdplab.figures import alt_text
from fsdplab.figures.fastest import core_words
from fsdplab.figures.report.parts import PIECES, PLOTLY, comparison_table
from fsdplab.figures.report.parts import table as html_table
from fsdplab.figures.table import COLUMNS, brief, column, legend, mood, told
from fsdplab.figures.view import RunView, provenance
from fsdplab.profiling.findings import findings
from fsdplab.records import RunRecord

from .lab_state import Batch

Piece: TypeAlias = Figure | str

_COLOURS = {"good": "var(--fsdplab-good, #00704f)", "bad": "var(--fsdplab-bad, #c01f25)"}
FAULT = "could not be drawn"
EMPTY = "no run was measured yet: press Measure"
_FIGURES = {  # of each tab, by their names in `fsdplab.figures`
    "Table": ("step_time", "step_bar"),
    "Timeline": ("rank_timeline", "exposed_bar", "exposed_heatmap"),
    "Memory": ("memory_by_category", "memory_timeline", "linked_view"),
    "Pareto": ("pareto",),
    "Ledger": ("ledger_against_formula",),
}
_OF_ALL_RUNS = ("step_time", "step_bar", "memory_by_category", "pareto")
TABS = (*_FIGURES, "Findings")
OF_ONE_RUN = ("Timeline", "Memory", "Ledger", "Findings")


def pieces(tab: str, batch: Batch | None, chosen: int = 0) -> list[Piece]:
    """The pieces of one tab; `chosen` is the row of the batch that tabs about a single run show."""
    if batch is None or not batch.records:
        return [note(EMPTY)]
    record = batch.rows[min(chosen, len(batch.rows) - 1)]
    if tab == "Findings":
        return _findings(record)
    drawn = [_drawn(name, batch.rows if name in _OF_ALL_RUNS else record) for name in _FIGURES[tab]]
    return [table(batch.views), *_failures(batch), *drawn] if tab == "Table" else drawn


def note(words: str) -> str:
    """One line in place of a missing figure."""
    return f"<p style='opacity:.75;margin:12px 4px;font-size:var(--fsdplab-type, 14px)'>{escape(words)}</p>"


def table(runs: Sequence[RunView]) -> str:
    """The comparison as HTML: one row a run, verdicts in colour, and the provenance below."""
    real = "<br>".join(f"<b>{word}</b>: {escape(what)}" for word, what in provenance(list(runs)))
    type_size = "font-size:calc(.93 * var(--fsdplab-table, 14px))"
    columns = told(runs, [name for name in COLUMNS if name in (*brief(runs), "engine", "tokens/s")])
    small = f"<p style='{type_size};opacity:.8;margin:6px 10px'>{escape(legend(columns))}.<br>{real}</p>"
    core = core_words(runs)
    first = f"<p style='color:{_COLOURS['bad']};font-weight:600;margin:6px 10px'>{escape(core)}</p>" if core else ""
    shown = comparison_table(runs, lambda place, text: _look(columns[place], text), columns, style=_TABLE)
    return f"{first}<div style='overflow-x:auto'>{shown}</div>{small}"


# styles, not classes: a saved notebook's page takes style sheets away
_TABLE = "border-collapse:collapse;font-size:var(--fsdplab-table, 14px);font-variant-numeric:tabular-nums"


def _look(name: str, text: str | None) -> dict[str, str]:
    """Return a cell's style: amounts stay in one piece, long texts may break, verdicts are coloured."""
    row = column(name)
    style = f"text-align:{'right' if row.flush_right else 'left'};padding:5px 6px"
    if text is not None:
        style += "" if row.wraps or row.breaks else ";white-space:nowrap"
        style += f";color:{_COLOURS[mood(text)]};font-weight:600" if mood(text) else ""
    return {"style": style}


def _failures(batch: Batch) -> list[Piece]:
    """The report of each run that failed, in full."""
    failed = [record for record in batch.rows if record.status == "failed"]
    reports = [
        f"{record.spec['strategy']} ({record.spec['engine']}): {(record.failure or {}).get('message', '')}"
        for record in failed
    ]
    look = f"white-space:pre-wrap;color:{_COLOURS['bad']};margin:8px 10px;font-size:var(--fsdplab-table, 13px)"
    return [f"<pre style='{look}'>{escape(report)}</pre>" for report in reports]


def _drawn(name: str, data: RunRecord | list[RunRecord]) -> Piece:
    """A figure of `fsdplab.figures`, or one line with the reason why there is none."""
    try:
        return getattr(figures, name)(data)
    except ValueError as reason:
        return note(str(reason))
    except Exception as bug:  # an error in one figure must neither empty the page nor end the current run
        return note(f"{name} {FAULT} ({type(bug).__name__}: {bug})")


def _findings(record: RunRecord) -> list[Piece]:
    try:
        found = findings(record)
    except ValueError as reason:
        return [note(str(reason))]
    words = [
        f"<b>{escape(each.title)}</b><br>{escape(each.text)}<br><i>What to do:</i> {escape(each.remedy)}"
        for each in found
    ]
    lines = "".join(f"<li style='margin:10px 0'>{line}</li>" for line in words)
    listed = f"<ol style='font-size:var(--fsdplab-type, 16px);line-height:1.5;max-width:62em'>{lines}</ol>"
    return [listed if found else note("nothing stands out in this run")]


# ---- as outputs of a notebook


def outputs(pieces: Iterable[Piece]) -> tuple[dict[str, Any], ...]:
    """Pieces as outputs of a notebook: a figure with its alternative text, which is there for screen readers too; HTML
    unchanged.
    """
    found = []
    for piece in pieces:
        if isinstance(piece, str):
            found.append({"text/html": piece})
            continue
        alt, config = alt_text(piece), {"config": {"displaylogo": False, "responsive": False}}
        words = {"text/html": f"<p>{escape(alt)}</p>", "text/plain": f"[figure] {alt}"}
        found.append({PLOTLY: json.loads(piece.to_json()) | config, **words})
        found.append({"text/html": f"<div style='{_UNSEEN}'>{escape(alt)}</div>"})
    return tuple({"output_type": "display_data", "data": data, "metadata": {}} for data in found)


_UNSEEN = "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)"


def still(batch: Batch | None, answer: Mapping[str, Any]) -> dict[str, Any]:
    """The lab in the saved notebook, folded: what the instrument answered as a table, and of a batch the table with
    its figure, and memory. A bundle of HTML, text, and the pieces for a page that draws figures itself.
    """
    measured, title = f"; batch {batch.title}" if batch else "", answer.get("memory_title", "no answer yet")
    headline = f"The lab's numbers as a table, for the saved notebook: {title}{measured}"
    said = f"{answer.get('difference', '')} All {answer.get('clock', 'is to come')}. {answer.get('job', '')}".strip()
    heads = {"name": "strategy", "peak_words": "memory of a rank", "step_words": "step"}
    style = {"style": "text-align:left;padding:2px 14px 2px 0"}
    rows = [[row[name] for name in heads] for row in answer.get("rows", ())]
    table = f"{html_table([*heads.values()], rows, lambda *_: style)}<p>{escape(said)}</p>"
    shown = [*pieces("Table", batch), *pieces("Memory", batch)[:1]] if batch else []
    inside = "".join(each if isinstance(each, str) else f"<p>{escape(alt_text(each))}</p>" for each in shown)
    summary = f"<summary style='opacity:.75;cursor:pointer'>{escape(headline)}</summary>"
    words = "\n".join([headline, said, *(alt_text(each) for each in shown if isinstance(each, Figure))])
    whole = {"text/html": f"<details>{summary}{table}{inside}</details>", "text/plain": words}
    drawn = [each["data"] for piece in shown for each in outputs([piece])[:1]]
    return whole | ({PIECES: [{"text/html": table}, *drawn]} if drawn else {})
