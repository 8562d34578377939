"""Profiling: what one step did with memory and with time, measured; overlap, skew and exports from the traces of any
engine.
"""

from .chrome import TraceError
from .exports import export_csv, export_perfetto, export_snapshots, export_tensorboard
from .memory import MemoryRecorder, TagLog
from .merge import merge_traces
from .overlap import StepAnalysis, TraceAnalysis, analyse_trace
from .skew import CollectiveSkew, collective_skews, compute_inflation, straggling, with_peers
from .timeline import AccountingError, MemoryTimeline

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
