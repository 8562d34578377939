"""`compare`: several specs one after the other, each on fresh ranks, so that no run inherits memory or caches of
another.

A failed run is a result too: it is recorded, and the next run starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fsdplab.records import RunRecord, known
from fsdplab.records.summary import Link
from fsdplab.sessions.launch.failure_report import RanksFailed
from fsdplab.sessions.run_and_record import OnStep, run
from fsdplab.sessions.spec import RunSpec, SpecError

SAME = ("model", "text", "seed", "batch_size", "sequence_length", "micro_batches", "world_size")

OnRecord = Callable[[RunRecord], None]
OnProgress = Callable[[RunSpec, int, int, float], None]


def compare(
    specs: Sequence[RunSpec],
    *,
    directory: str | Path | None = None,
    on_record: OnRecord | None = None,
    on_progress: OnProgress | None = None,
    on_step: OnStep | None = None,
    on_look: Callable[[], None] | None = None,
) -> list[RunRecord]:
    """Run several specs of the same model and data; `on_record(record)` is called as each ends, failed ones included.

    Records are written below `directory`, one folder each: `0-no_shard-lab`, `1-full_shard-lab`, ... `on_progress(spec,
    step, total, loss)` and `on_step(row)` follow rank 0 of the current run; `on_look()` is called about twenty times a
    second; an exception in it ends the comparison. Specs of different work raise SpecError before anything runs.
    """
    _check_same(specs)
    specs = _on_one_network(specs, on_look)
    records = []
    folders: Sequence[Path | None] = [None] * len(specs)
    if directory is not None:
        folders = folders_of(specs, Path(directory))
    for spec, folder in zip(specs, folders, strict=True):
        records.append(_recorded(spec, folder, on_progress, on_step, on_look))
        if on_record is not None:
            on_record(records[-1])
    return records


def folders_of(specs: Sequence[RunSpec], directory: Path) -> list[Path]:
    """Where `compare` records each run: `directory/0-no_shard-lab`, ..."""
    return [directory / f"{number}-{spec.strategy}-{spec.engine}" for number, spec in enumerate(specs)]


def _on_one_network(specs: Sequence[RunSpec], on_look: Callable[[], None] | None) -> list[RunSpec]:
    """The wind tunnel's link is chosen once, by a short run of full sharding, so that all runs meet the same one."""
    open_ended = [spec for spec in specs if spec.emulate and not spec.link and spec.world_size > 1]
    if not open_ended:
        return list(specs)
    trial = replace(
        open_ended[0], steps=1, profile=0, memory=False,
        engine="lab", strategy="full_shard", card=None, shard_size=None, link_across=None, prefetch=1,
    )  # fmt: skip
    link = link_text(run(trial, on_look=on_look).summary.link)
    return [replace(spec, link=link) if spec in open_ended else spec for spec in specs]


def _recorded(
    spec: RunSpec,
    folder: Path | None,
    on_progress: OnProgress | None,
    on_step: OnStep | None,
    on_look: Callable[[], None] | None,
) -> RunRecord:
    follow = None if on_progress is None else lambda step, total, loss: on_progress(spec, step, total, loss)
    try:
        return run(spec, directory=folder, on_progress=follow, on_step=on_step, on_look=on_look)
    except RanksFailed as failed:
        assert failed.record is not None  # run() adds it
        return failed.record


def _check_same(specs: Sequence[RunSpec]) -> None:
    if not specs:
        raise SpecError("there is nothing to compare; give at least one RunSpec")
    for name in SAME:
        values = sorted({str(getattr(spec, name)) for spec in specs})
        if len(values) > 1:
            raise SpecError(
                f"runs to compare must train the same thing, but {name} is {' and '.join(values)}; give all of them the"
                f" same {name}"
            )


def link_text(link: Link | None) -> str:
    """A record's link in the form of a spec: `358.736589MB/s,4.870254us`."""
    found = known(link)
    return f"{known(found.bytes_per_s) / 1e6:.6f}MB/s,{known(found.latency_s) * 1e6:.6f}us"
