"""What a run of many tests says while somebody waits, and when it stops.

At its begin a run prints how its tests are divided into tiers and about how long it takes; then, every minute, how much
of the work is done. The work is counted in the CPU seconds of `tests/seconds.csv`: tests take between nothing and a
minute, so pytest's own percentage, which counts tests, says little.

`--deadline S` begins no test later than S seconds after the begin of the run. What was not run is skipped with that
reason and listed at the end. Such a run begins with the files that were not run whole for longest, as the file says
whose path is in FSDPLAB_LAST_RUNS; among those it does not know, the commit decides, so that each commit tries others.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fsdplab.common.files import write_whole
from tests.seconds import OTHERS, Cost, read_seconds

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

NOT_RUN = "not run: the deadline was over"
EVERY_S = 60.0
_WORTH_TELLING = 0.02  # the part of the work below which it says nothing of what is left
_WORTH_TELLING_S = 60.0  # CPU seconds below which a run says nothing of its progress
_ROOT = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--deadline`."""
    parser.getgroup("fsdplab").addoption(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help="begin no test later than this after the begin of the run; say at the end what was not run",
    )


def configure(config: pytest.Config) -> None:
    """The process that prints gets a reporter; those that run tests get the deadline."""
    worker = getattr(config, "workerinput", None)
    begin = worker["fsdplab_begin"] if worker is not None else time.time()
    if worker is None and not config.option.collectonly:
        config.pluginmanager.register(Progress(config, begin), "fsdplab-progress")
    seconds = config.getoption("deadline")
    if seconds is not None:
        config.pluginmanager.register(Deadline(begin + seconds), "fsdplab-deadline")


class Deadline:
    """Skips each test whose turn comes too late."""

    def __init__(self, end: float) -> None:
        self._end = end

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.time() > self._end:
            pytest.skip(NOT_RUN)


# ---- what was run when


def last_runs() -> dict[str, float]:
    """When each file was last run whole, in seconds since 1970; empty where nobody keeps it."""
    path = os.environ.get("FSDPLAB_LAST_RUNS")
    if not path or not Path(path).exists():
        return {}
    try:
        return {str(file): float(when) for file, when in json.loads(Path(path).read_text(encoding="utf-8")).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise pytest.UsageError(
            f"FSDPLAB_LAST_RUNS is {path}, which does not hold a JSON object of files and seconds ({error}); remove it"
        ) from None


def longest_not_run_first(files: Sequence[str]) -> list[str]:
    """The order in which a run with a deadline takes files."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=_ROOT, capture_output=True, text=True).stdout
    known = last_runs()
    return sorted(files, key=lambda file: (known.get(file, 0.0), hashlib.sha256((commit + file).encode()).digest()))


# ---- what is printed


class Progress:
    """Prints the tiers, the progress and what was not run, in the process that has the terminal."""

    def __init__(self, config: pytest.Config, begin: float) -> None:
        self._config = config
        self._costs = read_seconds()
        self._begin = self._told = begin
        self._total_s = self._done_s = 0.0
        self._short_s: dict[str, float] = {}  # the average seconds of a file's short tests
        self._not_run: Counter[str] = Counter()
        self._run: set[str] = set()
        self._tiers_file = Path(tempfile.gettempdir()) / f"fsdplab-tiers-{os.getpid()}-{self._begin:.0f}"

    @property
    def _terminal(self) -> TerminalReporter:
        return self._config.pluginmanager.get_plugin("terminalreporter")

    # With xdist only the workers collect: the first one leaves a text for this process.

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["fsdplab_begin"] = self._begin
        node.workerinput["fsdplab_tiers_file"] = str(self._tiers_file)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        if self._total_s == 0 and self._tiers_file.exists():
            tiers = self._tiers_file.read_text(encoding="utf-8")
            self._tiers_file.unlink()
            said = self._announced(tiers, ids, workers=self._config.getoption("numprocesses"))
            if said:
                self._terminal.write_line(said)

    def pytest_report_collectionfinish(self, items: Sequence[pytest.Item]) -> str:
        from tests.tiers import said_of_tiers  # which imports this module

        ids = [item.nodeid for item in items]
        return self._announced(said_of_tiers(self._config), ids, workers=1)

    def _announced(self, tiers: str, ids: Sequence[str], workers: int) -> str:
        """The tiers, and how long these tests take; from now on progress is counted."""
        short = Counter(_file_of(test) for test in ids if _key(test) not in self._costs)
        for file, count in short.items():
            self._short_s[file] = self._costs.get((file, OTHERS), Cost(0.0, 0.0)).cpu_s / count
        self._total_s = sum(map(self._seconds, ids))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        minutes = self._total_s / min(workers, cores) / 60
        said = [tiers] if tiers else []
        if self._total_s > _WORTH_TELLING_S:
            said.append(f"this run: {len(ids):,} tests, about {minutes:.0f} minutes where nothing else runs")
        return "\n".join(said)

    def _seconds(self, test: str) -> float:
        cost = self._costs.get(_key(test))
        return cost.cpu_s if cost is not None else self._short_s.get(_file_of(test), 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and NOT_RUN in str(report.longrepr):
            self._not_run[_file_of(report.nodeid)] += 1
        if report.when != "teardown":
            return
        self._run.add(_file_of(report.nodeid))
        self._done_s += self._seconds(report.nodeid)
        now = time.time()
        part = min(self._done_s / self._total_s, 1.0) if self._total_s > _WORTH_TELLING_S else 0.0
        if now - self._told > EVERY_S and _WORTH_TELLING < part < 1:
            self._told = now
            left_min = (now - self._begin) * (1 - part) / part / 60
            self._terminal.ensure_newline()
            self._terminal.write_line(f"{part:.0%} of the work is done; about {left_min:.0f} minutes are left")

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        if not self._not_run:
            return
        terminalreporter.section(f"not run within {self._config.getoption('deadline'):.0f} s")
        for file, count in sorted(self._not_run.items()):
            terminalreporter.write_line(f"{file}: {count} tests")

    def pytest_sessionfinish(self) -> None:
        """Keep when files were run whole, for the next run with a deadline."""
        path = os.environ.get("FSDPLAB_LAST_RUNS")
        if path and self._config.getoption("deadline") is not None:
            now = time.time()
            runs = last_runs() | {file: now for file in self._run if file not in self._not_run}
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_whole(Path(path), json.dumps(runs, indent=1, sort_keys=True))


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def _key(test: str) -> tuple[str, str]:
    file, _, name = test.partition("::")
    return file, name
