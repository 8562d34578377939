"""What each test costs: CPU seconds of a test and of all processes that it starts, which do not depend on load.

`pytest --write-seconds` runs every test of what it is asked for, of all tiers, and writes the rows of these files into
`tests/seconds.csv`; with `-m "not full"` it runs the default tier, and writes the rows of its tests only.
`tests/tiers.py` reads them. A test costs what is used between the begin of its setup and the end
of its teardown, so what tests share (a kernel, a module's runs) is paid by the first or last of them that needs it.
"""

from __future__ import annotations

import csv
import ctypes
import io
import os
from collections import defaultdict
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fsdplab.common.files import write_whole
from tests.ranks import RankPool

SECONDS = Path(__file__).parent / "seconds.csv"
COLUMNS = ("file", "test", "cpu_s", "in_other_processes_s", "ranks")
SHORT_S = 0.05  # shorter tests stand together in one row of their file
OTHERS = "(others)"
_PROPERTY = "cpu_seconds"
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Cost:
    """CPU seconds of one test, or of the short tests of a file together.

    `others_s` is the part that was used outside pytest's own process; `ranks` is the largest number of ranks that the
    `ranks` fixture was asked for, 0 where it was not.
    """

    cpu_s: float
    others_s: float
    ranks: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.cpu_s + other.cpu_s, self.others_s + other.others_s, max(self.ranks, other.ranks))


def read_seconds(path: Path = SECONDS) -> dict[tuple[str, str], Cost]:
    """The cost of each (file, test), and of each (file, OTHERS); nothing where the file was never written."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {
            (row["file"], row["test"]): Cost(float(row["cpu_s"]), float(row["in_other_processes_s"]), int(row["ranks"]))
            for row in csv.DictReader(file)
        }


# ---- what a run is asked for


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--write-seconds`."""
    parser.getgroup("fsdplab").addoption(
        "--write-seconds",
        action="store_true",
        help="run all tiers of what is asked for, and write the CPU seconds of each test into tests/seconds.csv",
    )


def configure(config: pytest.Config) -> None:
    """Under xdist the workers measure and the process above writes; without it one process does both."""
    if not config.getoption("write_seconds"):
        return
    if config.option.keyword or any("::" in each for each in config.args):
        raise pytest.UsageError(
            "--write-seconds writes the rows of whole files or tiers, and got a choice of tests (-k or ::); "
            "give it files, folders or -m, or nothing for all"
        )
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Stopwatch(), "seconds-stopwatch")
    if not is_worker:
        config.pluginmanager.register(Writer(keeps_others=bool(config.option.markexpr)), "seconds-writer")


# ---- measuring


def used_so_far() -> Cost:
    """CPU seconds of this process, and of all that it has started directly or through others, since their begin."""
    times = os.times()
    own = times.user + times.system
    others = times.children_user + times.children_system + sum(_seconds_of_descendants())
    return Cost(own + others, others)


def _seconds_of_descendants() -> Iterable[float]:
    """Of each living descendant its own seconds and those of its children that have ended."""
    ticks = os.sysconf("SC_CLK_TCK")
    used, children = {}, defaultdict(list)
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it ended while we looked
            continue
        fields = stat.rpartition(")")[2].split()  # state, ppid, ...; utime, stime, cutime, cstime are 14 to 17 of stat
        used[int(entry)] = sum(map(int, fields[11:15])) / ticks
        children[int(fields[1])].append(int(entry))
    waiting = [os.getpid()]
    while waiting:
        found = children[waiting.pop()]
        waiting += found
        yield from (used[each] for each in found)


class Stopwatch:
    """Measures each test in the process that runs it, and hands the cost on with the report of its teardown."""

    def __init__(self) -> None:
        # What a test leaves behind becomes a child of this process instead of init's, and is counted.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._before = used_so_far()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        self._before = used_so_far()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            now, before = used_so_far(), self._before
            cost = (round(now.cpu_s - before.cpu_s, 3), round(now.others_s - before.others_s, 3), largest_call(item))
            item.user_properties.append((_PROPERTY, cost))


def largest_call(item: pytest.Item) -> int:
    """The largest number of ranks that this test has asked the `ranks` fixture for."""
    pool = getattr(item, "funcargs", {}).get("ranks")
    return pool.largest_call() if isinstance(pool, RankPool) else 0


# ---- writing


class Writer:
    """Collects the costs that workers report, and writes the rows of the files that were run.

    `keeps_others`: the rows of tests of these files that were not run stay.
    """

    def __init__(self, keeps_others: bool) -> None:
        self._keeps_others = keeps_others
        self._costs: dict[str, dict[str, Cost]] = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            file, _, test = report.nodeid.partition("::")
            self._costs[file][test] = Cost(*dict(report.user_properties)[_PROPERTY])

    def pytest_sessionfinish(self) -> None:
        known = read_seconds()
        rows = {key: cost for key, cost in known.items() if self._keeps_others or key[0] not in self._costs}
        for file, costs in self._costs.items():
            short = Cost(0.0, 0.0)
            for test, cost in costs.items():
                if cost.cpu_s < SHORT_S:
                    short += cost
                    rows.pop((file, test), None)
                else:
                    rows[file, test] = cost
            rows[file, OTHERS] = short
        lines = [
            (file, test, f"{cost.cpu_s:.2f}", f"{max(cost.others_s, 0):.2f}", cost.ranks)
            for (file, test), cost in sorted(rows.items())
        ]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(lines)
        write_whole(SECONDS, text.getvalue())
