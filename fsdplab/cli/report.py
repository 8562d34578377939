"""`fsdplab report`: loads recorded runs and traces of PyTorch's profiler, shows them, and exports them to other tools:
TensorBoard, Perfetto, CSV files and PyTorch's memory viewer.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fsdplab.cli.answer import Line, Part
from fsdplab.cli.answer import Table as AnswerTable
from fsdplab.cli.errors import refuse
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
            yield AnswerTable(headings, cells(table), words, folds=headings)
        for note in filter(None, (left_out(table), *table.notes)):
            yield Line(note, mood="dim")


def _print_progress(done: int, of: int, path: Path) -> None:
    if of > 1:
        print(f"read {harmless(path.name)}: {done} of {of} traces", file=sys.stderr, flush=True)


# ---- exports


_ODD = re.compile(r"[^\w.]+")  # in the name of a folder; a record may have any text for its strategy
_LONGEST_NAME = 80


def exported(outputs: Outputs, records: Sequence[RunRecord]) -> Iterator[Line]:
    """Write the exports that were asked for and yield how to open each; a record without a trace is an error."""
    from fsdplab.profiling.exports import export_csv, export_perfetto, export_snapshots, export_tensorboard

    if outputs.tensorboard:
        _export(records, outputs.tensorboard, export_tensorboard)
        yield Line(f"TensorBoard: tensorboard --logdir {outputs.tensorboard}   (pip install torch-tb-profiler)")
    if outputs.perfetto:
        if len(records) > 1:
            refuse(f"--perfetto writes one trace, but {len(records)} records were given; give one at a time")
        export_perfetto(records[0], outputs.perfetto)
        yield Line(f"Perfetto: open {outputs.perfetto} in https://ui.perfetto.dev or chrome://tracing")
    if outputs.csv:
        _export(records, outputs.csv, export_csv)
        yield Line(f"tables: {outputs.csv}")
    if outputs.snapshot:
        _export(records, outputs.snapshot, export_snapshots)
        yield Line(f"memory snapshots: {outputs.snapshot}, to open in https://pytorch.org/memory_viz")


def _export(records: Sequence[RunRecord], folder: Path, export: Callable[[RunRecord, Path], object]) -> None:
    """Export one record into the folder itself, and each of several records into a subfolder named after its run."""
    from fsdplab.figures.view import view

    folder.mkdir(parents=True, exist_ok=True)
    for number, record in enumerate(records):
        name = f"{number}-{_ODD.sub('-', view(record).label)[:_LONGEST_NAME]}"
        export(record, folder if len(records) == 1 else folder / name)
