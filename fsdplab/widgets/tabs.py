"""The content of each tab of the strategy lab: pure functions from records to pieces of a page, without widgets.

A piece is a plotly figure or HTML. A figure without data is replaced by one line that says so.

Live figures are shown by plotly; the whole batch is repeated below the lab, folded, as an ordinary output, because the
widgets' state is not saved in the notebook. There it is the table and the figures' alternative texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeAlias

from plotly.graph_objects import Figure

from fsdplab import figures
from fsdplab.figures import alt_text
from fsdplab.figures.fastest import core_words
from fsdplab.figures.notebook_figure import plotly_json
from fsdplab.figures.plotly_go import PLOTLY
from fsdplab.figures.report.parts import comparison_table
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
    records = batch.rows
    last = len(records) - 1
    # the menu may still have the run of a larger batch
    record = records[min(chosen, last)]
    if tab == "Findings":
        return _findings(record)
    figures_of_tab: list[Piece] = []
    for name in _FIGURES[tab]:
        data = records if name in _OF_ALL_RUNS else record
        figures_of_tab.append(_drawn(name, data))
    if tab == "Table":
        return [table(batch.views), *_failures(batch), *figures_of_tab]
    return figures_of_tab


def note(words: str) -> str:
    """One line in place of a missing figure."""
    return f"<p style='opacity:.75;margin:12px 4px;font-size:var(--fsdplab-type, 14px)'>{escape(words)}</p>"


def table(runs: Sequence[RunView]) -> str:
    """The comparison as HTML: one row a run, verdicts in colour, and the provenance below."""
    # the few columns that matter most and two more, in the order of the whole table
    wanted = {*brief(runs), "engine", "tokens/s"}
    in_order = [name for name in COLUMNS if name in wanted]
    columns = told(runs, in_order)

    def look_of_cell(place: int, text: str | None) -> dict[str, str]:
        return _look(columns[place], text)

    shown = comparison_table(runs, look_of_cell, columns, style=_TABLE)
    page = f"<div style='overflow-x:auto'>{shown}</div>"
    # below the table: what its columns mean, and what the runs ran on
    sources = []
    for word, what in provenance(list(runs)):
        sources.append(f"<b>{word}</b>: {escape(what)}")
    page += f"<p style='{_SMALL}'>{escape(legend(columns))}.<br>{'<br>'.join(sources)}</p>"
    # above the table, since all its times are worth less then
    core = core_words(runs)
    if core:
        bad = f"color:{_COLOURS['bad']};font-weight:600;margin:6px 10px"
        page = f"<p style='{bad}'>{escape(core)}</p>{page}"
    return page


# styles, not classes: a saved notebook's page takes style sheets away
_SMALL = "font-size:calc(.93 * var(--fsdplab-table, 14px));opacity:.8;margin:6px 10px"
_TABLE = "border-collapse:collapse;font-size:var(--fsdplab-table, 14px);font-variant-numeric:tabular-nums"


def _look(name: str, text: str | None) -> dict[str, str]:
    """Return a cell's style: amounts stay in one piece, long texts may break, verdicts are coloured."""
    row = column(name)
    style = f"text-align:{'right' if row.flush_right else 'left'};padding:5px 6px"
    if text is None:
        return {"style": style}
    if not row.wraps and not row.breaks:
        style += ";white-space:nowrap"
    verdict = mood(text)
    if verdict:
        style += f";color:{_COLOURS[verdict]};font-weight:600"
    return {"style": style}


def _failures(batch: Batch) -> list[Piece]:
    """The report of each run that failed, in full."""
    look = f"white-space:pre-wrap;color:{_COLOURS['bad']};margin:8px 10px;font-size:var(--fsdplab-table, 13px)"
    reports: list[Piece] = []
    for record in batch.rows:
        if record.status == "failed":
            message = (record.failure or {}).get("message", "")
            report = f"{record.spec['strategy']} ({record.spec['engine']}): {message}"
            reports.append(f"<pre style='{look}'>{escape(report)}</pre>")
    return reports


def _drawn(name: str, data: RunRecord | list[RunRecord]) -> Piece:
    """A figure of `fsdplab.figures`, or one line with the reason why there is none."""
    try:
        return getattr(figures, name)(data)
    # a figure without its table says in one line what to run instead
    except ValueError as reason:
        return note(str(reason))
    except Exception as bug:  # an error in one figure must neither empty the page nor end the current run
        return note(f"{name} {FAULT} ({type(bug).__name__}: {bug})")


def _findings(record: RunRecord) -> list[Piece]:
    try:
        found = findings(record)
    except ValueError as reason:
        return [note(str(reason))]
    if not found:
        return [note("nothing stands out in this run")]
    lines = ""
    for finding in found:
        remedy = f"<i>What to do:</i> {escape(finding.remedy)}"
        words = f"<b>{escape(finding.title)}</b><br>{escape(finding.text)}<br>{remedy}"
        lines += f"<li style='margin:10px 0'>{words}</li>"
    look = "font-size:var(--fsdplab-type, 16px);line-height:1.5;max-width:62em"
    return [f"<ol style='{look}'>{lines}</ol>"]


# ---- as outputs of a notebook


def outputs(pieces: Iterable[Piece]) -> tuple[dict[str, Any], ...]:
    """Pieces as outputs of a notebook: a figure with its alternative text, which is there for screen readers too; HTML
    unchanged.
    """
    shown: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, str):
            shown.append({"text/html": piece})
            continue
        alt = alt_text(piece)
        content = plotly_json(piece) | {"config": {"displaylogo": False, "responsive": False}}
        # where no renderer draws plotly's form, the alternative text is shown
        shown.append({PLOTLY: content, "text/html": f"<p>{escape(alt)}</p>", "text/plain": f"[figure] {alt}"})
        # where one does, screen readers still find the text
        shown.append({"text/html": f"<div style='{_UNSEEN}'>{escape(alt)}</div>"})
    as_outputs = [{"output_type": "display_data", "data": data, "metadata": {}} for data in shown]
    return tuple(as_outputs)


_UNSEEN = "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)"


@dataclass(frozen=True)
class Kept:
    """What a saved notebook keeps of a batch: its title, its table and figures as HTML, and the figures' words."""

    title: str = ""
    html: str = ""
    words: tuple[str, ...] = ()


def kept(batch: Batch | None) -> Kept:
    """What is kept of a batch: the table with its figure, and memory; nothing without a batch."""
    if batch is None:
        return Kept()
    # of memory the first figure only, that of all runs
    shown = [*pieces("Table", batch), *pieces("Memory", batch)[:1]]
    html, words = "", []
    for piece in shown:
        if isinstance(piece, str):
            html += piece
        else:
            alt = alt_text(piece)
            words.append(alt)
            html += f"<p>{escape(alt)}</p>"
    return Kept(batch.title, html, tuple(words))


def still(batch: Kept, answer: Mapping[str, Any]) -> dict[str, Any]:
    """The lab in the saved notebook, folded: what the instrument answers now as a table, and a batch."""
    # an answer that is hidden, or refused, has only some of these
    title = answer.get("memory_title", "no answer yet")
    difference = answer.get("difference", "")
    clock = answer.get("clock", "is to come")
    job = answer.get("job", "")
    headline = f"The lab's numbers as a table, for the saved notebook: {title}"
    if batch.title:
        headline += f"; batch {batch.title}"
    # `... All simulated on the steady card.`
    said = f"{difference} All {clock}. {job}".strip()
    rows: list[list[str]] = []
    for row in answer.get("rows", ()):
        rows.append([row["name"], row["peak_words"], row["step_words"]])
    # styles, not classes, as a saved notebook's page has no style sheet
    style = {"style": "text-align:left;padding:2px 14px 2px 0"}
    table = html_table(["strategy", "memory of a rank", "step"], rows, lambda *_: style)
    summary = f"<summary style='opacity:.75;cursor:pointer'>{escape(headline)}</summary>"
    html = f"<details>{summary}{table}<p>{escape(said)}</p>{batch.html}</details>"
    lines = [headline, said, *batch.words]
    return {"text/html": html, "text/plain": "\n".join(lines)}
