"""Profiles the steps after the timed ones on each rank with PyTorch's profiler, into one gzipped trace a rank.

Timed steps are never profiled, so a profile costs nothing but its own steps; how much slower those were is stated in
the record. On CUDA the profiler has one step to warm up. The engine's ranges carry FSDP2's names, so whatever reads
traces of PyTorch's FSDP2 reads these.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, profile

from fsdplab.engine import events
from fsdplab.profiling import MemoryTimeline
from fsdplab.profiling.profiler import activities_on, await_gloo_threads, save_trace
from fsdplab.profiling.traces.overlap import MARK

RANGE = "ProfilerStep#"  # the profiler's own name for a step


class StepProfiler:
    """Profiles the steps after `begin`: `warmup` whose events it throws away, and `steps` whose trace `save` writes."""

    def __init__(self, steps: int, warmup: int, device: torch.device) -> None:
        self._profile = profile(
            activities=activities_on(device),
            schedule=_actions(warmup, warmup + steps),
            record_shapes=True,
            profile_memory=True,
        )
        self.seconds: list[float] = []
        self._warmup = warmup
        self._mark: dict[str, str] = {"torch": torch.__version__}

    def begin(self, link: str | None) -> None:
        """Profile from the next step on. The trace will say that `link`, if there is one, was emulated."""
        self._mark |= {"link": link} if link else {}
        self._profile.start()

    def step_done(self, seconds: float) -> None:
        """Go to the next step, after one that took `seconds`."""
        self.seconds.append(seconds)
        if len(self.seconds) == self._warmup + 1:  # the profiler takes it only while it records
            self._profile.add_metadata_json(MARK, json.dumps(self._mark))
        # gloo's threads may still write their events of this step
        await_gloo_threads()
        self._profile.step()

    def stop(self) -> None:
        """End the profile before its last step, for nothing."""
        self._profile.stop()

    def save(self, path: Path, unfinished: Path | None = None) -> list[float]:
        """Write the trace to `path` (.json.gz) as `save_trace` does, and return the seconds of its steps."""
        self._profile.stop()
        save_trace(self._profile, path, unfinished)
        return self.seconds[self._warmup :]


def _actions(kept_from: int, end: int) -> Callable[[int], ProfilerAction]:
    """Return a schedule for the profiler. (`torch.profiler.schedule` prints a warning where there is no warm-up.)"""

    def action(step: int) -> ProfilerAction:
        if step >= end:
            return ProfilerAction.NONE
        # events of warm-up steps are recorded and thrown away
        if step < kept_from:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD if step < end - 1 else ProfilerAction.RECORD_AND_SAVE

    return action


class UnitStateLog:
    """Records when units are gathered and dropped: rows of the record's `life` table, for chosen steps."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.rows: list[dict[str, Any]] = []
        self.step: int | None = None  # the step to note, None for no step

    def on_event(self, event: events.Event) -> None:
        """Handle one event of the engine."""
        if self.step is None or not isinstance(event, events.Transition):
            return
        row: dict[str, Any] = {"unit": event.unit, "state": event.after, "phase": event.phase, "time_ns": event.time_ns}
        self.rows.append({"rank": self._rank, "step": self.step, **row})


def written_memory(timeline: MemoryTimeline, rank: int, step: int) -> dict[str, Any]:
    """Return what a rank writes of its measured step: bytes, and the rows of the table `memory`."""
    where = {"rank": rank, "step": step}
    rows = [{**where, **point, "is_peak": point["time_ns"] == timeline.peak_time_ns} for point in timeline.points]
    return {
        "start_ns": timeline.start_ns,
        "rows": rows,
        "total": timeline.peak_total,
        "by_category": timeline.peak,
        "resident_growth": timeline.resident_growth,
        "workspaces": timeline.workspaces,
    }
