"""The growth of a process's resident memory, from the operating system, to cross-check the allocator's figure.

Both can be right and differ. Freed memory that glibc keeps is resident still: it serves blocks of up to 32 MB from
heaps, one for each thread, that fragment (an FSDP2 step on gloo: 86 MB by the allocator, 390 MB resident).
`malloc_trim` returns what it can before the measurement; a process started with `MALLOC_MMAP_THRESHOLD_=65536` maps
such blocks for themselves, and then the two agree within 5 MB (gloo's sockets, the profiler's notes), at the price of
slower steps. The other way round, memory that was allocated but never written to is not resident.
"""

from __future__ import annotations

import ctypes
import re
import sys
from contextlib import suppress
from pathlib import Path


class ResidentGrowth:
    """From construction to `stop`: highest resident bytes minus those at the beginning (Linux; None elsewhere)."""

    def __init__(self) -> None:
        self._before: int | None = None
        if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc has it, musl does not
            libc.malloc_trim(0)
        with suppress(OSError):  # no such file outside Linux, and some sandboxes forbid it
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _status_bytes("VmRSS")

    def stop(self) -> int | None:
        """Bytes by which the resident memory rose at its highest, or None where the system does not tell."""
        if self._before is None or (highest := _status_bytes("VmHWM")) is None:
            return None
        return max(0, highest - self._before)


def _status_bytes(field: str) -> int | None:
    found = re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
