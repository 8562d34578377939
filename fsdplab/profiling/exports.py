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
import re
import shutil
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from fsdplab.common.words import harmless
from fsdplab.profiling.traces.chrome import is_gzipped
from fsdplab.profiling.traces.import_traces import TracedRecord
from fsdplab.profiling.traces.merge import merge_traces
from fsdplab.records import TABLES, RecordError, RunRecord
from fsdplab.records.record import ORIGINS

_HEADER = ("quantity", "origin")
_APOSTROPHE = "'"
_FORMULA = tuple("=+-@\t\n＝＋－＠")  # what a spreadsheet takes for the beginning of one, of full width too
_RANK = re.compile(r"^rank(\d+)\.pt\.trace\.json(\.gz)?$")


def traces_of(record: RunRecord) -> dict[int, Path]:
    """rank -> trace file of a profiled record, or of one made from traces; RecordError where it has none."""
    if record.summary.traces and record.summary.traces.files:
        # only what was read a moment ago may lie anywhere: the paths in a run.json are somebody else's
        anywhere = isinstance(record, TracedRecord)
        given = sorted(record.summary.traces.files.items())
        return {rank: Path(path) if anywhere else record.path / Path(path).name for rank, path in given}
    files = sorted((record.path / "traces").glob("rank*.pt.trace.json*"))
    found = {int(name.group(1)): file for file in files if (name := _RANK.match(file.name))}
    if not found:
        why = "its traces were not kept with it" if record.table("breakdown") else "the run was not profiled"
        raise RecordError(f"{record.path} holds no traces: {why}. Record it again: fsdplab run --profile 3 ...")
    return found


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
    taken = int(min(file.stat().st_mtime for file in traces.values()) * 1000)
    for rank, file in traces.items():
        ending = ".pt.trace.json.gz" if is_gzipped(file) else ".pt.trace.json"
        shutil.copyfile(file, run / f"rank{rank}.{taken}{ending}")
    marks = (f"{quantity}: {origin}\n" for quantity, origin in record.provenance.items())
    (run / "provenance.txt").write_text("".join(marks), encoding="utf-8")
    return run


def export_perfetto(record: RunRecord, file: str | Path) -> Path:
    """Write all ranks into one trace for ui.perfetto.dev or chrome://tracing: a process a rank, named `rank k`, on one
    clock; an emulated link's passages are in processes of their own.
    """
    _refuse_foreign(Path(file), lambda text: '"mergedRanks"' in text)
    return merge_traces(traces_of(record), file, ledger=record.table("ledger"), provenance=record.provenance)


def export_snapshots(record: RunRecord, folder: str | Path) -> list[Path]:
    """Write each rank's CUDA memory snapshot as `rank<N>.pickle`, which pytorch.org/memory_viz opens; RecordError where
    the record has none.
    """
    found = sorted((record.path / "snapshots").glob("rank*.snapshot.pickle.gz"))
    if not found:
        raise RecordError(
            f"{record.path} holds no memory snapshots: they are made on CUDA only. Record it on a machine with GPUs:"
            " fsdplab run --profile 3 ..."
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    targets = {file: folder / file.name.replace(".snapshot.pickle.gz", ".pickle") for file in found}
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
    marks = [dict(zip(_HEADER, mark)) for mark in record.provenance.items()]
    tables = {name: (tuple(columns), record.table(name)) for name, columns in TABLES.items() if record.table(name)}
    files = {folder / f"{name}.csv": table for name, table in {**tables, "provenance": (_HEADER, marks)}.items()}
    for file, (columns, _) in files.items():
        _refuse_foreign(file, partial(_is_header, columns))
    for file, (columns, rows) in files.items():
        with file.open("w", newline="", encoding="utf-8") as opened:
            known = [name for name in columns if not rows or name in rows[0]]
            writer = csv.DictWriter(opened, known, lineterminator="\n")
            writer.writeheader()
            writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return list(files)


def _cell(value: object) -> object:
    """A value as a cell of a CSV file: a text that a spreadsheet would run has an apostrophe before it.

    >>> _cell("=1+1"), _cell("blocks.0"), _cell(-3)
    ("'=1+1", 'blocks.0', -3)
    """
    if not isinstance(value, str):
        return value
    text = harmless(value)
    is_run = text.lstrip().startswith(_FORMULA) or text.startswith((_APOSTROPHE, *_FORMULA))
    return f"{_APOSTROPHE}{text}" if is_run else text


def _refuse_foreign(file: Path, is_own: Callable[[str], bool]) -> None:
    """RecordError for a file in the target that no export wrote, by its beginning."""
    if not file.exists():
        return
    try:
        with gzip.open(file) if is_gzipped(file) else file.open("rb") as there:
            own = is_own(there.read(4096).decode(errors="replace"))
    except (OSError, EOFError, zlib.error):
        own = False
    if not own:
        raise RecordError(f"{file} exists and is no export of fsdplab, so it is not replaced; give another target.")


def _is_header(columns: Iterable[str], text: str) -> bool:
    """Whether a CSV file begins with the header of a table, as this or an earlier version wrote it."""
    return set(text.partition("\n")[0].strip().split(",")) <= set(columns)


def _are_marks(text: str) -> bool:
    return all(line.rpartition(": ")[2] in ORIGINS for line in text.splitlines())
