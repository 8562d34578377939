"""Answers `run`, `compare` and `report`: finished runs as a table, with their verdicts, findings and legend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fsdplab import figures
from fsdplab.cli.answer import Answer, Line, Part, Table
from fsdplab.cli.outputs import Outputs
from fsdplab.common.errors import RunError
from fsdplab.common.sizes import percent
from fsdplab.common.words import plural
from fsdplab.figures.conclusion import clock_words, conclusion, costliest, findings_by_run, step_sources
from fsdplab.figures.fastest import core_words, step_words
from fsdplab.figures.table import EVERY_COLUMN, SPLIT, brief, cells, column, legend
from fsdplab.figures.view import RunView, provenance, view, views, with_verdicts
from fsdplab.profiling.diagnosis import diagnosis
from fsdplab.profiling.findings import profiling_cost
from fsdplab.profiling.tables import TablesOf
from fsdplab.records import RunRecord, comparison_json, drift_sentence

_MOST_WHOLE = 7  # a table of so few columns fits 80 characters, and breaks names there but no number from its unit


def answer_of_runs(
    records: Sequence[RunRecord],
    reference: RunRecord | None,
    outputs: Outputs,
    more: Sequence[Part] = (),
    tables_of: TablesOf | None = None,
) -> Answer:
    """Show the runs beside their reference (the finished record of the twin), then `more`.

    Of a single run its diagnosis comes first. Notes and findings follow the table, unless quiet. `tables_of` returns
    the tables of a record's traces for the page, where they have been made.
    """
    comparison = comparison_json(records, reference)
    shown = with_verdicts(records, comparison)
    parts: list[Part] = [*parts_of_runs(shown, reference, outputs)]
    if len(records) == 1:
        sentence = diagnosis(records[0])
        if sentence:
            # above the table: of one run there is nothing to compare
            parts.insert(0, Line(sentence, mood="bold"))
    drift = drift_sentence(comparison)
    if drift:
        parts.append(Line(drift, mood="bold"))
    if not outputs.quiet:
        parts += [*_notes(records), *_findings(records, outputs.verbose)]
    parts += more
    if outputs.verbose:
        parts += _output_of_ranks(records)

    def page() -> str:
        return figures.comparison_page(comparison, shown, records=records, tables_of=tables_of)

    return Answer(parts, comparison, page)


def parts_of_runs(shown: Sequence[RunView], reference: RunRecord | None, outputs: Outputs) -> Iterator[Part]:
    """Yield what the ranks lacked of cores, the answer in one sentence, the table, and what its times are; verbose also
    every column, the legend, and what was measured, emulated or simulated.
    """
    lacking_cores = core_words(shown)
    if lacking_cores:
        yield Line(lacking_cores, mood="bad")
    sentence = conclusion(shown)
    if sentence:
        yield Line(sentence, mood="bold")
    yield board(shown)
    if shown and all(run.matches for run in shown):
        yield Line("Losses agree with the unsharded twin's.")
    if not outputs.quiet:
        yield from _clocks(shown, measured=not lacking_cores)
    if outputs.verbose:
        yield from _explained(shown, reference)
    for run in shown:
        # None where there is no reference to compare with
        if run.matches is False:
            yield Line(f"{run.label}: its losses differ from the reference's beyond rounding", mood="bad")


def board(shown: Sequence[RunView]) -> Table:
    """Tabulate the comparison in six columns, which fit a terminal; a line below says whether the losses agree."""
    return _table(shown, [name for name in brief(shown)[1:] if name != "losses"])


def _table(shown: Sequence[RunView], columns: Sequence[str]) -> Table:
    rows = [(run.label, *cells(run, columns)) for run in shown]
    names = ("run", *columns)
    flush_left = [name for name in names if not column(name).flush_right]
    folds = [name for name in names if name in ("run", "peak") or column(name).wraps]
    if len(names) > _MOST_WHOLE:
        # too wide for a terminal: every column may take several lines
        folds = [*names]
    return Table(names, rows, flush_left, folds, ruled=True)


def _clocks(shown: Sequence[RunView], measured: bool) -> Iterator[Line]:
    """Yield what the simulated times are, and how far the measured ones differ."""
    clock = clock_words(shown)
    if clock:
        yield Line(clock)
    # runs that ended before their timed steps have no step time
    timed = [run for run in shown if run.step_median and run.engine != "twin"]
    if len(timed) > 1 and measured:
        cores = ""
        shares = [run.summary.cpu_share for run in timed if run.summary.cpu_share is not None]
        # where ranks were short of cores, `step_words` says so itself
        if shares and not core_words(timed):
            cores = f"; ranks had a core for at least {percent(min(shares))} of their step"
        yield Line(f"Measured: {step_words(timed)}{cores}.")
        yield from map(Line, step_sources(shown))


def _explained(shown: Sequence[RunView], reference: RunRecord | None) -> Iterator[Part]:
    """Yield every column, as two tables (memory, and all else), what they mean, and where the numbers are from."""
    memory = ("peak", SPLIT, "predicted")
    apart = (*memory, "strategy", "engine")  # the label of a run names its strategy and engine
    yield _table(shown, [name for name in EVERY_COLUMN if name not in apart])
    yield _table(shown, memory)
    yield Line(legend(EVERY_COLUMN), mood="dim")
    for word, what in provenance(list(shown)):
        yield Line(what, word)
    if reference is not None:
        steps = plural(len(reference.summary.losses), "step")
        yield Line(f"of {steps}, beside the unsharded twin, one process that replays every rank's batches", "losses")


def _notes(records: Sequence[RunRecord]) -> Iterator[Line]:
    """Yield the notes on a user's own model, once for all runs; then those on each recorded job and on its traces."""
    of_models: dict[str, None] = {}
    for record in records:
        workload = record.environment.get("workload") or {}
        # all runs of a model note the same: each sentence once
        of_models |= dict.fromkeys(str(note) for note in workload.get("notes", ()))
    for note in of_models:
        yield Line(note, "model")
    for record in records:
        for note in record.summary.notes:
            yield Line(note, "note")
        if record.summary.traces:
            for note in record.summary.traces.notes:
                yield Line(note, "note")


def _findings(records: Sequence[RunRecord], verbose: bool) -> Iterator[Line]:
    """Yield three findings on several runs, first those against which a change gains most; verbose, or for a single
    run, at most five a run.
    """
    if len(records) == 1 or verbose:
        yield from _all_findings(records)
        return
    for number, advice in enumerate(costliest(records), start=1):
        yield Line(f"{number}. {advice.label}: {advice.finding.title}.")
        yield Line(f"   -> {advice.remedy}", mood="dim")


def _all_findings(records: Sequence[RunRecord]) -> Iterator[Line]:
    costs = {run.label: profiling_cost(record) for run, record in zip(views(records), records)}
    for label, findings in findings_by_run(records):
        memory = ", and what fills its memory" if any(finding.of == "memory" for finding in findings) else ""
        yield Line(f"\n{label}: what a step lost time to{memory}", mood="bold")
        cost = costs.get(label)
        if cost:
            yield Line(f"  {cost}")
        for number, finding in enumerate(findings, start=1):
            yield Line(f"  {number}. {finding.title}. {finding.text}")
            yield Line(f"     -> {finding.remedy}", mood="dim")
        if not findings:
            yield Line("  nothing stands out in the profiled steps")


def _output_of_ranks(records: Sequence[RunRecord]) -> Iterator[Line]:
    """Yield the output of the ranks, each line with its run and rank."""
    for record in records:
        for path in sorted((record.path / "ranks").glob("rank*.*")):
            printed = path.read_text(encoding="utf-8", errors="replace")
            for line in printed.splitlines():
                yield Line(f"{view(record).label}, {path.stem}: {line}")


def recorded_in(folder: Path) -> Line:
    """Say where a record is, and how to show it again."""
    return Line(f"recorded in {folder}; show it again with: fsdplab report {folder}")


def end_if_failed(records: Sequence[RunRecord]) -> None:
    """Raise a RunError with the reports of the runs that failed; do nothing where none did."""
    reports = []
    for record in records:
        if record.status == "failed":
            failure = record.failure or {}
            texts = [failure.get("message"), failure.get("traceback")]
            report = "\n".join(text for text in texts if text)
            reports.append(f"{view(record).label}: {report}")
    if reports:
        raise RunError("\n\n".join(reports))
