"""What the machine says of itself: its processor and cores, its memory, and what its commands print."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path


@cache
def cpu_model() -> str:
    """Name the processor as its system does."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.startswith("model name"):
                return value.strip()
        return platform.machine()
    if sys.platform == "darwin":
        return output_of("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return platform.processor() or platform.machine()


def why_no_ranks() -> str | None:
    """Say why this system runs no ranks, in one line with the remedy; None where it does."""
    if sys.platform == "win32":
        return "ranks do not run on Windows itself; run fsdplab in WSL 2 (wsl --install), which is a Linux"
    return None


def cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def busy_processes_per_core() -> float:
    """Count the processes that share a core, over the last minute, at least 1; 1 where the system does not count."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1.0, load / cores())


def memory_bytes() -> int:
    """Return all memory of the machine; 0 where the system does not say."""
    if not hasattr(os, "sysconf"):
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def output_of(*command: str) -> str:
    """Return the output of a command; empty when it fails, cannot be run here, or is not installed."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):  # a folder of PATH that none may enter is "Permission denied"
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that new processes can use without swapping; None where the system does not say.

    They are what the kernel calls available, and no more than the control groups of this process allow.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "MemAvailable" not in fields:
        return None
    available = 1024 * int(fields["MemAvailable"].split()[0])  # of kB
    return max(0, min([available, *_left_in_groups(root)]))


# by version: the mount, in a group's folder its limit and what it uses, and the prefix of its sums over groups below
_GROUPS = {
    2: ("sys/fs/cgroup", "memory.max", "memory.current", ""),
    1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
# copies of files, which the kernel drops where memory is asked for: MemAvailable counts both kinds as well
_CACHED_FILES = ("inactive_file", "active_file")


def _left_in_groups(root: Path) -> list[int]:
    """What each control group of this process that has a limit still allows; groups of groups count too."""
    left = []
    for version, own in _own_groups(root):
        mount, limit_file, used_file, prefix = _GROUPS[version]
        for group in (own, *own.parents):
            folder = root / mount / group
            try:
                limit = (folder / limit_file).read_text().strip()
                used = int((folder / used_file).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except OSError:  # a group without a limit of its own, or outside of this container
                continue
            if limit != "max":
                cached = sum(int(stat.get(prefix + name, 0)) for name in _CACHED_FILES)
                left.append(int(limit) - used + cached)
    return left


def _own_groups(root: Path) -> list[tuple[int, Path]]:
    """The version and the path of the control groups that limit this process's memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if not kinds:
            groups.append((2, Path(path.lstrip("/"))))
        elif "memory" in kinds.split(","):
            groups.append((1, Path(path.lstrip("/"))))
    return groups
