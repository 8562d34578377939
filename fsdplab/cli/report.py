"""`fsdplab report`: loads recorded runs and traces of PyTorch's profiler, shows them, and exports them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fsdplab.cli import answer
from fsdplab.cli.answer import Line, Part
from fsdplab.cli.exports import exported
from fsdplab.cli.outputs import Detail, Outputs
from fsdplab.cli.render import show
from fsdplab.cli.runs import answer_of_runs, end_if_failed
from fsdplab.common.words import harmless
from fsdplab.figures.trace_tables import cells, left_out
from fsdplab.figures.view import views
from fsdplab.profiling.tables import Table, tables_of_pair, tables_of_record
from fsdplab.profiling.traces.import_traces import TraceOptions, load_all
from fsdplab.records import RunRecord


def report_records(
    paths: Sequence[Path], outputs: Outputs, options: TraceOptions | None = None, tables: bool = False
) -> None:
    """Load recorded runs, show them, and write the requested files. A finished record of the twin is the reference.

    Raises RunError with the reports of the runs that failed.
    """
    from fsdplab.recording.assemble import has_parts, open_record

    progress = None if outputs.detail is Detail.QUIET else _print_progress
    parts = [path for path in paths if has_parts(path)]  # a recorded job whose command is gone
    whole = [path for path in paths if path not in parts]
    loaded = load_all(whole, options or TraceOptions(), progress) + [open_record(path) for path in parts]
    twins = [record for record in loaded if record.spec.get("engine") == "twin"]
    records = [record for record in loaded if record not in twins] or loaded
    reference = next((twin for twin in twins if twin.status == "finished"), None)
    made = _tables_of(records) if tables else {}
    shown = [*_shown_tables(records, made)] if tables else []
    tables_of = (lambda record: made[id(record)]) if tables else None
    outputs.give(answer_of_runs(records, reference, outputs.detail, shown, tables_of))
    show(outputs.console(), exported(outputs, records))
    end_if_failed(loaded)


def _tables_of(records: Sequence[RunRecord]) -> dict[int, list[Table]]:
    """The tables of every record's traces, by the record's id: they take long to make, and the page shows them too."""
    from fsdplab.sessions.device_peak import peak_of

    return {id(record): tables_of_record(record, peak_of(record)) for record in records}


def _shown_tables(records: Sequence[RunRecord], made: Mapping[int, Sequence[Table]]) -> Iterator[Part]:
    """The tables of each record, then those of each other record beside the first."""
    labels = [shown.label for shown in views(records)]
    for label, record in zip(labels, records):
        yield from _shown(label, made[id(record)])
    for label, record in zip(labels[1:], records[1:]):
        yield from _shown(f"{label} beside {labels[0]}", tables_of_pair(records[0], record))


def _shown(name: str, tables: Sequence[Table]) -> Iterator[Part]:
    for table in tables:
        yield Line(f"\n{name}: {table.title}", mood="bold")
        yield Line(table.sentence)
        if table.rows:
            headings = [column.heading for column in table.columns]
            words = [column.heading for column in table.columns if not column.unit]
            yield answer.Table(headings, cells(table), words, folds=headings)
        for note in filter(None, (left_out(table), *table.notes)):
            yield Line(note, mood="dim")


def _print_progress(done: int, of: int, path: Path) -> None:
    if of > 1:
        print(f"read {harmless(path.name)}: {done} of {of} traces", file=sys.stderr, flush=True)
