"""Answers `report` where it is given memory snapshots of PyTorch's CUDA allocator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdplab.cli.answer import Answer, Line, Part, Table
from fsdplab.figures.report.snapshot_page import (
    CATEGORY_HEADINGS,
    LINE_HEADINGS,
    category_rows,
    line_rows,
    snapshot_page,
)
from fsdplab.profiling.memory.snapshot_file import SnapshotError, read_snapshot
from fsdplab.profiling.memory.snapshot_memory import DeviceMemory, memory_of
from fsdplab.records import FORMAT

_MOST_LINES = 10
_NO_HISTORY = (
    "The snapshot holds no events, so the peak and what was alive at it are those of the end; call"
    " torch.cuda.memory._record_memory_history() before the job begins."
)


def answer_of_snapshots(paths: Sequence[Path]) -> Answer:
    """Return what fills each device of each file, the fullest first.

    Raises SnapshotError where a file cannot be read, or no file holds any memory.
    """
    devices: dict[str, DeviceMemory] = {}
    for path in paths:
        for memory in memory_of(read_snapshot(path)):
            # devices of which the process has used nothing are in the file too
            if memory.peak or memory.reserved:
                devices[f"{path.name}, device {memory.device}"] = memory
    if not devices:
        named = ", ".join(map(str, paths))
        raise SnapshotError(
            f"{named}: no device had any memory; take the snapshot in the process that allocates, while it holds it."
        )
    fullest_first = dict(sorted(devices.items(), key=_urgency))
    data = {"format": FORMAT, "snapshots": {name: _plain(memory) for name, memory in fullest_first.items()}}
    return Answer([*_parts(fullest_first)], data, lambda: snapshot_page(fullest_first, data))


def _urgency(named: tuple[str, DeviceMemory]) -> tuple[bool, int]:
    """Devices that ran out of memory come first, then those with the highest peak."""
    memory = named[1]
    # False sorts before True
    return memory.out_of_memory is None, -memory.peak


def _parts(devices: Mapping[str, DeviceMemory]) -> Iterator[Part]:
    for name, memory in devices.items():
        yield Line(memory.sentence if len(devices) == 1 else f"{name}: {memory.sentence}", mood="bold")
        yield Line(memory.fragmentation)
        yield Table(LINE_HEADINGS, line_rows(memory, _MOST_LINES), LINE_HEADINGS[:1], LINE_HEADINGS[:1])
        yield Table(CATEGORY_HEADINGS, category_rows(memory), CATEGORY_HEADINGS[:1])
        if not memory.moments:
            yield Line(_NO_HISTORY, mood="dim")


def _plain(memory: DeviceMemory) -> dict[str, Any]:
    """Return a device as JSON, without the moments: a figure shows them."""
    fields = asdict(memory)
    del fields["moments"]
    return {"sentence": memory.sentence, **fields}
