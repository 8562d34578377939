"""The five tabs of a report. A picker chooses the run; what is read less often is folded.

A tab that a run has nothing for says in one line what to run instead, so that a page never looks broken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from fsdplab import figures
from fsdplab.common.names import SAVES_MOST
from fsdplab.common.sizes import size
from fsdplab.common.words import plural
from fsdplab.figures.conclusion import findings_by_run
from fsdplab.figures.report.parts import drawn, folded, note, part, rendered, table
from fsdplab.figures.trace_tables import cells, left_out
from fsdplab.figures.view import view, views
from fsdplab.profiling.findings import profiling_cost
from fsdplab.profiling.tables import Table, TablesOf, tables_of_pair, tables_of_record
from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.records import RecordError, RunRecord
from fsdplab.sessions.device_peak import peak_of
from fsdplab.sessions.steady_card import spec_of, steady

MARKS = 1_500  # of each timeline on a page, to stay under a megabyte a record
_UNTRACED = "A simulated step has no traces, which these tables are made of: give runs of fsdplab run --profile 3."
_NOTHING_FOUND = "No findings: nothing in this record stands out, or no step was profiled (run with --profile 2)."
_NAMES = ("name", "unit", "group", "shapes")  # columns that may be longer than the page is wide


def tabbed(compared: str, records: Sequence[RunRecord], tables_of: TablesOf | None = None) -> Markup:
    """The row of tabs and their panels, the comparison first; tables of traces are made here, or `tables_of` has
    them.
    """
    made = tables_of or (lambda record: tables_of_record(record, peak_of(record)))
    parts_of_steps = drawn(figures.step_bar, records) + drawn(figures.exposed_bar, records)
    panels = {
        "Compare": compared,
        "Timeline": _each(records, _timeline) + folded("Where the time of each step goes", parts_of_steps),
        "Memory": _each(records, _memory),
        "Traffic": _traffic(records),
        "Diagnosis": _diagnosis(records, made),
    }
    return rendered("tabs.html", panels=panels)


def _each(records: Sequence[RunRecord], fill: Callable[[RunRecord], Markup]) -> Markup:
    """What `fill` gives of the run that the picker shows, at first the first fully sharded one; a single run needs no
    picker.
    """
    if len(records) == 1:
        return fill(records[0])
    sharded = [index for index, record in enumerate(records) if record.spec.get("strategy") in SAVES_MOST]
    chosen = sharded[0] if sharded else 0
    names = [shown.label for shown in views(records)]
    return part("picked", bodies=[(name, fill(record)) for name, record in zip(names, records)], chosen=chosen)


def not_in_traces(what: str) -> Markup:
    """One line in place of what no trace holds."""
    return note(f"Not in these traces: {what}. The lab records it in runs of its own: fsdplab run or fsdplab compare.")


def _timeline(record: RunRecord) -> Markup:
    """The step on the steady card where that card can show it, then a measured one; folded, who was exposed when."""
    exposed = drawn(figures.exposed_heatmap, record) + _stragglers(record)
    measured = drawn(figures.rank_timeline, record, limit=MARKS)
    return _on_steady_card(record) + measured + folded("Exposed time by unit, and who was late", exposed)


def _on_steady_card(record: RunRecord) -> Markup:
    """The simulated timeline of a run whose summary has a steady step."""
    spec = spec_of(record) if view(record).steady.step_time_s else None
    return Markup("") if spec is None else drawn(lambda: figures.rank_timeline(steady(spec), limit=MARKS))


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
        return known + not_in_traces("memory by category" if said else "memory")
    try:
        return Markup(figures.linked_html(record))
    except ValueError as reason:
        peaks = record.summary.peak_by_rank or (0,)
        worst = max(range(len(peaks)), key=lambda rank: peaks[rank] or 0)
        alone = drawn(figures.memory_timeline, record, rank=worst)
        return alone if view(record).recorded else alone + note(str(reason))  # a job has no engine to choose


def _traffic(records: Sequence[RunRecord]) -> Markup:
    """What was sent, a bar a run, beside what the strategy must send; of foreign traces what they hold."""
    own = [record for record in records if not view(record).traced]
    told = [_traffic_of_traces(record) for record in records if view(record).traced]
    return (drawn(figures.ledger_against_formula, own) if own else Markup("")) + Markup("").join(told)


def _traffic_of_traces(record: RunRecord) -> Markup:
    comm = record.summary.comm
    if comm.bytes_per_step is None:
        return not_in_traces("bytes sent, and what the strategy must send")
    said = f"{plural(comm.collectives_per_step or 0, 'collective')} a step send {size(comm.bytes_per_step)} a rank"
    return note(f"{view(record).label}: {said}, from the traces.") + not_in_traces("what the strategy must send")


def _diagnosis(records: Sequence[RunRecord], made: TablesOf) -> Markup:
    """Of each run its findings, and folded its difference to the first run and the tables of its traces."""
    labels = {id(record): shown.label for shown, record in zip(views(records), records)}
    findings = dict(findings_by_run(records))

    def of_run(record: RunRecord) -> Markup:
        cost = note(words) if (words := profiling_cost(record)) else Markup("")
        own = [part("finding", found=found) for found in findings.get(labels[id(record)], ())]
        told = Markup("\n").join(own) or note(_NOTHING_FOUND)
        traces = note(_UNTRACED) if view(record).simulated else _tables(made, record)
        unlike = Markup("")
        if record is not records[0]:
            unlike = folded(f"Difference to {labels[id(records[0])]}", _difference(records[0], record))
        return cost + told + unlike + folded("Tables of the traces", traces)

    return _each(records, of_run)


def _difference(first: RunRecord, record: RunRecord) -> Markup:
    """A later run against the first, unit by unit, then in the parts of a step and in its operators and kernels."""
    if failed := [shown.label for shown in views([first, record]) if shown.status == "failed"]:
        return note(f"Not compared, since {' and '.join(failed)} failed.")
    profiled = first.table("breakdown") and record.table("breakdown")
    return drawn(figures.difference, first, record) + (_tables(tables_of_pair, first, record) if profiled else "")


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
