"""`pytest notebooks --busy`: every core computes while cells run, a claim about time that was true only on a quiet
machine fails, and no computing process outlives the run, however it ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from fsdplab.common.processes import gone
from tests import busy

ROOT = Path(__file__).resolve().parents[1]
WAITS = """\
import pathlib, time
pathlib.Path("began").touch()
while not pathlib.Path("go on").exists():
    time.sleep(0.05)
"""
# As many processes as cores compute side by side: on a quiet machine each has a core of its own.
CLAIMS = """\
import os, subprocess, sys
code = "import time; began = time.monotonic()\\n"
code += "while time.process_time() < 0.4: pass\\nprint(0.4 / (time.monotonic() - began))"
running = [subprocess.Popen([sys.executable, "-S", "-c", code], stdout=-1) for _ in os.sched_getaffinity(0)]
shares = [float(process.communicate()[0]) for process in running]
assert sum(shares) / len(shares) > 0.8, f"each has a core of its own, but got {shares} of one"
"""


def begin(folder: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """`pytest --busy` on a notebook whose first cell waits for the file `go on`, and its computing processes."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [new_code_cell(WAITS), new_code_cell(CLAIMS)]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), folder / "small.ipynb")
    command = [sys.executable, "-m", "pytest", "-p", "tests.busy", "-p", "no:cacheprovider", "--busy", "--color=no"]
    run = subprocess.Popen(
        [*command, "-c", str(ROOT / "pyproject.toml"), str(folder / "small.ipynb")],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if not eventually(lambda: (folder / "began").exists() or run.poll() is not None) or run.poll() is not None:
        run.kill()
        pytest.fail(f"the notebook did not begin:\n{run.communicate()[0]}")
    return run, [child for child in psutil.Process(run.pid).children() if busy.SPIN in child.cmdline()]


def eventually(true: Callable[[], bool], patience_s: float = 120.0) -> bool:
    deadline = time.monotonic() + patience_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


def computing(process: psutil.Process) -> float:
    """Seconds that a process has computed."""
    return process.cpu_times().user + process.cpu_times().system


@pytest.mark.timeout(400)
def test_every_core_is_busy_while_cells_run_and_a_claim_that_needs_a_quiet_machine_fails(tmp_path):
    run, spinning = begin(tmp_path)
    assert len(spinning) == len(os.sched_getaffinity(0))
    before = [computing(process) for process in spinning]
    assert eventually(lambda: all(computing(each) > then + 0.2 for each, then in zip(spinning, before)))
    (tmp_path / "go on").touch()
    said = run.communicate(timeout=120)[0]
    assert run.returncode == 1 and "1 failed, 1 passed" in said, said
    assert "FAILED ::Cell 1" in said and "each has a core of its own, but got" in said, said
    assert f"busy: {len(spinning)} computing processes, one a core" in said
    assert not any(process.is_running() for process in spinning)


@pytest.mark.timeout(400)
def test_a_killed_run_leaves_nothing_behind(tmp_path):
    run, spinning = begin(tmp_path)
    started = psutil.Process(run.pid).children(recursive=True)
    assert len(started) > len(spinning) > 0, "the kernel is one of them too"
    run.send_signal(signal.SIGKILL)
    run.communicate()
    assert eventually(lambda: all(gone(process.pid) for process in started)), "one that nobody collects is gone too"
