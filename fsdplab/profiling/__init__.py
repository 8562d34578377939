"""Profiling: measured memory and time of one step; overlap, skew and exports from traces of any engine.

The names below load when they are first used: reading traces needs no torch, which takes two seconds to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdplab.common.lazy import names_of

if TYPE_CHECKING:
    from fsdplab.profiling.exports import export_csv as export_csv
    from fsdplab.profiling.exports import export_perfetto as export_perfetto
    from fsdplab.profiling.exports import export_snapshots as export_snapshots
    from fsdplab.profiling.exports import export_tensorboard as export_tensorboard
    from fsdplab.profiling.memory.recorder import MemoryRecorder as MemoryRecorder
    from fsdplab.profiling.memory.recorder import TagLog as TagLog
    from fsdplab.profiling.memory.timeline import AccountingError as AccountingError
    from fsdplab.profiling.memory.timeline import MemoryTimeline as MemoryTimeline
    from fsdplab.profiling.traces.chrome import TraceError as TraceError
    from fsdplab.profiling.traces.merge import merge_traces as merge_traces
    from fsdplab.profiling.traces.overlap import StepAnalysis as StepAnalysis
    from fsdplab.profiling.traces.overlap import TraceAnalysis as TraceAnalysis
    from fsdplab.profiling.traces.overlap import analyse_trace as analyse_trace
    from fsdplab.profiling.traces.skew import with_peers as with_peers

_MODULES = {
    "exports": ("export_csv", "export_perfetto", "export_snapshots", "export_tensorboard"),
    "memory.recorder": ("MemoryRecorder", "TagLog"),
    "memory.timeline": ("AccountingError", "MemoryTimeline"),
    "traces.chrome": ("TraceError",),
    "traces.merge": ("merge_traces",),
    "traces.overlap": ("StepAnalysis", "TraceAnalysis", "analyse_trace"),
    "traces.skew": ("with_peers",),
}
_SOURCES = {name: f"fsdplab.profiling.{module}" for module, names in _MODULES.items() for name in names}

__all__ = [*_SOURCES]

__getattr__, __dir__ = names_of(__name__, _SOURCES)
