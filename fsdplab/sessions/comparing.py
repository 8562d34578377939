"""`compare`: several specs one after the other, each on fresh ranks, so that no run inherits memory or caches of another.

A run that fails is a result too: its record says so, and the next run starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Sequence

from fsdplab.records import RunRecord

from .faults import RanksFailed
from .recording import run
from .spec import RunSpec, SpecError

SAME = ("model", "text", "seed", "batch_size", "sequence_length", "micro_batches", "world_size")

OnRecord = Callable[[RunRecord], None]
OnProgress = Callable[[RunSpec, int, int, float], None]


def compare(
    specs: Sequence[RunSpec],
    *,
    directory: str | Path | None = None,
    on_record: OnRecord | None = None,
    on_progress: OnProgress | None = None,
) -> list[RunRecord]:
    """Run several specs of the same model and data; `on_record(record)` is called as each ends, failed ones included.

    Records are written below `directory`, one folder each: `0-no_shard-lab`, `1-full_shard-lab`, ... `on_progress(spec, step, total, loss)`
    follows rank 0 of the run that is going on. Specs that would train different things raise SpecError before anything runs.
    """
    _check_same(specs)
    records = []
    for number, spec in enumerate(specs):
        folder = None if directory is None else Path(directory) / f"{number}-{spec.strategy}-{spec.engine}"
        records.append(_recorded(spec, folder, on_progress))
        if on_record is not None:
            on_record(records[-1])
    return records


def _recorded(spec: RunSpec, folder: Path | None, on_progress: OnProgress | None) -> RunRecord:
    follow = None if on_progress is None else lambda step, total, loss: on_progress(spec, step, total, loss)
    try:
        return run(spec, directory=folder, on_progress=follow)
    except RanksFailed as failed:
        return failed.record


def _check_same(specs: Sequence[RunSpec]) -> None:
    if not specs:
        raise SpecError("there is nothing to compare; give at least one RunSpec")
    for name in SAME:
        values = sorted({str(getattr(spec, name)) for spec in specs})
        if len(values) > 1:
            raise SpecError(f"runs to compare must train the same thing, but {name} is {' and '.join(values)}; give all of them the same {name}")
