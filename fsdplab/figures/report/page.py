"""A comparison as one standalone page: opens offline, and answers first.

The first screen has the conclusion in one sentence, memory beside time, and the most valuable change; five tabs hold
the rest. plotly.js is inlined once; everything else stays under a megabyte a record. The page follows the reader's
light or dark setting and has a switch for lecture rooms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fsdplab import figures
from fsdplab.common.names import SAVES_MOST, category_titles
from fsdplab.common.sizes import percent, seconds, size
from fsdplab.common.words import MISSING, plural
from fsdplab.figures.conclusion import (
    change_words,
    clock_words,
    conclusion,
    costliest,
    findings_by_run,
    gaps,
    step_sources,
)
from fsdplab.figures.fastest import core_words
from fsdplab.figures.plots.memory import memory_by_category, predicted_memory
from fsdplab.figures.plots.pareto import pareto
from fsdplab.figures.plots.step_causes import step_causes
from fsdplab.figures.plots.steps import steady_steps, step_time
from fsdplab.figures.report.parts import comparison_table, drawn, folded, note, number_table, part, rendered, table
from fsdplab.figures.style import on_page
from fsdplab.figures.table import beside, column, legend, mood, predicted_step, step_of, told
from fsdplab.figures.trace_tables import cells, left_out
from fsdplab.figures.view import STEADY_CARD, Runs, RunView, provenance, ranks_and_device, view, views, with_verdicts
from fsdplab.profiling.diagnosis import diagnosis
from fsdplab.profiling.findings import profiling_cost
from fsdplab.profiling.tables import Table, TablesOf, tables_of_pair, tables_of_record
from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.records import CATEGORIES, RecordError, RunRecord, Spread, drift_sentence
from fsdplab.sessions.device_peak import peak_of
from fsdplab.sessions.steady_card import spec_of, steady

if TYPE_CHECKING:
    from fsdplab.profiling.tables import TablesOf


_WIDTH = 1100  # pixels of a page's figures in a window of 1280
_HALF = 560  # of two beside each other
# what was trained, in the order of the sentence
_SETTING = {
    "model": "model {}", "world_size": "{} ranks", "batch_size": "batch {} a rank",
    "sequence_length": "{} tokens a sequence", "steps": "{} steps", "seed": "seed {}",
}  # fmt: skip


def comparison_page(
    comparison: Mapping[str, Any],
    runs: Sequence[RunRecord | RunView] | None = None,
    *,
    records: Sequence[RunRecord] | None = None,
    tables_of: TablesOf | None = None,
) -> str:
    """The page of a comparison (the dict that `--json` writes); `runs` adds what only records know, such as statuses.

    With records (as `runs`, or as `records` beside RunViews) the page has tabs: Compare, Timeline, Memory, Traffic, and
    Diagnosis with their findings. `tables_of` gives the tables of a record's traces where they are made already.
    Example:
    `Path("compare.html").write_text(comparison_page(comparison_json(records, reference), records), encoding="utf-8")`.
    """
    from plotly.offline import get_plotlyjs

    records = list(records if records is not None else [run for run in runs or () if isinstance(run, RunRecord)])
    runs = records if len(records) == len(comparison["runs"]) else runs  # records know what tells namesakes apart
    shown = views(runs if runs is not None else comparison)
    source = comparison if runs is None else with_verdicts(runs, comparison)
    with on_page(_HALF):
        answer = _answer(shown, source, records)
    with on_page(_WIDTH):
        compared = _compared(comparison, source)
        content = tabbed(compared, records, tables_of) if records else compared
    page = rendered(
        "page.html",
        title=_title(shown),
        plotly_js=get_plotlyjs(),
        setting=_setting(comparison.get("spec") or {}, shown),
        cores=core_words(shown),
        answer=answer,
        content=content,
        comparison=json.dumps(comparison, separators=(",", ":")),
    )
    return f"{page}\n"


def _title(runs: Sequence[RunView]) -> str:
    """What the page is about: strategies, run or simulated, or somebody's traces."""
    if runs and all(run.simulated for run in runs):
        return "What each sharding strategy would cost, simulated"
    if runs and all(run.traced for run in runs):
        return f"What the traces of {' and '.join(run.strategy for run in runs)} show"
    if runs and all(run.recorded for run in runs):
        return f"Where a step of {' and '.join(run.label for run in runs)} goes"
    return "What each sharding strategy costs"


def _answer(shown: Sequence[RunView], source: Runs, records: Sequence[RunRecord]) -> Markup:
    """The first screen. Of a single run that was profiled its step by cause comes first; traces hold no memory by
    category, and only runs behind an emulated link have a step on the steady card.
    """
    alone = len(shown) == 1 and len(records) == 1 and bool(records[0].table("breakdown"))
    memory = [] if all(run.traced for run in shown) else [drawn(memory_by_category, source)]
    if alone:
        with on_page(_HALF if memory else _WIDTH):
            first = [drawn(step_causes, records[0]), *memory]
        if shown[0].steady.step_time_s:
            first.append(drawn(steady_steps, source))
    else:
        first = [*memory, drawn(steady_steps, source)]
    return rendered(
        "answer.html",
        sentence=" ".join(filter(None, [_what_is_wrong(records), conclusion(shown)])),
        figures=first,
        clock=clock_words(shown),
        change=change_words(shown) or _remedy(records),
    )


def _what_is_wrong(records: Sequence[RunRecord]) -> str:
    """What is wrong with the only run; empty beside others, which the comparison is about."""
    return diagnosis(records[0]) if len(records) == 1 else ""


def _remedy(records: Sequence[RunRecord]) -> str:
    """What to do about the costliest finding of all; empty where no run was profiled."""
    return " ".join(f"{each.label}: {each.finding.title}. {each.remedy}" for each in costliest(records, most=1))


def _on_steady_card(runs: Sequence[RunView]) -> Sequence[RunView]:
    """The runs with the steady card's times in place of the measured ones, where all that have a step have both."""
    timed = [run for run in runs if run.step_median]
    if not timed or not all(run.steady.step_time_s for run in timed):
        return runs
    return [_with_steady_times(run) if run in timed else run for run in runs]


def _with_steady_times(run: RunView) -> RunView:
    comm = replace(run.summary.comm, exposed_s=run.steady.exposed_s, overlap=run.steady.overlap)
    summary = replace(run.summary, step_time_s=Spread(median=run.steady.step_time_s), comm=comm)
    spec = {**run.spec, "gpu": STEADY_CARD}
    return replace(run, summary=summary, spec=spec, provenance={**run.provenance, "step_time_s": "simulated"})


def _compared(comparison: Mapping[str, Any], source: Runs) -> Markup:
    """The tab Compare: the whole table, then what explains it, folded."""
    shown, drift = views(source), drift_sentence(comparison)
    columns = told(shown)
    ran, where = ("simulated", "Simulated for") if all(run.simulated for run in shown) else ("run", "Where it ran")
    sections = {
        "What the columns mean": part("text", words=f"{legend(columns)}."),
        "Which runs are worth choosing: memory against time": _choice(shown),
        f"{'Measured' if ran == 'run' else 'Simulated'} steps": drawn(step_time, source) + _steps(shown),
        "The peak by category": _peaks(shown),
        "Predicted beside measured": _prediction(shown, source),
        "What was real here": part("pairs", entries=provenance(shown)),
        f"What was {ran}": part("pairs", entries=_flat(comparison.get("spec") or {})),
        where: part("pairs", entries=_flat(comparison.get("environment") or {})),
    }
    compared = comparison_table(shown, lambda place, text: _look(columns[place], text), columns)
    whole = part("wide", body=compared) + (part("text", words=drift) if drift else "")
    return whole + Markup("").join(folded(title, body) for title, body in sections.items())


def _choice(shown: Sequence[RunView]) -> Markup:
    """Memory against time, which is the steady card's where all runs have it; of one run there is nothing to choose."""
    if len(shown) == 1:
        return Markup("")
    if all(run.traced and not run.peak for run in shown):
        return not_in_traces("memory")
    return drawn(pareto, _on_steady_card(shown))


def _peaks(shown: Sequence[RunView]) -> Markup:
    """The peak by category, which traces do not know."""
    if all(run.traced for run in shown):
        return Markup("")
    rows = [[run.label, *(size(run.split.get(name)) for name in CATEGORIES)] for run in shown]
    names = category_titles(run.spec for run in shown)
    return part("wide", body=number_table(["run", *map(names.__getitem__, CATEGORIES)], rows))


def _steps(shown: Sequence[RunView]) -> Markup:
    """Each run's measured step with its spread, and for which part of it its ranks had a core."""
    head = ["run", "median step", "fastest", "slowest", "had a core for"]
    rows = []
    for run in shown:
        spread, share = run.summary.step_time_s, run.summary.cpu_share
        core = MISSING if share is None else f"{percent(share)} of the step"
        rows.append([run.label, step_of(run), seconds(spread.min), seconds(spread.max), core])
    return part("wide", body=number_table(head, rows))


def _look(name: str, text: str | None) -> dict[str, str]:
    """Return the classes of a cell of the comparison: coloured where it is a verdict, it may break where it is long."""
    if text is None:
        return {}
    row, classes = column(name), [mood(text)]
    if row.wraps:
        classes.append("long")
    if row.breaks:
        classes.append("short")
    named = " ".join(filter(None, classes))
    return {"class": named} if named else {}


def _prediction(shown: list[RunView], source: Runs) -> Markup:
    known = [run for run in shown if run.predicted_peak]
    if not known:
        return Markup("")
    reasons = [f"{run.label}: not predicted: {why}" for run in shown if (why := run.summary.predicted.why_not)]
    explained = [gap for run in known for gap in gaps(run)]
    alike = "Every category is within 10% of what was measured, or less than 0.5% of the peak off."
    rows = [
        [
            run.label,
            beside(run.predicted_peak, run.peak, size),
            beside(run.summary.formula_bytes_per_step, run.summary.comm.bytes_per_step, size),
            predicted_step(run),
        ]
        for run in shown
    ]
    caption = "Predicted; (1.00) is predicted / measured."
    body = part("wide", body=number_table(["run", "peak", "sent in a step", "step"], rows, caption))
    lines = [part("text", words=line) for line in (*step_sources(shown), *(explained or [alike]), *reasons)]
    return Markup("\n").join([drawn(predicted_memory, source), body, *lines])


def _setting(spec: Mapping[str, Any], runs: Sequence[RunView]) -> str:
    """One sentence on what was trained, of the fields that the spec has; of traces, whose they are."""
    if len(runs) == 1 and runs[0].traced:
        return ranks_and_device(list(runs))
    if len(runs) == 1 and runs[0].recorded:
        said = ("model", "trainer", "engine", "strategy", "precision")
        return ", ".join([*(str(spec[name]) for name in said if spec.get(name)), ranks_and_device(list(runs))])
    return ", ".join(form.format(spec[name]) for name, form in _SETTING.items() if spec.get(name) is not None)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings as (name, text) pairs, without those that are not set: `{"a": {"b": 1}}` gives `("a b", "1")`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name} ")
        elif value not in (None, []):
            yield f"{prefix}{name}".replace("_", " "), _shown(name, value)


def _shown(name: str, value: object) -> str:
    """A setting's value as a reader wants it: lists joined, bytes in MB."""
    if name.endswith(("bytes", "card")) and isinstance(value, int):
        return size(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key.replace('_', ' ')} {_shown(key, part)}" for key, part in value.items())
    return "; ".join(_shown(name, part) for part in value) if isinstance(value, (list, tuple)) else str(value)


# ---- the five tabs: a picker chooses the run, and what is read less often is folded; a tab that a run has nothing for
# says in one line what to run instead, so that a page never looks broken


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
    return _simulated(record) + measured + folded("Exposed time by unit, and who was late", exposed)


def _simulated(record: RunRecord) -> Markup:
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
