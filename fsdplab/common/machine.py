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
    """The processor as its system names it."""
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return named[0] if named else platform.machine()
    if sys.platform == "darwin":
        return output_of("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return platform.processor() or platform.machine()


def why_no_ranks() -> str | None:
    """Why this system runs no ranks, in one line with the remedy; None where it does."""
    if sys.platform == "win32":
        return "ranks do not run on Windows itself; run fsdplab in WSL 2 (wsl --install), which is a Linux"
    return None


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_processes_per_core() -> float:
    """How many processes share a core, over the last minute, at least 1; 1 where the system does not count them."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1.0, load / cores())


def memory_bytes() -> int:
    """All memory of the machine; 0 where the system does not say."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def output_of(*command: str) -> str:
    """The output of a command; empty when it fails or is not installed."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that new processes can use without swapping: what the kernel calls available, and no more than the control
    groups of this process allow. None where the system does not say.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "MemAvailable" not in fields:
        return None
    return max(0, min([1024 * int(fields["MemAvailable"].split()[0]), *_left_in_groups(root)]))


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
    named = [line.split(":", 2) for line in lines]
    return [
        (2 if not kinds else 1, Path(path.lstrip("/")))
        for _, kinds, path in named
        if not kinds or "memory" in kinds.split(",")
    ]
