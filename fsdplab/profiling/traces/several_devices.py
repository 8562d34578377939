"""Traces of processes that drive several devices: each device is shown as a rank of its own.

What one device does says nothing of another. Devices are numbered through, rank after rank; those at the same place of
their processes meet in collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fsdplab.profiling.traces.groups import ONE_OF_SEVERAL
from fsdplab.profiling.traces.overlap import TraceAnalysis
from fsdplab.profiling.traces.side_by_side import Reading, read_all
from fsdplab.records.tables import Row


def by_device(analyses: list[TraceAnalysis], comm_patterns: Sequence[str]) -> list[TraceAnalysis]:
    """One analysis a device, of processes that drive several; the analyses themselves where each drives one."""
    if all(len(analysis.devices) < 2 for analysis in analyses):
        return analyses
    # one reading a device: of 2 processes with 4 devices each, device 1 of rank 1 is shown as rank 5
    # the most devices of a process, so that no two devices get one rank
    most = max(len(analysis.devices) for analysis in analyses)
    places: list[int] = []
    readings: list[Reading] = []
    for analysis in analyses:
        for place in range(max(1, len(analysis.devices))):
            device = analysis.devices[place] if analysis.devices else None
            rank = analysis.rank * most + place
            options: dict[str, Any] = {"comm_patterns": comm_patterns, "rank": rank, "device": device}
            places.append(place)
            readings.append((analysis.path, options))
    # how many ranks there are then; None for one process alone, whose devices are all that there is
    job = analyses[0].world_size
    has_peers = len(analyses) > 1 or (job or 1) > 1
    ranks = most * job if job is not None and has_peers else None
    note = "one process drives several devices: each is shown as the rank of its number"
    if has_peers:
        note = f"each process drives several devices: device D of rank R is shown as rank {most} x R + D"
    shown = []
    for analysis, place in zip(read_all(readings), places):
        if has_peers:
            analysis = _at_place(analysis, place)
        if len(analysis.devices) > 1:
            analysis = replace(analysis, odd=(*analysis.odd, note))
        shown.append(replace(analysis, world_size=ranks))
    return shown


def _at_place(analysis: TraceAnalysis, place: int) -> TraceAnalysis:
    """The analysis of one device of each process: its collectives meet those of the devices at the same place."""
    steps = []
    for step in analysis.steps:
        collectives = tuple(_row_at_place(row, place) for row in step.collectives)
        steps.append(replace(step, collectives=collectives))
    return replace(analysis, steps=tuple(steps))


def _row_at_place(row: Row, place: int) -> Row:
    """A row of `collectives` with the device's place in the name and the identity of its process group."""
    device = f"device {place}"
    members = row["members"]
    if members and members != ONE_OF_SEVERAL:
        # `0,1 #7` becomes `0,1 #7 device 2`: the same number on another device is another group
        has_number = " #" in members
        members = f"{members} {device}" if has_number else f"{members} #{device}"
    return {**row, "group": f"{row['group']} {device}".strip(), "members": members}
