"""The tabs of a report: what profiled records tell, one question a tab, every run in each.

A tab that a run has nothing for says in one line what to run instead, so that a page never looks broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, ParamSpec

from fsdplab.common.sizes import seconds
from fsdplab.figures.plotly_go import go
from fsdplab.figures.plots.breakdown import step_bar
from fsdplab.figures.plots.exposed import exposed_heatmap
from fsdplab.figures.plots.memory import memory_timeline
from fsdplab.figures.plots.pareto import pareto
from fsdplab.figures.plots.run_diff import difference
from fsdplab.figures.plots.stragglers import straggler_map
from fsdplab.figures.plots.timeline import rank_timeline
from fsdplab.figures.plots.traffic import ledger_against_formula
from fsdplab.figures.report.linked import linked_html
from fsdplab.figures.report.script import plot_div
from fsdplab.figures.view import views
from fsdplab.records import RunRecord

if TYPE_CHECKING:
    from fsdplab.profiling.diagnosis import Finding

What = ParamSpec("What")
MARKS = 1_500  # of each timeline on a page, to stay under a megabyte a record
_MOST_PAIRS = 5


def tabbed(summary: str, records: Sequence[RunRecord], findings: Sequence[Finding | Mapping[str, Any]]) -> str:
    """The row of tabs and their panels, the summary first."""
    panels = {
        "Summary": lambda: summary,
        "Timeline": (
            lambda: drawn(step_bar, records) + _each(records, lambda record: drawn(rank_timeline, record, limit=MARKS))
        ),
        "Exposed": lambda: _each(records, lambda record: drawn(exposed_heatmap, record) + drawn(straggler_map, record)),
        "Memory": lambda: _each(records, _memory),
        "Traffic": lambda: _each(records, lambda record: drawn(ledger_against_formula, record)),
        "Pareto": lambda: drawn(pareto, records),
        "Difference": lambda: _pairs(records),
        "Findings": lambda: _findings(findings),
    }
    buttons = "".join(_button(name) for name in panels)
    bodies = "\n".join(_panel(name, fill()) for name, fill in panels.items())
    return f'<div class="tabs" role="tablist">{buttons}</div>\n{bodies}'


def _button(name: str) -> str:
    chosen = str(name == "Summary").lower()
    return (
        f'<button type="button" role="tab" aria-selected="{chosen}" aria-controls="panel-{name}"'
        f' data-panel="panel-{name}">{name}</button>'
    )


def _panel(name: str, body: str) -> str:
    opened = " open" if name == "Summary" else ""
    return f'<section class="panel{opened}" id="panel-{name}" role="tabpanel" aria-label="{name}">\n{body}\n</section>'


def drawn(draw: Callable[What, go.Figure], *what: What.args, **how: What.kwargs) -> str:
    """A figure for the page, or the one line that says why there is none and what to do."""
    try:
        return plot_div(draw(*what, **how))
    except ValueError as reason:
        return note(str(reason))


def note(text: str) -> str:
    return f"<figure><p>{escape(text)}</p></figure>"


def _each(records: Sequence[RunRecord], fill: Callable[[RunRecord], str]) -> str:
    """Every run under its name; a single run needs none."""
    if len(records) == 1:
        return fill(records[0])
    return "\n".join(f"<h2>{escape(view.label)}</h2>\n{fill(record)}" for view, record in zip(views(records), records))


def _memory(record: RunRecord) -> str:
    """The linked view where the record tells of its units' lives, else the memory of the worst rank."""
    try:
        return linked_html(record)
    except ValueError as reason:
        peaks = record.summary.get("peak_by_rank") or [0]
        worst = max(range(len(peaks)), key=lambda rank: peaks[rank] or 0)
        return drawn(memory_timeline, record, rank=worst) + note(str(reason))


def _pairs(records: Sequence[RunRecord]) -> str:
    """Every later run against the first; a single run has nothing to differ from."""
    if len(records) < 2:
        return note(
            "A difference needs two runs: give two records, such as the same strategy with --prefetch 0 and"
            " --prefetch 1."
        )
    return "\n".join(drawn(difference, records[0], other) for other in records[1 : 1 + _MOST_PAIRS])


def _findings(findings: Iterable[Finding | Mapping[str, Any]]) -> str:
    """Findings with their remedies, the costliest first as given."""
    shown = [_finding(found) for found in findings]
    return "\n".join(shown) or note(
        "No findings: nothing in these records stands out, or no step was profiled (run with --profile 2)."
    )


def _finding(found: Finding | Mapping[str, Any]) -> str:
    """One finding: an object or a dict with `title`, `text`, `remedy`, and perhaps `seconds` a step."""
    told = (
        found
        if isinstance(found, Mapping)
        else {name: getattr(found, name, None) for name in ("title", "kind", "text", "remedy", "seconds")}
    )
    title = told.get("title") or str(told.get("kind") or "finding").replace("_", " ")
    cost = f" · {seconds(told['seconds'])} a step" if told.get("seconds") and "a step" not in str(title) else ""
    text = f"<p>{escape(str(told['text']))}</p>" if told.get("text") else ""
    remedy = f"<p><b>What to do:</b> {escape(str(told['remedy']))}</p>" if told.get("remedy") else ""
    return f'<div class="finding"><h3>{escape(str(title))}{escape(cost)}</h3>{text}{remedy}</div>'
