"""The tabs of a report: what profiled records tell, one question a tab, every run in each.

A tab that a run has nothing for says in one line what to run instead, so that a page never looks broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fsdplab import figures
from fsdplab.common.sizes import seconds
from fsdplab.figures.report.parts import classed_table, drawn, note
from fsdplab.figures.report.rendering import part, rendered
from fsdplab.figures.trace_tables import cells, headings, is_number, left_out
from fsdplab.figures.view import view, views
from fsdplab.profiling.tables import Table, TablesOf, tables_of_record
from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.records import RecordError, RunRecord

if TYPE_CHECKING:
    from fsdplab.profiling.findings import Finding

MARKS = 1_500  # of each timeline on a page, to stay under a megabyte a record
_MOST_PAIRS = 5
_BREAKS = {"name": "name", "unit": "name", "group": "name"}  # columns of names that may be longer than the page is wide


def tabbed(
    summary: str,
    records: Sequence[RunRecord],
    findings: Sequence[Finding | Mapping[str, Any]],
    tables_of: TablesOf | None = None,
) -> Markup:
    """The row of tabs and their panels, the summary first; tables of traces are made here, or `tables_of` has them."""
    panels = {
        "Summary": summary,
        "Timeline": drawn(figures.step_bar, records)
        + _each(records, lambda record: drawn(figures.rank_timeline, record, limit=MARKS)),
        "Exposed": drawn(figures.exposed_bar, records)
        + _each(records, lambda record: drawn(figures.exposed_heatmap, record) + _stragglers(record)),
        "Memory": _each(records, _of_a_run("memory by category", _memory)),
        "Traffic": _each(
            records,
            _of_a_run("what the strategy must send", lambda record: drawn(figures.ledger_against_formula, record)),
        ),
        "Pareto": drawn(figures.pareto, own)
        if (own := [record for record in records if not _is_traced(record)])
        else _not_in_traces("memory, one of the two axes"),
        "Tables": _each(records, lambda record: _tables(record, tables_of or tables_of_record)),
        "Difference": _pairs(records),
        "Findings": _findings(findings),
    }
    return rendered("tabs.html", panels=panels)


def _each(records: Sequence[RunRecord], fill: Callable[[RunRecord], Markup]) -> Markup:
    """Every run under its name; a single run needs none."""
    if len(records) == 1:
        return fill(records[0])
    return part("under_names", bodies=[(view.label, fill(record)) for view, record in zip(views(records), records)])


def _is_traced(record: RunRecord) -> bool:
    return record.summary.traces is not None


def _of_a_run(what: str, fill: Callable[[RunRecord], Markup]) -> Callable[[RunRecord], Markup]:
    """`fill`, for runs of the lab's; foreign traces lack `what`."""
    return lambda record: _not_in_traces(what) if _is_traced(record) else fill(record)


def _not_in_traces(what: str) -> Markup:
    return note(f"Not in these traces: {what}. The lab records it in runs of its own: fsdplab run or fsdplab compare.")


def _stragglers(record: RunRecord) -> Markup:
    """Who was late; ranks that were simulated once for all are alike."""
    if view(record).simulated and len({row["rank"] for row in record.table("breakdown")}) < 2:
        return note("All simulated ranks are alike, so none is late and none waits for another.")
    return drawn(figures.straggler_map, record)


def _memory(record: RunRecord) -> Markup:
    """The linked view where the record tells of its units' lives, else the memory of the worst rank."""
    try:
        return Markup(figures.linked_html(record))
    except ValueError as reason:
        peaks = record.summary.peak_by_rank or (0,)
        worst = max(range(len(peaks)), key=lambda rank: peaks[rank] or 0)
        return drawn(figures.memory_timeline, record, rank=worst) + note(str(reason))


def _tables(record: RunRecord, tables_of: TablesOf) -> Markup:
    """What the record's traces tell, each table under the sentence that it comes to."""
    if view(record).simulated:
        return note(
            "A simulated step has no traces, which these tables are made of: give runs of fsdplab run --profile 3."
        )
    try:
        found = tables_of(record)
    except (RecordError, TraceError) as reason:
        return note(str(reason))
    return Markup("\n").join(map(_table, found))


def _table(shown: Table) -> Markup:
    classes = ["number" if is_number(column) else _BREAKS.get(column.key, "") for column in shown.columns]
    notes = [each for each in (left_out(shown), *shown.notes) if each]
    rows = cells(shown)
    body = classed_table(classes, headings(shown), rows) if rows else Markup("")
    return part("trace_table", title=shown.title, sentence=shown.sentence, body=body, notes=notes)


def _pairs(records: Sequence[RunRecord]) -> Markup:
    """Every later run against the first, of those that ended whole; a single run has nothing to differ from."""
    left_out = [shown.label for shown, record in zip(views(records), records) if record.status != "finished"]
    records = [record for record in records if record.status == "finished"]
    if len(records) < 2:
        why = f" Not compared, since they did not end whole: {', '.join(left_out)}." if left_out else ""
        return note(
            "A difference needs two runs: give two records, such as the same strategy with --prefetch 0 and"
            f" --prefetch 1, or two folders of traces.{why}"
        )
    return Markup("\n").join(drawn(figures.difference, records[0], other) for other in records[1 : 1 + _MOST_PAIRS])


def _findings(findings: Iterable[Finding | Mapping[str, Any]]) -> Markup:
    """Findings with their remedies, the costliest first as given."""
    shown = [_finding(found) for found in findings]
    return Markup("\n").join(shown) or note(
        "No findings: nothing in these records stands out, or no step was profiled (run with --profile 2)."
    )


def _finding(found: Finding | Mapping[str, Any]) -> Markup:
    """One finding: an object or a dict with `title`, `text`, `remedy`, and perhaps `seconds` a step."""
    names = ("title", "kind", "text", "remedy", "seconds")
    told = found if isinstance(found, Mapping) else {name: getattr(found, name, None) for name in names}
    title = str(told.get("title") or str(told.get("kind") or "finding").replace("_", " "))
    cost = f" · {seconds(told['seconds'])} a step" if told.get("seconds") and "a step" not in title else ""
    return part("finding", title=title + cost, text=told.get("text") or "", remedy=told.get("remedy") or "")
