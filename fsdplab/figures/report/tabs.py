"""The tabs of a report: what profiled records tell, one question a tab, every run in each.

A tab that a run has nothing for says in one line what to run instead, so that a page never looks broken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fsdplab import figures
from fsdplab.common.sizes import seconds, size
from fsdplab.common.words import plural
from fsdplab.figures.report.parts import drawn, note, part, rendered, table
from fsdplab.figures.trace_tables import cells, left_out
from fsdplab.figures.view import view, views
from fsdplab.profiling.findings import profiling_cost
from fsdplab.profiling.tables import Table, TablesOf, tables_of_pair, tables_of_record
from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.records import RecordError, RunRecord
from fsdplab.sessions.device_peak import peak_of

if TYPE_CHECKING:
    from fsdplab.profiling.findings import Finding

MARKS = 1_500  # of each timeline on a page, to stay under a megabyte a record
_MOST_PAIRS = 5
_UNTRACED = "A simulated step has no traces, which these tables are made of: give runs of fsdplab run --profile 3."
_NOTHING_FOUND = "No findings: nothing in these records stands out, or no step was profiled (run with --profile 2)."
_NAMES = ("name", "unit", "group", "shapes")  # columns that may be longer than the page is wide


def tabbed(
    summary: str,
    records: Sequence[RunRecord],
    findings: Sequence[Finding | Mapping[str, Any]],
    tables_of: TablesOf | None = None,
) -> Markup:
    """The row of tabs and their panels, the summary first; tables of traces are made here, or `tables_of` has them."""
    made = tables_of or (lambda record: tables_of_record(record, peak_of(record)))
    timelines = _each(records, lambda record: drawn(figures.rank_timeline, record, limit=MARKS))
    exposed = _each(records, lambda record: drawn(figures.exposed_heatmap, record) + _stragglers(record))
    memory = any(view(record).peak or not view(record).traced for record in records)
    told = Markup("\n").join(map(_finding, findings))
    panels = {
        "Summary": summary,
        "Timeline": drawn(figures.step_bar, records) + timelines,
        "Exposed": drawn(figures.exposed_bar, records) + exposed,
        "Memory": _each(records, _memory),
        "Traffic": _each(records, _traffic),
        "Pareto": drawn(figures.pareto, records) if memory else _not_in_traces("memory, one of the two axes"),
        "Tables": _each(records, lambda record: note(_UNTRACED) if view(record).simulated else _tables(made, record)),
        "Difference": _pairs(records),
        "Findings": _costs_of_profiling(records) + (told or note(_NOTHING_FOUND)),
    }
    return rendered("tabs.html", panels=panels)


def _each(records: Sequence[RunRecord], fill: Callable[[RunRecord], Markup]) -> Markup:
    """Every run under its name; a single run needs none."""
    if len(records) == 1:
        return fill(records[0])
    return part("under_names", bodies=[(view.label, fill(record)) for view, record in zip(views(records), records)])


def _not_in_traces(what: str) -> Markup:
    return note(f"Not in these traces: {what}. The lab records it in runs of its own: fsdplab run or fsdplab compare.")


def _stragglers(record: RunRecord) -> Markup:
    """Who was late; ranks that were simulated once for all are alike."""
    if view(record).simulated and len({row["rank"] for row in record.table("breakdown")}) < 2:
        return note("All simulated ranks are alike, so none is late and none waits for another.")
    return drawn(figures.straggler_map, record)


def _memory(record: RunRecord) -> Markup:
    """The linked view where the record tells of its units' lives, else the memory of the worst rank; of foreign traces
    the peak where they hold it.
    """
    if view(record).traced:
        by_rank = enumerate(record.summary.peak_by_rank or ())
        said = ", ".join(f"rank {rank} {size(peak)}" for rank, peak in by_rank if peak)
        known = note(f"Peak of allocated memory, from the traces: {said}.") if said else Markup("")
        return known + _not_in_traces("memory by category" if said else "memory")
    try:
        return Markup(figures.linked_html(record))
    except ValueError as reason:
        peaks = record.summary.peak_by_rank or (0,)
        worst = max(range(len(peaks)), key=lambda rank: peaks[rank] or 0)
        return drawn(figures.memory_timeline, record, rank=worst) + note(str(reason))


def _traffic(record: RunRecord) -> Markup:
    """What was sent beside what the strategy must send; of foreign traces what they hold."""
    if not view(record).traced:
        return drawn(figures.ledger_against_formula, record)
    comm = record.summary.comm
    if comm.bytes_per_step is None:
        return _not_in_traces("bytes sent, and what the strategy must send")
    said = f"{plural(comm.collectives_per_step or 0, 'collective')} a step send {size(comm.bytes_per_step)} a rank"
    return note(f"{said}, from the traces.") + _not_in_traces("what the strategy must send")


def _tables(make: Callable[..., list[Table]], *records: RunRecord) -> Markup:
    """Tables, each under the sentence that it comes to, or the one line that says why there are none."""
    try:
        return Markup("\n").join(map(_table, make(*records)))
    except (RecordError, TraceError) as reason:
        return note(str(reason))


def _table(shown: Table) -> Markup:
    classes = ["number" if column.unit else "name" if column.key in _NAMES else "" for column in shown.columns]
    looks = [{"class": name} if name else {} for name in classes]
    notes = [each for each in (left_out(shown), *shown.notes) if each]
    rows = cells(shown)
    head = [column.heading for column in shown.columns]
    body = table(head, rows, lambda place, text: looks[place]) if rows else Markup("")
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
    return Markup("\n").join(_pair(records[0], other) for other in records[1 : 1 + _MOST_PAIRS])


def _pair(first: RunRecord, second: RunRecord) -> Markup:
    """The difference unit by unit, then in the parts of a step and in its operators and kernels."""
    profiled = first.table("breakdown") and second.table("breakdown")
    return drawn(figures.difference, first, second) + (_tables(tables_of_pair, first, second) if profiled else "")


def _costs_of_profiling(records: Sequence[RunRecord]) -> Markup:
    """By how much profiled steps were longer than timed ones, where it is much."""
    said = [(shown.label, profiling_cost(record)) for shown, record in zip(views(records), records)]
    return Markup("\n").join(note(f"{name}: {words}" if len(said) > 1 else words) for name, words in said if words)


def _finding(found: Finding | Mapping[str, Any]) -> Markup:
    """One finding: an object or a dict with `title`, `text`, `remedy`, and perhaps `seconds` a step."""
    names = ("title", "kind", "text", "remedy", "seconds")
    told = found if isinstance(found, Mapping) else {name: getattr(found, name, None) for name in names}
    title = str(told.get("title") or str(told.get("kind") or "finding").replace("_", " "))
    cost = f" · {seconds(told['seconds'])} a step" if told.get("seconds") and "a step" not in title else ""
    return part("finding", title=title + cost, text=told.get("text") or "", remedy=told.get("remedy") or "")
