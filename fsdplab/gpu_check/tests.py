"""The GPU tests, in a process that is replaced when a test breaks it: a kernel that fails breaks CUDA for its whole
process.

Tests are found by their mark `gpu`. Where pytest is installed it runs them; where it is not, a small stand-in does
(bare.py), since a borrowed machine may have torch and numpy alone. On CPU the same files are collected and their GPU
tests are skipped, with the reason that they give; one file of plain tests shows that tests really run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .part import Sheet, part_main
from .runner import CHECKOUT
from .testing import NOT_ALL_PASSED

MARK = "mark.gpu"
ON_CPU_TOO = ("test_engine_layout.py",)
_LOOK_EVERY_S = 0.05
_LEAST_S = 5.0  # no process is started with less than this
_CLOSING_S = 1.5
Event = dict[str, Any]


def work(sheet: Sheet, device: torch.device, folder: Path, seconds: float) -> None:
    """Runs every GPU test; a row a test, as soon as it ends. A process that dies is followed by another for the tests
    after.
    """
    files = test_files(CHECKOUT / "tests", device.type)
    if not files:
        return sheet.check(
            "there are GPU tests",
            False,
            "no file of tests beside this package",
            "run from a checkout of the repository",
        )
    runner = "pytest" if importlib.util.find_spec("pytest") else "bare"
    sheet.note(
        f"run by {'pytest' if runner == 'pytest' else 'the stand-in for pytest'}:"
        f" {', '.join(path.name for path in files)}"
    )
    reader, code, before = Reader(sheet, folder / "events.jsonl"), None, -1
    while code != 0 and reader.begun > before and sheet.left() > _LEAST_S:
        before = reader.begun
        code = run_files(sheet, files, reader, runner)
        reader.ended(code)
    ran = {outcome: sum(row["outcome"] == outcome for row in sheet.rows) for outcome in ("passed", "failed", "skipped")}
    told = ", ".join(f"{count} {outcome}" for outcome, count in ran.items())
    sheet.check(
        "all tests were run",
        code == 0 or code == NOT_ALL_PASSED,
        "stopped at the limit" if code is None else f"code {code}: {told}",
        "code 0 or 1",
    )
    sheet.check("some test ran", ran["passed"] + ran["failed"] > 0, told, "at least 1 passed or failed")


def test_files(tests: Path, device: str) -> list[Path]:
    """The files that hold a GPU test; on CPU also one of plain tests."""
    found = [
        path
        for path in sorted(tests.glob("test_*.py"))
        if MARK in path.read_text(encoding="utf-8") and path.name != "test_gpu_check.py"
    ]
    return found + ([tests / name for name in ON_CPU_TOO if (tests / name).exists()] if device == "cpu" else [])


def run_files(sheet: Sheet, files: list[Path], reader: Reader, runner: str) -> int | None:
    """The tests that were not begun yet, in one process, ended when the part's time is up; its exit code, None at the
    limit.
    """
    command = [
        sys.executable,
        "-m",
        "fsdplab.gpu_check.testing",
        str(reader.events),
        runner,
        ",".join(ON_CPU_TOO),
        *map(str, files),
    ]
    process = subprocess.Popen(
        command, cwd=CHECKOUT, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}, stdin=subprocess.DEVNULL
    )
    try:
        while process.poll() is None and sheet.left() > _CLOSING_S:
            reader.read()
            time.sleep(_LOOK_EVERY_S)
    finally:
        code = process.poll()
        if code is None:
            process.kill()
            process.wait()
    return code


class Reader:
    """Turns the lines that the tests' process writes into rows, and knows which test was running when it ended."""

    def __init__(self, sheet: Sheet, events: Path) -> None:
        self.events, self.begun = events, 0
        self._sheet, self._lines, self._running = sheet, 0, ""

    def read(self) -> None:
        """Take in what was written since the last look."""
        text = self.events.read_text(encoding="utf-8") if self.events.exists() else ""
        lines = text.split("\n")[:-1]  # what follows the last newline is still being written
        for line in lines[self._lines :]:
            self._take(json.loads(line))
        self._lines = len(lines)

    def _take(self, event: Event) -> None:
        if event["outcome"] == "began":
            self._running = event["test"]
            self.begun += 1
            return
        self._running = ""
        self._row(event["test"], event["outcome"], event["seconds"], event["reason"])

    def _row(self, test: str, outcome: str, seconds: float | None, reason: str) -> None:
        file, _, name = test.rpartition("::")
        self._sheet.row(file=file, test=name, outcome=outcome, seconds=seconds, reason=reason or None)
        if outcome == "failed":
            self._sheet.check(f"{file}::{name}", False, reason, "passed")

    def ended(self, code: int | None) -> None:
        """The process has ended: the test that was running, if any, did not."""
        self.read()
        if self._running:
            self._row(
                self._running,
                "failed",
                None,
                "was stopped at the limit" if code is None else f"ended its process (code {code})",
            )
            self._running = ""


if __name__ == "__main__":
    sys.exit(part_main("tests", work))
