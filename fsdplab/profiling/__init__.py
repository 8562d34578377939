"""Profiling: what one step did with memory, measured and split by category."""

from .memory import MemoryRecorder, TagLog
from .timeline import AccountingError, MemoryTimeline

__all__ = ["AccountingError", "MemoryRecorder", "MemoryTimeline", "TagLog"]
