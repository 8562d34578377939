"""A comparison as one standalone page: opens offline, and answers first.

The first screen has the conclusion in one sentence, memory beside time, and the most valuable change; five tabs hold
the rest. plotly.js is inlined once; everything else stays under a megabyte a record. The page follows the reader's
light or dark setting and has a switch for lecture rooms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

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
from fsdplab.figures.profile_data import distinct
from fsdplab.figures.report.parts import drawn, folded, note, number_table, part, rendered, table
from fsdplab.figures.style import on_page
from fsdplab.figures.table import beside, column, legend, mood, predicted_step, step_of, told, unbroken
from fsdplab.figures.table import cells as cells_of_run
from fsdplab.figures.trace_tables import cells, left_out
from fsdplab.figures.view import STEADY_CARD, Runs, RunView, provenance, ranks_and_device, view, views, with_verdicts
from fsdplab.profiling.diagnosis import diagnosis
from fsdplab.profiling.findings import Finding, profiling_cost
from fsdplab.profiling.tables import Column, Table, TablesOf, tables_of_pair, tables_of_record
from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.records import CATEGORIES, RecordError, RunRecord, Spread, drift_sentence
from fsdplab.sessions.device_peak import peak_of
from fsdplab.sessions.steady_card import spec_of, steady
from fsdplab.workloads.own.sources import is_of_tokens

_WIDTH = 1100  # pixels of a page's figures in a window of 1280
_HALF = 560  # of two beside each other
# what was trained, in the order of the sentence
_SETTING = {
    "model": "model {}",
    "world_size": "{} ranks",
    "batch_size": "batch {} a rank",
    "sequence_length": "{} tokens a sequence",
    "steps": "{} steps",
    "seed": "seed {}",
}
_OF_TOKENS = ("batch_size", "sequence_length")  # which a model with batches of its own leaves unused
_OF_A_JOB = ("model", "trainer", "engine", "strategy", "precision")  # of a recorded job, as far as its spec has them
_NONE = Markup("")


def comparison_page(
    comparison: Mapping[str, Any],
    runs: Sequence[RunRecord | RunView] | None = None,
    *,
    records: Sequence[RunRecord] | None = None,
    tables_of: TablesOf | None = None,
) -> str:
    """Return the page of a comparison (the dict that `--json` writes); `runs` adds what only records know, such as
    statuses.

    With records (as `runs`, or as `records` beside RunViews) the page has tabs: Compare, Timeline, Memory, Traffic, and
    Diagnosis with their findings. `tables_of` gives the tables of a record's traces where they are made already.
    Example:
    `Path("compare.html").write_text(comparison_page(comparison_json(records, reference), records), encoding="utf-8")`.
    """
    from plotly.offline import get_plotlyjs

    if records is None:
        records = [run for run in runs or () if isinstance(run, RunRecord)]
    records = list(records)
    if len(records) == len(comparison["runs"]):
        runs = records  # which know what tells namesakes apart
    shown = views(comparison if runs is None else runs)
    # records alone lack the verdicts on losses, which the comparison has
    source = comparison if runs is None else with_verdicts(runs, comparison)
    # the first screen has figures beside each other, the tabs one below the other
    with on_page(_HALF):
        answer = _answer(shown, source, records)
    with on_page(_WIDTH):
        content = _compared(comparison, source)
        # a comparison without records is all that the page can show: no tabs
        if records:
            content = tabbed(content, records, tables_of)
    page = rendered(
        "page.html",
        title=_title(shown),
        plotly_js=get_plotlyjs(),
        setting=_setting(_used(comparison), shown),
        cores=core_words(shown),
        answer=answer,
        content=content,
        comparison=json.dumps(comparison, separators=(",", ":")),
    )
    return f"{page}\n"


def _title(runs: Sequence[RunView]) -> str:
    """Say what the page is about: strategies, run or simulated, or somebody's traces."""
    if not runs:
        return "What each sharding strategy costs"
    if all(run.simulated for run in runs):
        return "What each sharding strategy would cost, simulated"
    if all(run.traced for run in runs):
        return f"What the traces of {' and '.join(run.strategy for run in runs)} show"
    if len(runs) == 1 or all(run.recorded for run in runs):
        return f"Where a step of {' and '.join(run.label for run in runs)} goes"
    return "What each sharding strategy costs"


# ---- the first screen


def _answer(shown: Sequence[RunView], source: Runs, records: Sequence[RunRecord]) -> Markup:
    """Return the first screen: the conclusion, two figures, and what to change."""
    sentences = [_what_is_wrong(records), conclusion(shown)]
    return rendered(
        "answer.html",
        sentence=" ".join(filter(None, sentences)),
        figures=_first_figures(shown, source, records),
        clock=clock_words(shown),
        change=change_words(shown) or _remedy(records),
    )


def _first_figures(shown: Sequence[RunView], source: Runs, records: Sequence[RunRecord]) -> list[Markup]:
    """Draw memory beside time. Of a single run that was profiled its step by cause comes first.

    Traces hold no memory by category, and only runs behind an emulated link have a step on the steady card.
    """
    pictures = []
    if not all(run.traced for run in shown):
        pictures.append(drawn(memory_by_category, source))
    # a run alone has nothing beside it: the question is then where its step goes
    is_alone = len(shown) == 1 and len(records) == 1
    if not (is_alone and records[0].table("breakdown")):
        return [*pictures, drawn(steady_steps, source)]
    # without memory beside it the figure has the page's whole width
    with on_page(_HALF if pictures else _WIDTH):
        pictures.insert(0, drawn(step_causes, records[0]))
    if shown[0].steady.step_time_s:
        pictures.append(drawn(steady_steps, source))
    return pictures


def _what_is_wrong(records: Sequence[RunRecord]) -> str:
    """Say what is wrong with the only run; nothing beside others, which the comparison is about."""
    return diagnosis(records[0]) if len(records) == 1 else ""


def _remedy(records: Sequence[RunRecord]) -> str:
    """Say what to do about the costliest finding of all; nothing where no run was profiled."""
    sentences = []
    for advice in costliest(records, most=1):
        sentences.append(f"{advice.label}: {advice.finding.title}. {advice.remedy}")
    return " ".join(sentences)


# ---- the tab Compare


def _on_steady_card(runs: Sequence[RunView]) -> Sequence[RunView]:
    """Return the runs with the steady card's times in place of the measured ones, where all with a step have both."""
    # a run that failed has no step, and needs none
    timed = [run for run in runs if run.step_median]
    if not timed or not all(run.steady.step_time_s for run in timed):
        return runs
    shown = []
    for run in runs:
        if run in timed:
            run = _with_steady_times(run)
        shown.append(run)
    return shown


def _with_steady_times(run: RunView) -> RunView:
    comm = replace(run.summary.comm, exposed_s=run.steady.exposed_s, overlap=run.steady.overlap)
    # no quartiles: a simulated step has no spread
    summary = replace(run.summary, step_time_s=Spread(median=run.steady.step_time_s), comm=comm)
    # from these two `how_and_where` and `simulated` take what a subtitle says
    spec = {**run.spec, "gpu": STEADY_CARD}
    provenance_of_run = {**run.provenance, "step_time_s": "simulated"}
    return replace(run, summary=summary, spec=spec, provenance=provenance_of_run)


def _compared(comparison: Mapping[str, Any], source: Runs) -> Markup:
    """Return the tab Compare: the whole table, then what explains it, folded."""
    shown = views(source)
    columns = told(shown)
    rows = []
    # a cell's text breaks between its amounts, not between a number and its unit
    for run in shown:
        rows.append([unbroken(text) for text in cells_of_run(run, columns)])
    table_of_runs = table(columns, rows, lambda place, text: _look(columns[place], text))
    body = part("wide", body=table_of_runs)
    drift = drift_sentence(comparison)
    if drift:
        body += part("text", words=drift)
    is_simulated = all(run.simulated for run in shown)
    steps, ran, where = "Measured steps", "What was run", "Where it ran"
    if is_simulated:
        steps, ran, where = "Simulated steps", "What was simulated", "Simulated for"
    sections = {
        "What the columns mean": part("text", words=f"{legend(columns)}."),
        "Which runs are worth choosing: memory against time": _choice(shown),
        steps: drawn(step_time, source) + _steps(shown),
        "The peak by category": _peaks(shown),
        "Predicted beside measured": _prediction(shown, source),
        "What was real here": part("pairs", entries=provenance(shown)),
        ran: part("pairs", entries=_flat(_used(comparison))),
        where: part("pairs", entries=_flat(comparison.get("environment") or {})),
    }
    # a section without a body is left out
    for title, section in sections.items():
        body += folded(title, section)
    return body


def _choice(shown: Sequence[RunView]) -> Markup:
    """Draw memory against time, which is the steady card's where all runs have it; of one run there is nothing to
    choose.
    """
    if len(shown) == 1:
        return _NONE
    # foreign traces without memory have no place in a plane of memory and time
    if all(run.traced and not run.peak for run in shown):
        return not_in_traces("memory")
    return drawn(pareto, _on_steady_card(shown))


def _peaks(shown: Sequence[RunView]) -> Markup:
    """Return the peak by category, which traces do not know."""
    if all(run.traced for run in shown):
        return _NONE
    titles = category_titles(run.spec for run in shown)
    head = ["run"]
    for category in CATEGORIES:
        head.append(titles[category])
    rows = []
    for run in shown:
        sizes = [size(run.split.get(category)) for category in CATEGORIES]
        rows.append([run.label, *sizes])
    return part("wide", body=number_table(head, rows))


def _steps(shown: Sequence[RunView]) -> Markup:
    """Return each run's measured step with its spread, and for which part of it its ranks had a core."""
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
    row = column(name)
    classes = [mood(text)]  # "" where it is no verdict
    if row.wraps:
        classes.append("long")
    if row.breaks:
        classes.append("short")
    names = " ".join(filter(None, classes))
    return {"class": names} if names else {}


def _prediction(shown: list[RunView], source: Runs) -> Markup:
    """Return the predicted peaks beside the measured ones, as a figure and a table, and why they differ."""
    predicted = [run for run in shown if run.predicted_peak]
    if not predicted:
        return _NONE
    rows = []
    for run in shown:
        peak = beside(run.predicted_peak, run.peak, size)
        sent = beside(run.summary.formula_bytes_per_step, run.summary.comm.bytes_per_step, size)
        rows.append([run.label, peak, sent, predicted_step(run)])
    head = ["run", "peak", "sent in a step", "step"]
    caption = "Predicted; (1.00) is predicted / measured."
    table_of_runs = part("wide", body=number_table(head, rows, caption))
    parts = [drawn(predicted_memory, source), table_of_runs]
    for line in _lines_on_prediction(shown, predicted):
        parts.append(part("text", words=line))
    return Markup("\n").join(parts)


def _lines_on_prediction(shown: list[RunView], predicted: list[RunView]) -> list[str]:
    lines = step_sources(shown)
    explained: list[str] = []
    for run in predicted:
        explained += gaps(run)
    lines += explained or ["Every category is within 10% of what was measured, or less than 0.5% of the peak off."]
    for run in shown:
        if run.summary.predicted.why_not:
            lines.append(f"{run.label}: not predicted: {run.summary.predicted.why_not}")
    return lines


# ---- settings in words


def _used(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a comparison, without those of tokens where the model's batches are its own."""
    spec = dict(comparison.get("spec") or {})
    workload = (comparison.get("environment") or {}).get("workload") or {}
    if workload and not is_of_tokens(workload.get("kind", "")):
        for name in _OF_TOKENS:
            spec.pop(name, None)
    return spec


def _setting(spec: Mapping[str, Any], runs: Sequence[RunView]) -> str:
    """Return one sentence on what was trained, of the fields that the spec has; of traces, whose they are."""
    if len(runs) == 1 and runs[0].traced:
        return ranks_and_device(list(runs))
    if len(runs) == 1 and runs[0].recorded:
        # a job tells what it has: a script may have noted neither its model nor its precision
        words = [str(spec[name]) for name in _OF_A_JOB if spec.get(name)]
        words.append(ranks_and_device(list(runs)))
        return ", ".join(words)
    words = []
    for name, form in _SETTING.items():
        if spec.get(name) is not None:
            words.append(form.format(spec[name]))
    return ", ".join(words)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield settings as (name, text) pairs, without those that are not set: `{"a": {"b": 1}}` gives `("a b", "1")`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name} ")
        elif value not in (None, []):
            written = f"{prefix}{name}".replace("_", " ")
            yield written, _shown(name, value)


def _shown(name: str, value: object) -> str:
    """Write a setting's value as a reader wants it: lists joined, bytes in MB."""
    # such as `peak_bytes` and `card`
    if name.endswith(("bytes", "card")) and isinstance(value, int):
        return size(value)
    if isinstance(value, Mapping):
        words = []
        for key, inner in value.items():
            written = key.replace("_", " ")
            words.append(f"{written} {_shown(key, inner)}")
        return ", ".join(words)
    if isinstance(value, (list, tuple)):
        return "; ".join(_shown(name, item) for item in value)
    return str(value)


# ---- the five tabs: a picker chooses the run, and what is read less often is folded; a tab that a run has nothing for
# says in one line what to run instead, so that a page never looks broken


MARKS = 1_500  # of each timeline on a page, to stay under a megabyte a record
_UNTRACED = "A simulated step has no traces, which these tables are made of: give runs of fsdplab run --profile 3."
_NOTHING_FOUND = "No findings: nothing in this record stands out, or no step was profiled (run with --profile 2)."
_NAMES = ("name", "unit", "group", "shapes")  # columns that may be longer than the page is wide


def tabbed(compared: str, records: Sequence[RunRecord], tables_of: TablesOf | None = None) -> Markup:
    """Return the row of tabs and their panels, the comparison first; tables of traces are made here, or `tables_of` has
    them.
    """
    # made when the tab Diagnosis is filled, a run at a time
    made = tables_of or (lambda record: tables_of_record(record, peak_of(record)))
    parts_of_steps = drawn(figures.step_bar, records) + drawn(figures.exposed_bar, records)
    panels = {
        "Compare": compared,
        "Timeline": _each(records, _timeline) + folded("Where the time of each step goes", parts_of_steps),
        "Memory": _each(records, _memory),
        "Traffic": _traffic(records),
        "Diagnosis": _diagnosis(records, made),
    }
    # a single run has nothing to compare: it opens with its timeline
    first = "Timeline" if len(records) == 1 else "Compare"
    # a dictionary keeps its order: the tab that opens first is taken out and put in front
    return rendered("tabs.html", panels={first: panels.pop(first), **panels})


def _each(records: Sequence[RunRecord], fill: Callable[[RunRecord], Markup]) -> Markup:
    """Return what `fill` gives of the run that the picker shows, at first the first fully sharded one; a single run
    needs no picker.
    """
    if len(records) == 1:
        return fill(records[0])
    chosen = 0
    for place, record in enumerate(records):
        if record.spec.get("strategy") in SAVES_MOST:
            chosen = place
            break
    bodies = []
    for run, record in zip(views(records), records):
        bodies.append((run.label, fill(record)))
    return part("picked", bodies=bodies, chosen=chosen)


def not_in_traces(what: str) -> Markup:
    """Return one line in place of what no trace holds."""
    return note(f"Not in these traces: {what}. The lab records it in runs of its own: fsdplab run or fsdplab compare.")


# ---- the tab Timeline


def _timeline(record: RunRecord) -> Markup:
    """Draw the step on the steady card where that card can show it, then a measured one; folded, who was exposed
    when.
    """
    exposed = drawn(figures.exposed_heatmap, record) + _stragglers(record)
    measured = drawn(figures.rank_timeline, record, limit=MARKS)
    return _simulated(record) + measured + folded("Exposed time by unit, and who was late", exposed)


def _simulated(record: RunRecord) -> Markup:
    """Draw the simulated timeline of a run whose summary has a steady step."""
    if not view(record).steady.step_time_s:
        return _NONE
    spec = spec_of(record)
    if spec is None:
        return _NONE
    return drawn(lambda: figures.rank_timeline(steady(spec), limit=MARKS))


def _stragglers(record: RunRecord) -> Markup:
    """Draw who was late; ranks that were simulated once for all are alike."""
    if view(record).simulated and len(distinct(record.table("breakdown"), "rank")) < 2:
        return note("All simulated ranks are alike, so none is late and none waits for another.")
    return drawn(figures.straggler_map, record)


# ---- the tabs Memory and Traffic


def _memory(record: RunRecord) -> Markup:
    """Draw the linked view where the record tells of its units' lives, else the memory of the worst rank; of foreign
    traces the peak where they hold it.
    """
    run = view(record)
    if run.traced:
        return _memory_of_traces(record)
    try:
        return Markup(figures.linked_html(record))
    # a table is missing, such as that of the units' lives, which only the lab's engine records
    except ValueError as reason:
        # ranks that measured no memory count as 0
        peaks = record.summary.peak_by_rank or (0,)
        worst = max(range(len(peaks)), key=lambda rank: peaks[rank] or 0)
        alone = drawn(figures.memory_timeline, record, rank=worst)
        if run.recorded:  # the remedy is another engine, and a job has none to choose
            return alone
        return alone + note(str(reason))


def _memory_of_traces(record: RunRecord) -> Markup:
    peaks = []
    for rank, peak in enumerate(record.summary.peak_by_rank or ()):
        if peak:
            peaks.append(f"rank {rank} {size(peak)}")
    if not peaks:
        return not_in_traces("memory")
    known = note(f"Peak of allocated memory, from the traces: {', '.join(peaks)}.")
    return known + not_in_traces("memory by category")


def _traffic(records: Sequence[RunRecord]) -> Markup:
    """Draw what was sent, a bar a run, beside what the strategy must send; of foreign traces say what they hold."""
    own, of_traces = [], _NONE
    for record in records:
        if view(record).traced:
            of_traces += _traffic_of_traces(record)
        else:
            own.append(record)
    if not own:
        return of_traces
    return drawn(figures.ledger_against_formula, own) + of_traces


def _traffic_of_traces(record: RunRecord) -> Markup:
    comm = record.summary.comm
    if comm.bytes_per_step is None:
        return not_in_traces("bytes sent, and what the strategy must send")
    collectives = plural(comm.collectives_per_step or 0, "collective")
    sent = f"{collectives} a step send {size(comm.bytes_per_step)} a rank, from the traces."
    counted = note(f"{view(record).label}: {sent}")
    return counted + not_in_traces("what the strategy must send")


# ---- the tab Diagnosis


def _diagnosis(records: Sequence[RunRecord], made: TablesOf) -> Markup:
    """Return of each run its findings, and folded its difference to the first run and the tables of its traces."""
    first = records[0]
    # by identity, as a record is no key of a dictionary and two may have the same settings
    labels = {id(record): run.label for run, record in zip(views(records), records)}
    findings = dict(findings_by_run(records))

    def of_run(record: RunRecord) -> Markup:
        label = labels[id(record)]
        body = _findings(record, findings.get(label, ()))
        # the first run is the one that others are compared with
        if record is not first:
            body += folded(f"Difference to {labels[id(first)]}", _difference(first, record))
        tables = note(_UNTRACED) if view(record).simulated else _tables(made, record)
        return body + folded("Tables of the traces", tables)

    return _each(records, of_run)


def _findings(record: RunRecord, findings: Sequence[Finding]) -> Markup:
    """Return what profiling cost, and the findings, or the line that says why there are none."""
    cost = profiling_cost(record)
    body = note(cost) if cost else _NONE
    if not findings:
        return body + note(_NOTHING_FOUND)
    return body + Markup("\n").join(part("finding", found=finding) for finding in findings)


def _difference(first: RunRecord, record: RunRecord) -> Markup:
    """Draw a later run against the first, unit by unit, then in the parts of a step, in its operators and kernels."""
    # steps that a failure cut short are no measure
    failed = [run.label for run in views([first, record]) if run.status == "failed"]
    if failed:
        return note(f"Not compared, since {' and '.join(failed)} failed.")
    body = drawn(figures.difference, first, record)
    if first.table("breakdown") and record.table("breakdown"):
        body += _tables(tables_of_pair, first, record)
    return body


def _tables(make: Callable[..., list[Table]], *records: RunRecord) -> Markup:
    """Return tables, each under the sentence that it comes to, or the one line that says why there are none."""
    try:
        return Markup("\n").join(map(_table, make(*records)))
    except (RecordError, TraceError) as reason:
        return note(str(reason))


def _table(shown: Table) -> Markup:
    looks = [_look_of(column_of_table) for column_of_table in shown.columns]
    head = [column_of_table.heading for column_of_table in shown.columns]
    # the first rows; `left_out` below says how many there are more
    rows = cells(shown)
    body = table(head, rows, lambda place, text: looks[place]) if rows else _NONE
    notes = [line for line in (left_out(shown), *shown.notes) if line]
    return part("trace_table", title=shown.title, sentence=shown.sentence, body=body, notes=notes)


def _look_of(column_of_table: Column) -> dict[str, str]:
    """Return the class of a column's cells: a number is set flush right, a long name breaks."""
    if column_of_table.unit:
        return {"class": "number"}
    return {"class": "name"} if column_of_table.key in _NAMES else {}
