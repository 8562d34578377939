"""The `memory` table of a simulated step: the closed form's bytes at the instants that the simulation gives them.

memory.py knows what is alive at the moments at which a peak can lie, and that bytes change hands in equal parts between
them, unit by unit. Here each moment gets its time, in the last micro-batch, and each block's end an equal part of the
way to the next moment. So the largest row is the plan's peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsdplab.common.names import CATEGORIES
from fsdplab.planning.memory import Memory

from .accounting import nanoseconds
from .program import RankLog
from .work import ROOT

Row = dict[str, Any]
Point = tuple[float, dict[str, float]]  # seconds, bytes by category


def memory_rows(memory: Memory, log: RankLog) -> list[Row]:
    """Rows in the order of time, without rank and step; the first of the largest is the peak."""
    points = sorted(_points(memory, log), key=lambda point: point[0])
    peak = max(range(len(points)), key=lambda index: sum(points[index][1].values()))
    return [
        {"time_ns": nanoseconds(time), **{name: round(split[name]) for name in CATEGORIES}, "is_peak": index == peak}
        for index, (time, split) in enumerate(points)
    ]


def _points(memory: Memory, log: RankLog) -> Iterator[Point]:
    forward, backward, head, optimizer = _ends(log)
    at = {moment.name: moment.by_category for moment in memory.moments}
    yield 0.0, at["between steps"]
    for number, end in enumerate(forward, 1):
        yield end, _between(at["between steps"], at["end of the forward"], number / len(forward))
    yield head[0], at["loss"]
    yield head[1], at["backward of the head"]
    last = max(1, len(backward) - 1)
    for kind in ("backward", "reduction"):
        for number, end in enumerate(backward):
            yield end, _between(at[f"{kind} of the last block"], at[f"{kind} of the first block"], number / last)
    yield optimizer, at["reduction of the root"]
    yield log.end, at["optimizer step"]
    yield log.end, at["between steps"]


def _ends(log: RankLog) -> tuple[list[float], list[float], tuple[float, float], float]:
    """Of the last micro-batch: when each block's forward and backward ended, the head's two ends, and when the
    optimizer began.
    """
    blocks = {
        phase: {span.unit: span.end for span in log.computed if span.phase == phase}
        for phase in ("forward", "backward")
    }
    heads = {phase: ends.pop(ROOT) for phase, ends in blocks.items()}
    optimizer = next(span.start for span in log.computed if span.phase == "optimizer")
    forward, backward = (sorted(blocks[phase].values()) for phase in ("forward", "backward"))
    return forward, backward, (heads["forward"], heads["backward"]), optimizer


def _between(first: dict[str, float], last: dict[str, float], part: float) -> dict[str, float]:
    return {name: first[name] + part * (last[name] - first[name]) for name in CATEGORIES}
