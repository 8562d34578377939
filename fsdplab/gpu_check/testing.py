"""Tests in this process: `python -m fsdplab.gpu_check.testing EVENTS pytest|bare WHOLE FILE...`.

Of each file the tests marked `gpu` are run; of those named in WHOLE (comma-separated), all.

Each test is written down when it begins and when it ends, so that one that hangs or crashes is known by name, and a
second process goes on behind it. After an error of CUDA itself nothing in the process can be trusted, so it ends at
once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from .bare import run_bare

Note = Callable[[str, str, float, str], None]
NOT_ALL_PASSED, CUDA_BROKE = 1, 70
_ONE_TEST_S = 45  # where pytest-timeout is installed


def noting(path: Path) -> Note:
    """A function that appends one event to `path`: test (file::name), outcome (began, passed, failed, skipped),
    seconds, reason.
    """

    def note(test: str, outcome: str, seconds: float = 0.0, reason: str = "") -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({"test": test, "outcome": outcome, "seconds": round(seconds, 3), "reason": reason[:300]})
                + "\n"
            )
        if outcome == "failed" and "CUDA error" in reason:
            os._exit(CUDA_BROKE)

    return note


def begun_in(path: Path) -> set[str]:
    """The tests that some process before this one has begun."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {event["test"] for event in map(json.loads, lines) if event["outcome"] == "began"}


class Reporter:
    """A plugin of pytest that notes what its tests do."""

    def __init__(self, note: Note, begun: set[str], whole: set[str]) -> None:
        self._note, self._begun, self._whole = note, begun, whole
        self._seconds = 0.0
        self._told: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Only GPU tests and whole files are run, and what was begun before is not run again."""
        wanted = [item for item in items if item.path.name in self._whole or item.get_closest_marker("gpu")]
        items[:] = [item for item in wanted if _name(item.nodeid) not in self._begun]

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        """A test begins."""
        self._seconds = 0.0
        self._note(_name(nodeid), "began", 0.0, "")

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
            self._note(
                f"{_name(report.nodeid)} (collecting)", "failed", 0.0, str(report.longrepr).strip().splitlines()[-1]
            )


def _name(nodeid: str) -> str:
    """`tests/test_a.py::test_b[1]` -> `test_a::test_b[1]`."""
    file, _, test = nodeid.partition("::")
    return "::".join(filter(None, [Path(file).stem, test]))


def _reason(report: Any) -> str:
    if report.skipped:
        return (
            str(report.longrepr[2]).removeprefix("Skipped: ")
            if isinstance(report.longrepr, tuple)
            else str(report.longrepr)
        )
    crash = getattr(report.longrepr, "reprcrash", None)
    return "" if report.passed else str(crash.message if crash else report.longrepr).strip().splitlines()[0]


def run_with_pytest(paths: list[Path], note: Note, begun: set[str], whole: set[str]) -> int:
    """Run the files with pytest; 0 where nothing failed.
    The checkout's own flags need plugins that may not be there.
    """
    pytest = import_module("pytest")
    flags = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "-o",
        "filterwarnings=",
        "--tb=short",
        "-o",
        f"timeout={_ONE_TEST_S}",
    ]
    code = pytest.main([*flags, *map(str, paths)], plugins=[Reporter(note, begun, whole)])
    return 0 if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else int(code)


def main(events: str, runner: str, whole: str, *files: str) -> int:
    """0 where every test passed or was skipped, 1 where one failed."""
    run = run_with_pytest if runner == "pytest" else run_bare
    return run([Path(file) for file in files], noting(Path(events)), begun_in(Path(events)), set(whole.split(",")))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
