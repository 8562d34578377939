"""A record in the formats of other tools: a TensorBoard log folder, a merged trace for Perfetto, snapshots for the
memory viewer, tables as CSV.

The record is not changed; exports are copies. What lies in a target already and is no export is never replaced: the
export is refused before it writes anything. A record may come from anybody, so the files of its traces are looked for
in its own folder, and no text of a CSV file is a formula for a spreadsheet. torch-tb-profiler finds a run by the names
of its files: `<worker>.<time>.pt.trace.json.gz` in one folder a run, the same time for all workers, so that it shows
them as one distributed step.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from fsdplab.common.words import harmless
from fsdplab.profiling.traces.chrome import ChromeTrace, as_trace_error, is_gzipped, nanoseconds
from fsdplab.profiling.traces.import_traces import TracedRecord
from fsdplab.records import TABLES, RecordError, RunRecord
from fsdplab.records.record import ORIGINS
from fsdplab.records.tables import Row

_HEADER = ("quantity", "origin")
_APOSTROPHE = "'"
_FORMULA = tuple("=+-@\t\n＝＋－＠")  # what a spreadsheet takes for the beginning of one, of full width too
_RANK = re.compile(r"^rank(\d+)\.pt\.trace\.json(\.gz)?$")


def traces_of(record: RunRecord) -> dict[int, Path]:
    """rank -> trace file of a profiled record, or of one made from traces; RecordError where it has none."""
    if record.summary.traces and record.summary.traces.files:
        # only what was read a moment ago may lie anywhere: the paths in a run.json are somebody else's
        anywhere = isinstance(record, TracedRecord)
        traces = {}
        for rank, path in sorted(record.summary.traces.files.items()):
            traces[rank] = Path(path) if anywhere else record.path / Path(path).name
        return traces
    kept = {}
    for file in sorted((record.path / "traces").glob("rank*.pt.trace.json*")):
        name = _RANK.match(file.name)
        if name:
            kept[int(name.group(1))] = file
    if not kept:
        why = "its traces were not kept with it" if record.table("breakdown") else "the run was not profiled"
        raise RecordError(f"{record.path} holds no traces: {why}. Record it again: fsdplab run --profile 3 ...")
    return kept


def export_tensorboard(record: RunRecord, folder: str | Path) -> Path:
    """Write a log folder for `tensorboard --logdir FOLDER` (with torch-tb-profiler installed); returns the run's folder
    in it.

    A record `full_shard-lab-2-ranks` of two ranks gives `FOLDER/full_shard-lab-2-ranks/rank0.<time>.pt.trace.json.gz`
    and `rank1...`.
    """
    traces = traces_of(record)
    run = Path(folder) / record.path.name
    run.mkdir(parents=True, exist_ok=True)
    _refuse_foreign(run / "provenance.txt", _are_marks)
    # the plugin shows the files of one time, in milliseconds, together
    taken = int(min(file.stat().st_mtime for file in traces.values()) * 1000)
    for rank, file in traces.items():
        ending = ".pt.trace.json.gz" if is_gzipped(file) else ".pt.trace.json"
        shutil.copyfile(file, run / f"rank{rank}.{taken}{ending}")
    marks = ""
    for quantity, origin in record.provenance.items():
        marks += f"{quantity}: {origin}\n"
    (run / "provenance.txt").write_text(marks, encoding="utf-8")
    return run


def export_perfetto(record: RunRecord, file: str | Path) -> Path:
    """Write all ranks into one trace for ui.perfetto.dev or chrome://tracing: a process a rank, named `rank k`, on one
    clock; an emulated link's passages are in processes of their own.
    """
    _refuse_foreign(Path(file), lambda text: '"mergedRanks"' in text)
    # only traces that were just read tell how far their clocks are ahead
    analyses = record.analyses if isinstance(record, TracedRecord) else ()
    ahead = {analysis.rank: analysis.clock.ahead_ns for analysis in analyses}
    return merge_traces(
        traces_of(record), file, ledger=record.table("ledger"), provenance=record.provenance, ahead_ns=ahead
    )


def export_snapshots(record: RunRecord, folder: str | Path) -> list[Path]:
    """Write each rank's CUDA memory snapshot as `rank<N>.pickle`, which pytorch.org/memory_viz opens; RecordError where
    the record has none.
    """
    snapshots = sorted((record.path / "snapshots").glob("rank*.snapshot.pickle.gz"))
    if not snapshots:
        raise RecordError(
            f"{record.path} holds no memory snapshots: they are made on CUDA only. Record it on a machine with GPUs:"
            " fsdplab run --profile 3 ..."
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    targets = {file: folder / file.name.replace(".snapshot.pickle.gz", ".pickle") for file in snapshots}
    for file, target in targets.items():  # the format tells nothing of who wrote it
        if target.exists() and target.read_bytes() != gzip.decompress(file.read_bytes()):
            raise RecordError(f"{target} exists and is another snapshot, so it is not replaced; give another folder.")
    for file, target in targets.items():
        with gzip.open(file, "rb") as packed, target.open("wb") as plain:
            shutil.copyfileobj(packed, plain)
    return list(targets.values())


def export_csv(record: RunRecord, folder: str | Path) -> list[Path]:
    """Write every table of the record that has rows as plain `<table>.csv`, columns as in the record, and
    `provenance.csv`, which says what was measured; returns the files.

    Texts have no control characters. One that a spreadsheet would run as a formula has an apostrophe before it, and so
    has one that begins with an apostrophe: the unit `=cmd()` is written `'=cmd()`. `cell.removeprefix("'")` gives back
    every text. Numbers are written as they are.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_foreign(folder / "provenance.csv", lambda text: text.startswith(",".join(_HEADER)))
    files: dict[Path, tuple[Sequence[str], Sequence[Row]]] = {}  # with their columns and rows
    for name, columns in TABLES.items():
        rows = record.table(name)
        if rows:
            files[folder / f"{name}.csv"] = (tuple(columns), rows)
    marks = [dict(zip(_HEADER, mark)) for mark in record.provenance.items()]
    files[folder / "provenance.csv"] = (_HEADER, marks)
    for file, (header, _) in files.items():  # before any file is replaced
        _refuse_foreign(file, partial(_is_header, header))
    for file, (header, of_table) in files.items():
        _write_csv(file, header, of_table)
    return list(files)


def _write_csv(file: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Write those of the columns that the rows have."""
    # records of earlier versions lack columns
    known = [name for name in columns if not rows or name in rows[0]]
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, known, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)


def _cell(value: object) -> object:
    """A value as a cell of a CSV file: a text that a spreadsheet would run has an apostrophe before it.

    >>> _cell("=1+1"), _cell("blocks.0"), _cell(-3)
    ("'=1+1", 'blocks.0', -3)
    """
    if not isinstance(value, str):
        return value
    text = harmless(value)
    # also one that begins with an apostrophe, so that what was put before a text can be told from it
    is_formula = text.lstrip().startswith(_FORMULA)
    if is_formula or text.startswith((_APOSTROPHE, *_FORMULA)):
        return f"{_APOSTROPHE}{text}"
    return text


def _refuse_foreign(file: Path, is_own: Callable[[str], bool]) -> None:
    """RecordError for a file in the target that no export wrote, by its beginning."""
    if not file.exists():
        return
    try:
        with gzip.open(file) if is_gzipped(file) else file.open("rb") as there:
            # an export has its mark at the beginning
            own = is_own(there.read(4096).decode(errors="replace"))
    except (OSError, EOFError, zlib.error):
        own = False
    if not own:
        raise RecordError(f"{file} exists and is no export of fsdplab, so it is not replaced; give another target.")


def _is_header(columns: Iterable[str], text: str) -> bool:
    """Whether a CSV file begins with the header of a table, as this or an earlier version wrote it."""
    header, _, _ = text.partition("\n")
    return set(header.strip().split(",")) <= set(columns)


def _are_marks(text: str) -> bool:
    """Whether each line of a text says where a quantity is from, as in `provenance.txt`."""
    return all(line.rpartition(": ")[2] in ORIGINS for line in text.splitlines())


# ---- all ranks in one trace, on one clock, each rank a process of its own
#
# Two ranks' files cannot simply be joined: they use the same ids for different things, and each counts time from a base
# of its own. Here every process and flow gets a number that no other rank has, processes are named `rank k`, and times
# count from the first event of all. Events stream through, so the size of the files does not matter.


_FLOWS = ("s", "t", "f")
_PROCESSES = 1000  # a rank's processes: the host's, one a GPU, the profiler's own


def merge_traces(
    traces: Mapping[int, str | Path],
    file: str | Path,
    *,
    ledger: Sequence[dict[str, Any]] = (),
    provenance: Mapping[str, str] | None = None,
    ahead_ns: Mapping[int, int] | None = None,
) -> Path:
    """Write the traces of several ranks (rank -> file) into one (gzipped where its name ends in .gz); return its path.

    An emulated link moves nothing that a profiler could see: its passages come from the record's `ledger`, each rank's
    as a process of its own. `provenance` (quantity -> measured, emulated, simulated) is written beside the events.
    `ahead_ns`: by how much the clocks of ranks are ahead, which is taken from their times.
    Raises TraceError for a damaged trace and ValueError for none at all. Rank 1 whose clock began 5 us after rank 0's
    shows its events 5 us later.
    """
    if not traces:
        raise ValueError(
            "merge_traces got no traces; expected rank -> file, such as {0: 'rank0.pt.trace.json.gz'}. Profile the run"
            " first."
        )
    ahead = ahead_ns or {}
    ranks: dict[int, _Clocked] = {}
    for rank, path in sorted(traces.items()):
        ranks[rank] = _clocked(path, ahead.get(rank, 0))
    # the earliest event of any rank is instant 0 of the merged trace
    origin = min(clocked.first for clocked in ranks.values())
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt") if file.suffix == ".gz" else file.open("w") as out:
        out.write(
            f'{{"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": {origin}, "mergedRanks":'
            f' {list(ranks)}, "provenance": {json.dumps(dict(provenance or {}))}, "traceEvents": [\n'
        )
        # nothing is read yet: these give one event after the other
        events = [_renamed(rank, clocked.trace, clocked.base_ns - origin) for rank, clocked in ranks.items()]
        passages = [_passages(rank, ledger, clocked, origin) for rank, clocked in ranks.items()]
        for index, event in enumerate(chain(*events, *passages)):
            if index:
                out.write(",\n")
            out.write(json.dumps(event))
        out.write("\n]}\n")
    return file


class _Clocked(NamedTuple):
    """A trace, the base of its clock, and its earliest event and the last end, in absolute ns."""

    trace: ChromeTrace
    base_ns: int  # what its times count from
    first: int
    last: int


def _clocked(path: str | Path, ahead_ns: int) -> _Clocked:
    """Read through a trace for its first and last instant; its clock is `ahead_ns` ahead."""
    trace = ChromeTrace(path)
    first: int | None = None
    last = 0
    with as_trace_error(trace.path):
        for event in trace:
            if event.get("ph") == "X":
                start = nanoseconds(event["ts"])
                first = start if first is None else min(first, start)
                last = max(last, start + nanoseconds(event.get("dur", 0)))
    base = trace.base_ns - ahead_ns
    return _Clocked(trace, base, base + (first or 0), base + last)


def _passages(rank: int, ledger: Sequence[dict[str, Any]], clocked: _Clocked, origin: int) -> Iterator[dict[str, Any]]:
    """What the emulated link carried for this rank while it was profiled."""
    carried = []
    for row in ledger:
        is_of_rank = row["rank"] == rank and row["emulated"]
        if is_of_rank and row["end_ns"] > clocked.first and row["start_ns"] < clocked.last:
            carried.append(row)
    process = _PROCESSES * rank + _PROCESSES - 1  # the last number of the rank's, which no process of its trace has
    if carried:
        yield from _names(rank, "the emulated link", process)
    for row in carried:
        yield {
            "ph": "X",
            "cat": "emulated",
            "name": f"{row['kind']} ({row['unit']}), emulated",
            "pid": process,
            "tid": row["kind"],
            "ts": (row["start_ns"] - origin) / 1000,
            "dur": (row["end_ns"] - row["start_ns"]) / 1000,
            "args": {"bytes": row["logical_bytes"], "phase": row["phase"], "step": row["step"]},
        }


def _renamed(rank: int, trace: ChromeTrace, shift: int) -> Iterator[dict[str, Any]]:
    """A rank's events with processes and flows of its own numbers."""
    processes: dict[Any, int] = {}
    with as_trace_error(trace.path):
        for event in trace:
            pid = event.get("pid", "")
            if pid not in processes:
                processes[pid] = _PROCESSES * rank + len(processes)
                yield from _names(rank, pid, processes[pid])
            if event.get("name") in ("process_name", "process_sort_index"):
                continue
            event["pid"] = processes[pid]
            if "ts" in event:
                event["ts"] = (nanoseconds(event["ts"]) + shift) / 1000
            if event.get("ph") in _FLOWS and "id" in event:
                event["id"] = f"{rank}.{event['id']}"
            yield event


def _names(rank: int, old: Any, new: int) -> Iterator[dict[str, Any]]:
    """The events that name a process and give it its place in the view."""
    detail = "" if new % _PROCESSES == 0 else f" ({old})"
    yield {"ph": "M", "name": "process_name", "pid": new, "tid": 0, "args": {"name": f"rank {rank}{detail}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": new, "tid": 0, "args": {"sort_index": new}}
