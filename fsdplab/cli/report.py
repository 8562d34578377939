"""`fsdplab report`: loads recorded runs and traces of PyTorch's profiler, shows them, and exports them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdplab.cli import answer
from fsdplab.cli.answer import Line, Part
from fsdplab.cli.exports import Exports
from fsdplab.cli.outputs import Detail, Outputs
from fsdplab.cli.render import show
from fsdplab.cli.runs import answer_of_runs, end_if_failed
from fsdplab.common.words import harmless
from fsdplab.figures.trace_tables import cells, left_out
from fsdplab.figures.view import views
from fsdplab.profiling.tables import Table, tables_of_pair, tables_of_record
from fsdplab.records import RunRecord


@dataclass(frozen=True)
class TraceOptions:
    """What trace files may lack: their ranks, in the order of the files, and the names of kernels that communicate."""

    ranks: Sequence[int] | None = None
    comm_patterns: Sequence[str] = ()


def report_records(
    paths: Sequence[Path], outputs: Outputs, exports: Exports, options: TraceOptions | None = None, tables: bool = False
) -> None:
    """Load recorded runs, show them, and write the requested files. A finished record of the twin is the reference.

    Raises RunError with the reports of the runs that failed.
    """
    loaded = load_all(paths, options or TraceOptions(), outputs.detail)
    twins = [record for record in loaded if record.spec.get("engine") == "twin"]
    records = [record for record in loaded if record not in twins] or loaded
    reference = next((twin for twin in twins if twin.status == "finished"), None)
    made = _tables_of(records) if tables else {}
    shown = [*_shown_tables(records, made)] if tables else []
    tables_of = (lambda record: made[id(record)]) if tables else None
    outputs.give(answer_of_runs(records, reference, outputs.detail, shown, tables_of))
    show(outputs.console(), exports.write(records))
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


def load_all(paths: Sequence[Path], options: TraceOptions, detail: Detail) -> list[RunRecord]:
    """Folders are records, or hold records, or one run's traces; files are traces, all of one run."""
    from fsdplab.profiling.traces.import_traces import record_of_traces
    from fsdplab.profiling.traces.ranks_of_files import traces_in

    loaded: list[RunRecord] = []
    files: list[Path] = []
    folders: list[list[Path]] = []
    for path in map(_its_record, paths):
        if path.exists() and not path.is_dir():
            files.append(path)
        elif below := _records_below(path):
            loaded += map(RunRecord.load, below)
        elif path.is_dir() and not (path / "run.json").exists() and (traces := traces_in(path)):
            folders.append(traces)
        else:
            loaded.append(RunRecord.load(path))
    progress = None if detail is Detail.QUIET else _print_progress
    traced = [
        record_of_traces(run, ranks=options.ranks, comm_patterns=options.comm_patterns, progress=progress)
        for run in [*([files] if files else []), *folders]
    ]
    _name_apart(traced)
    return loaded + traced


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


def _print_progress(done: int, of: int, path: Path) -> None:
    if of > 1:
        print(f"read {harmless(path.name)}: {done} of {of} traces", file=sys.stderr, flush=True)
