"""Loads recorded runs and traces of PyTorch's profiler (`fsdplab report`), shows them, and exports them to other tools:
TensorBoard, Perfetto, CSV files and PyTorch's memory viewer.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdplab.cli import answer as shown
from fsdplab.cli.answer import Line, Part
from fsdplab.cli.errors import refuse
from fsdplab.cli.outputs import Outputs
from fsdplab.cli.runs import answer_of_runs, end_if_failed
from fsdplab.common.words import harmless
from fsdplab.figures.trace_tables import cells, left_out
from fsdplab.figures.view import view, views
from fsdplab.profiling import exports
from fsdplab.profiling.memory.snapshot_file import is_snapshot
from fsdplab.profiling.tables import Table, tables_of_pair, tables_of_record
from fsdplab.profiling.traces.import_traces import TraceOptions, load_all
from fsdplab.records import RunRecord


def report_records(
    records: Sequence[Path], tables: bool, ranks: list[int] | None, comm_pattern: list[str] | None, outputs: Outputs
) -> None:
    """Load recorded runs, show them, and write the requested files. A finished record of the twin is the reference.

    Raises RunError with the reports of the runs that failed.
    """
    from fsdplab.recording.assemble import has_parts, open_record
    from fsdplab.sessions.device_peak import peak_of

    snapshots = [path for path in records if is_snapshot(path)]
    if snapshots:
        _report_snapshots(snapshots, records, outputs)
        return
    parts = [path for path in records if has_parts(path)]  # a recorded job whose command is gone
    whole = [path for path in records if path not in parts]
    options = TraceOptions(ranks, comm_pattern or [])
    on_file = None if outputs.quiet else _print_progress
    loaded = load_all(whole, options, on_file)
    loaded += [open_record(path) for path in parts]
    twins = [record for record in loaded if record.spec.get("engine") == "twin"]
    # a record of the twin alone is shown as a run
    runs = [record for record in loaded if record not in twins] or loaded
    reference = next((twin for twin in twins if twin.status == "finished"), None)
    if tables:
        # they take long to make, and the page shows them too
        made = {id(record): tables_of_record(record, peak_of(record)) for record in runs}
        by_label = dict(_of_traces(runs, [*made.values()]))
        more: list[Part] = []
        for name, of_run in by_label.items():
            more += _shown(name, of_run)
        answer = answer_of_runs(runs, reference, outputs, more, tables_of=lambda record: made[id(record)])
        answer = replace(answer, data={**answer.data, "tables": _plain(by_label)})
    else:
        answer = answer_of_runs(runs, reference, outputs)
    outputs.give(answer)
    outputs.show(exported(outputs, runs))
    end_if_failed(loaded)


def _report_snapshots(snapshots: Sequence[Path], given: Sequence[Path], outputs: Outputs) -> None:
    """Show memory snapshots, which stand in no table beside runs."""
    from fsdplab.cli.snapshots import answer_of_snapshots

    others = [path for path in given if path not in snapshots]
    if others:
        refuse(f"{snapshots[0]} is a memory snapshot, but {others[0]} is not; report them one after the other")
    outputs.give(answer_of_snapshots(snapshots))


def _of_traces(records: Sequence[RunRecord], made: Sequence[Sequence[Table]]) -> Iterator[tuple[str, Sequence[Table]]]:
    """Yield the tables of each record's traces by its label, then those of each other record beside the first."""
    labels = [run.label for run in views(records)]
    yield from zip(labels, made)
    # each record beside the first one: what has become slower or faster
    for label, record in zip(labels[1:], records[1:]):
        yield f"{label} beside {labels[0]}", tables_of_pair(records[0], record)


def _shown(name: str, tables: Sequence[Table]) -> Iterator[Part]:
    for table in tables:
        yield Line(f"\n{name}: {table.title}", mood="bold")
        yield Line(table.sentence)
        if table.rows:
            headings = [column.heading for column in table.columns]
            # what has a unit is a number, and flush right
            words = [column.heading for column in table.columns if not column.unit]
            yield shown.Table(headings, cells(table), words, folds=headings)
        for note in filter(None, (left_out(table), *table.notes)):
            yield Line(note, mood="dim")


def _plain(tables_of: Mapping[str, Sequence[Table]]) -> dict[str, Any]:
    """All rows of the tables as JSON: `{"run": {"operators": {"sentence": ..., "rows": [...], "notes": [...]}}}`."""
    return {name: {table.name: _plain_table(table) for table in found} for name, found in tables_of.items()}


def _plain_table(table: Table) -> dict[str, Any]:
    keys = [column.key for column in table.columns]
    rows = [{key: row[key] for key in keys} for row in table.rows]
    return {"sentence": table.sentence, "rows": rows, "notes": table.notes}


def _print_progress(done: int, of: int, path: Path) -> None:
    if of > 1:
        print(f"read {harmless(path.name)}: {done} of {of} traces", file=sys.stderr, flush=True)


# ---- exports


# a target of an export, what writes it for one record, and how it is opened
_EXPORTS = (
    (
        "tensorboard",
        exports.export_tensorboard,
        "TensorBoard: tensorboard --logdir {}   (pip install torch-tb-profiler)",
    ),
    ("perfetto", exports.export_perfetto, "Perfetto: open {} in https://ui.perfetto.dev or chrome://tracing"),
    ("csv", exports.export_csv, "tables: {}"),
    ("snapshot", exports.export_snapshots, "memory snapshots: {}, to open in https://pytorch.org/memory_viz"),
)
_ODD = re.compile(r"[^\w.]+")  # in the name of a folder; a record may have any text for its strategy
_LONGEST_NAME = 80


def exported(outputs: Outputs, records: Sequence[RunRecord]) -> Iterator[Line]:
    """Write the exports that were asked for and yield how to open each; a record without a trace is an error.

    One record is written into the target itself, each of several into a subfolder named after its run.
    """
    for name, export, opened in _EXPORTS:
        target = getattr(outputs, name)
        if target is None:
            continue
        if name == "perfetto" and len(records) > 1:
            refuse(f"--perfetto writes one trace, but {len(records)} records were given; give one at a time")
        if name != "perfetto":
            target.mkdir(parents=True, exist_ok=True)
        for number, record in enumerate(records):
            folder = target
            if len(records) > 1:
                run = _ODD.sub("-", view(record).label)[:_LONGEST_NAME]
                # numbered, since two runs may have the same label
                folder = target / f"{number}-{run}"
            export(record, folder)
        yield Line(opened.format(target))
