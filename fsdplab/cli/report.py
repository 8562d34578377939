"""`fsdplab report`: recorded runs and traces of PyTorch's profiler, shown and exported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from fsdplab.cli.errors import refuse
from fsdplab.cli.exports import Exports
from fsdplab.cli.outputs import Detail, Outputs, end_if_failed, print_drift, print_findings, print_output_of_ranks, show
from fsdplab.common.words import harmless
from fsdplab.figures.trace_tables import cells, left_out
from fsdplab.figures.view import views, with_verdicts
from fsdplab.profiling.tables import Table, TablesOf
from fsdplab.records import RecordError, RunRecord, comparison_json


@dataclass(frozen=True)
class TraceOptions:
    """What the files of foreign traces do not tell: their ranks, in the files' order, and kernels that communicate."""

    ranks: Sequence[int] | None = None
    comm_patterns: Sequence[str] = ()


def report_records(
    paths: Sequence[Path], outputs: Outputs, exports: Exports, options: TraceOptions | None = None, tables: bool = False
) -> None:
    """Load recorded runs, show them, write the requested files; a finished record of the twin is the reference.

    Where a run has failed it ends with its report and exit code 1, as the command did that recorded it.
    """
    outputs.check()
    exports.check()
    loaded = load_all(paths, options or TraceOptions(), outputs.detail)
    twins = [record for record in loaded if record.spec.get("engine") == "twin"]
    records = [record for record in loaded if record not in twins] or loaded
    reference = next((twin for twin in twins if twin.status == "finished"), None)
    comparison = comparison_json(records, reference)
    shown = with_verdicts(records, comparison)
    show(outputs.console(), shown, reference, outputs.detail)
    print_drift(outputs.console(), comparison)
    if outputs.detail is not Detail.QUIET:
        print_notes(outputs.console(), records)
        print_findings(outputs.console(), records, outputs.detail)
    tables_of = _print_tables(outputs.console(), records) if tables else None
    if outputs.detail is Detail.VERBOSE:
        print_output_of_ranks(outputs.console(), records)
    outputs.write(comparison, shown, records, tables_of)
    exports.write(records, outputs.console())
    end_if_failed(loaded)


def _print_tables(console: Console, records: Sequence[RunRecord]) -> TablesOf:
    """Print the tables of every record's traces, and return where they are, for a page: they take long to make."""
    from fsdplab.profiling.tables import tables_of_pair, tables_of_record
    from fsdplab.profiling.traces.chrome import TraceError
    from fsdplab.sessions.device_peak import peak_of

    labels = [shown.label for shown in views(records)]
    try:
        made = {id(record): tables_of_record(record, peak_of(record)) for record in records}
        pairs = [tables_of_pair(records[0], other) for other in records[1:]]
    except (RecordError, TraceError) as error:
        refuse(str(error))
    for name, record in zip(labels, records):
        _print_each(console, name, made[id(record)])
    for name, found in zip(labels[1:], pairs):
        _print_each(console, f"{name} beside {labels[0]}", found)
    return lambda record: made[id(record)]


def _print_each(console: Console, name: str, tables: Sequence[Table]) -> None:
    for each in tables:
        console.print(f"\n{name}: {each.title}", style="bold", highlight=False, markup=False)
        console.print(each.sentence, highlight=False, markup=False)
        if each.rows:
            console.print(_grid(each))
        for note in filter(None, (left_out(each), *each.notes)):
            console.print(note, style="dim", highlight=False, markup=False)


def _grid(shown: Table) -> Grid:
    grid = Grid(box=None, pad_edge=False, header_style="bold")
    for column in shown.columns:
        grid.add_column(column.heading, justify="right" if column.unit else "left", overflow="fold")
    for row in cells(shown):
        grid.add_row(*map(Text, row))
    return grid


def print_notes(console: Console, records: Sequence[RunRecord]) -> None:
    """What the tables of foreign traces leave out, a line each."""
    for record in records:
        for note in record.summary.traces.notes if record.summary.traces else ():
            console.print(f"note: {note}", highlight=False, markup=False)


def load_all(paths: Sequence[Path], options: TraceOptions, detail: Detail) -> list[RunRecord]:
    """Folders are records, or hold records, or one run's traces; files are traces, all of one run."""
    from fsdplab.profiling import AccountingError
    from fsdplab.profiling.traces.chrome import TraceError
    from fsdplab.profiling.traces.import_traces import record_of_traces

    try:
        paths = [own for path in map(_its_record, paths) for own in _records_below(path) or [path]]
        runs = _runs_of_traces(paths)
        loaded = [RunRecord.load(path) for path in paths if not _is_one_trace(path) and not _traces_below(path)]
        progress = None if detail is Detail.QUIET else _print_progress
        traced = [
            record_of_traces(run, ranks=options.ranks, comm_patterns=options.comm_patterns, progress=progress)
            for run in runs
        ]
        _name_apart(traced)
        return loaded + traced
    except (AccountingError, RecordError, TraceError) as error:
        refuse(str(error))


def _name_apart(traced: Sequence[RunRecord]) -> None:
    """Runs of one name, such as worker0, which every job calls its first rank, are called as their folders are."""
    names = [record.spec["strategy"] for record in traced]
    for record, name in zip(traced, names):
        if names.count(name) > 1:
            record.spec["strategy"] = record.path.resolve().name


def _its_record(path: Path) -> Path:
    """For the folder `traces` of a record that record, which knows what its traces lack; else the path itself."""
    record = path.resolve().parent
    return record if path.is_dir() and path.resolve().name == "traces" and (record / "run.json").exists() else path


def _records_below(path: Path) -> list[Path]:
    """The records in a folder that is none itself, as `compare --keep` writes them: 0-no_shard-lab, 1-zero1-lab, ..."""
    if not path.is_dir() or (path / "run.json").exists():
        return []
    found = [own.parent for own in path.glob("*/run.json")]
    return sorted(found, key=lambda own: (len(own.name.partition("-")[0]), own.name))


def _runs_of_traces(paths: Sequence[Path]) -> list[list[Path]]:
    """The traces of each run: all files are one run, each folder of traces another."""
    files = [path for path in paths if _is_one_trace(path)]
    return [run for run in [files, *map(_traces_below, paths)] if run]


def _is_one_trace(path: Path) -> bool:
    """Whether a path is to be read as a trace; what is no file at all is refused as such by its reader."""
    return path.exists() and not path.is_dir()


def _traces_below(path: Path) -> list[Path]:
    """The traces of a folder that is no record."""
    from fsdplab.profiling.traces.ranks_of_files import traces_in

    return traces_in(path) if path.is_dir() and not (path / "run.json").exists() else []


def _print_progress(done: int, of: int, path: Path) -> None:
    if of > 1:
        print(f"read {harmless(path.name)}: {done} of {of} traces", file=sys.stderr, flush=True)
