"""What the machine says of itself: its processor, and what its commands print."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path


def cpu_model() -> str:
    """The processor as its system names it."""
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return named[0] if named else platform.machine()
    if sys.platform == "darwin":
        return output_of("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return platform.processor() or platform.machine()


def output_of(*command: str) -> str:
    """The output of a command; empty when it fails or is not installed."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
