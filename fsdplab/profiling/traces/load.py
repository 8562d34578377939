"""Loads recorded runs and traces of PyTorch's profiler, as their files and folders tell what they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdplab.records import RunRecord

Progress = Callable[[int, int, Path], None]


@dataclass(frozen=True)
class TraceOptions:
    """What trace files may lack: their ranks, in the order of the files, and the names of kernels that communicate."""

    ranks: Sequence[int] | None = None
    comm_patterns: Sequence[str] = ()


def load_all(paths: Sequence[Path], options: TraceOptions, progress: Progress | None = None) -> list[RunRecord]:
    """The records at these places: folders are records, or hold records, or one run's traces; files are traces, all of
    one run. Raises RecordError, or TraceError, which name the file.
    """
    from fsdplab.profiling.traces.import_traces import (
        record_of_traces,  # it takes its time, and records need none
        traces_in,
    )

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
