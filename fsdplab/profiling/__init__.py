"""Profiling: measured memory and time of one step; overlap, skew and exports from traces of any engine."""

from fsdplab.profiling.exports import export_csv, export_perfetto, export_snapshots, export_tensorboard
from fsdplab.profiling.memory.recorder import MemoryRecorder, TagLog
from fsdplab.profiling.memory.timeline import AccountingError, MemoryTimeline
from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.profiling.traces.merge import merge_traces
from fsdplab.profiling.traces.overlap import StepAnalysis, TraceAnalysis, analyse_trace
from fsdplab.profiling.traces.skew import CollectiveSkew, collective_skews, compute_inflation, straggling, with_peers

__all__ = [
    "AccountingError",
    "CollectiveSkew",
    "MemoryRecorder",
    "MemoryTimeline",
    "StepAnalysis",
    "TagLog",
    "TraceAnalysis",
    "TraceError",
    "analyse_trace",
    "collective_skews",
    "compute_inflation",
    "export_csv",
    "export_perfetto",
    "export_snapshots",
    "export_tensorboard",
    "merge_traces",
    "straggling",
    "with_peers",
]
