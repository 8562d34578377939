"""The GPU tests, run by pytest in a process that is replaced when a test breaks it: a kernel that fails breaks CUDA for
its whole process.

Tests are found by their mark `gpu`. On CPU the same files are collected and their GPU tests are skipped, with the
reason that they give; one file of plain tests shows that tests really run.

In pytest's process this file is a plugin, which writes each test down when it begins and when it ends, so that one that
hangs or crashes is known by name, and a second process goes on behind it. After an error of CUDA itself nothing in the
process can be trusted, so it ends at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from .part import Sheet, need, part_main
from .runner import CHECKOUT

MARK = "mark.gpu"
ON_CPU_TOO = ("test_engine_layout.py",)
NOT_ALL_PASSED, NONE_LEFT, CUDA_BROKE = 1, 5, 70  # the first two are pytest's
_ONE_TEST_S = 45  # where pytest-timeout is installed
_LEAST_S = 5.0  # no process is started with less than this
_CLOSING_S = 1.5
# the checkout's own flags need plugins that may not be there; the one for notebooks would be loaded for nothing, and
# takes seconds
_FLAGS = [
    *("-q", "--tb=short", "--disable-warnings", "-p", "no:cacheprovider", "-p", "no:nbval"),
    *("-o", "addopts=", "-o", "filterwarnings=", "-o", f"timeout={_ONE_TEST_S}"),
]
Event = dict[str, Any]


def work(sheet: Sheet, device: torch.device) -> None:
    """Runs every GPU test. A process that dies is followed by another for the tests after."""
    need("tests", "pytest")
    files = test_files(CHECKOUT / "tests", device.type)
    if not files:
        where = "run from a checkout of the repository"
        return sheet.check("there are GPU tests", False, "no file of tests beside this package", where)
    sheet.note(f"run by pytest: {', '.join(path.name for path in files)}")
    code, before = None, -1
    while code != 0 and len(sheet.rows) > before and sheet.left() > _LEAST_S:
        before = len(sheet.rows)
        code = run_files(sheet, files, sheet.folder / "events.jsonl")
    ran = {outcome: sum(row["outcome"] == outcome for row in sheet.rows) for outcome in ("passed", "failed", "skipped")}
    told = ", ".join(f"{count} {outcome}" for outcome, count in ran.items())
    got = "stopped at the limit" if code is None else f"code {code}: {told}"
    sheet.check("all tests were run", code in (0, NOT_ALL_PASSED), got, "code 0 or 1")
    sheet.check("some test ran", ran["passed"] + ran["failed"] > 0, told, "at least 1 passed or failed")


def test_files(tests: Path, device: str) -> list[Path]:
    """The files that hold a GPU test; on CPU also one of plain tests."""
    found = [
        path
        for path in sorted(tests.glob("test_*.py"))
        if MARK in path.read_text(encoding="utf-8") and path.name != "test_gpu_check.py"
    ]
    return found + ([tests / name for name in ON_CPU_TOO if (tests / name).exists()] if device == "cpu" else [])


def run_files(sheet: Sheet, files: list[Path], events: Path) -> int | None:
    """The tests that were not begun yet, in one process, which is ended when the part's time is up; a row each. Returns
    its exit code, None at the limit.
    """
    before = len(events_in(events))
    plugin = ["-p", "fsdplab.gpu_check.tests", "--events", str(events)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        code = subprocess.run(
            [sys.executable, "-m", "pytest", *_FLAGS, *plugin, *map(str, files)],
            cwd=CHECKOUT, env=environment, stdin=subprocess.DEVNULL, timeout=max(0.0, sheet.left() - _CLOSING_S),
        ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        code = None
    take_in(sheet, events_in(events)[before:], code)
    return 0 if code == NONE_LEFT else code


def take_in(sheet: Sheet, events: list[Event], code: int | None) -> None:
    """A row for each test that ended, and for the one that was running when its process did."""
    running = ""
    for event in events:
        running = event["test"] if event["outcome"] == "began" else ""
        if not running:
            _row(sheet, **event)
    if running:
        reason = "was stopped at the limit" if code is None else f"ended its process (code {code})"
        _row(sheet, running, "failed", None, reason)


def _row(sheet: Sheet, test: str, outcome: str, seconds: float | None, reason: str) -> None:
    file, _, name = test.rpartition("::")
    sheet.row(file=file, test=name, outcome=outcome, seconds=seconds, reason=reason or None)
    if outcome == "failed":
        sheet.check(f"{file}::{name}", False, reason, "passed")


def events_in(file: Path) -> list[Event]:
    """What was written so far; the line after the last newline is still being written."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


# ---- the plugin, in pytest's process


def pytest_addoption(parser: Any) -> None:
    """The file to write to."""
    parser.addoption("--events", type=Path)


def pytest_configure(config: Any) -> None:
    """The hooks below know their file."""
    config.pluginmanager.register(Reporter(config.getoption("events")))


class Reporter:
    """Notes what tests do: file::name, outcome (began, passed, failed, skipped), seconds, reason."""

    def __init__(self, events: Path) -> None:
        self._events, self._seconds = events, 0.0
        self._told: set[str] = set()

    def _note(self, test: str, outcome: str, seconds: float = 0.0, reason: str = "") -> None:
        event = {"test": test, "outcome": outcome, "seconds": round(seconds, 3), "reason": reason[:300]}
        with self._events.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")
        if outcome == "failed" and "CUDA error" in reason:
            os._exit(CUDA_BROKE)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Only GPU tests and whole files are run, and what a process before has begun is not run again."""
        begun = {event["test"] for event in events_in(self._events)}
        wanted = [item for item in items if item.path.name in ON_CPU_TOO or item.get_closest_marker("gpu")]
        items[:] = [item for item in wanted if _name(item.nodeid) not in begun]

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        """A test begins."""
        self._seconds = 0.0
        self._note(_name(nodeid), "began")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test's setup, call or teardown ended; the first that is not a plain pass decides."""
        self._seconds += report.duration
        if report.passed and report.when != "teardown" or report.nodeid in self._told:
            return
        self._told.add(report.nodeid)
        self._note(_name(report.nodeid), report.outcome, self._seconds, _reason(report))

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported is a test that failed."""
        if report.failed:
            said = str(report.longrepr).strip().splitlines()[-1]
            self._note(f"{_name(report.nodeid)} (collecting)", "failed", 0.0, said)


def _name(nodeid: str) -> str:
    """`tests/test_a.py::test_b[1]` -> `test_a::test_b[1]`."""
    file, _, test = nodeid.partition("::")
    return "::".join(filter(None, [Path(file).stem, test]))


def _reason(report: Any) -> str:
    if report.skipped:
        where = report.longrepr
        return str(where[2]).removeprefix("Skipped: ") if isinstance(where, tuple) else str(where)
    crash = getattr(report.longrepr, "reprcrash", None)
    return "" if report.passed else str(crash.message if crash else report.longrepr).strip().splitlines()[0]


if __name__ == "__main__":
    sys.exit(part_main("tests", work))
