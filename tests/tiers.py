"""Which tests a run tries, and in which order.

`pytest` without a choice runs the default tier: at most BUDGET_S CPU seconds. `pytest -m full` runs the rest of what
needs no GPU and no peer, `pytest -m quick` the tests for the minutes between two edits. A file, a name or another `-m`
gets all tests that it asks for.

The default tier leaves a test to the full tier by these rules, and by nothing else:

    grid       of a grid whose tests start ranks or processes, all values but the first with two ranks
    torchrun   of a grid over ways to start ranks, `torchrun`: the default tier forks them
    ranks      a test that needs another number of ranks than two
    learner    the learner edition of a notebook, where it takes longer than LEARNER_S
    dear       a test that takes longer than DEAR_S by itself, unless it is marked `default`: a subject's whole story
    marked     a test marked `full`, which says why: it repeats many times, or elsewhere, what another one does once

A test marked `quick` or `default` stays; so does a grid whose tests start nothing. What a test starts, and how long it
takes, is read from `tests/seconds.csv` (tests/seconds.py).

Of the tests marked `quick`, `-m quick` leaves those to the default tier that take longer than QUICK_S, unless the mark
says why it waits for them: `quick("optimizers on real ranks")`.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import busy, progress, seconds
from tests.progress import longest_not_run_first
from tests.seconds import OTHERS, SHORT_S, Cost, read_seconds

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

BUDGET_S = 1450.0
LEARNER_S = 5.0
DEAR_S = 1.5
QUICK_S = 0.8
LEARNER = "learner edition"
RULES = ("grid", "torchrun", "ranks", "learner", "dear", "marked")

# Workers share the cores, and a thread of OpenMP would spin while it waits for one that has none: on a busy machine a
# small training took 30 times the processor's time. OpenMP reads this when torch is loaded, here and in kernels.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@dataclass(frozen=True)
class Costs:
    """What tests cost, as `tests/seconds.csv` says."""

    rows: Mapping[tuple[str, str], Cost] = field(default_factory=read_seconds)

    def of(self, item: pytest.Item) -> Cost | None:
        """The row of a test; None where it is short, or has never been measured."""
        file, _, test = item.nodeid.partition("::")
        return self.rows.get((file, test))

    def starts(self, item: pytest.Item) -> bool:
        """Whether a test starts ranks or processes; where its file was never measured, whether it asks for ranks."""
        if (file_of(item), OTHERS) not in self.rows:
            return "ranks" in getattr(item, "fixturenames", ()) and "ranks" not in values_of(item)
        cost = self.of(item)
        return cost is not None and cost.others_s >= SHORT_S

    def is_dear(self, item: pytest.Item) -> bool:
        """Whether a test takes long by itself; a notebook's cells belong together."""
        cost = self.of(item)
        return cost is not None and cost.cpu_s > DEAR_S and not file_of(item).endswith(".ipynb")

    def is_slow_for_quick(self, item: pytest.Item) -> bool:
        """Whether a test marked `quick` takes too long for `-m quick`, and no reason says that it is waited for."""
        mark, cost = item.get_closest_marker("quick"), self.of(item)
        return mark is not None and not mark.args and cost is not None and cost.cpu_s > QUICK_S

    def ranks(self, item: pytest.Item) -> int:
        """How many ranks a test needs, 0 where nothing says so: what it asked for, else the value of its grid."""
        cost = self.of(item)
        if cost is not None and cost.ranks:
            return cost.ranks
        world_size = values_of(item).get("world_size")
        return world_size if isinstance(world_size, int) and self.starts(item) else 0

    def seconds(self, items: Sequence[pytest.Item]) -> float:
        """CPU seconds of those of these tests that have a row."""
        return sum(cost.cpu_s for item in items if (cost := self.of(item)) is not None)

    def short_seconds(self, items: Sequence[pytest.Item]) -> float:
        """CPU seconds of all short tests in the files of these tests."""
        files = {file_of(item) for item in items}
        return sum(self.rows[file, OTHERS].cpu_s for file in files if (file, OTHERS) in self.rows)


def file_of(item: pytest.Item) -> str:
    """The file of a test as its id names it."""
    return item.nodeid.partition("::")[0]


def values_of(item: pytest.Item) -> Mapping[str, object]:
    """The values of a test's grid by their names."""
    call = getattr(item, "callspec", None)
    return call.params if call is not None else {}


# ---- the rules


def left_to_full(items: Sequence[pytest.Item], costs: Costs) -> dict[pytest.Item, str]:
    """The tests that the default tier leaves out, each with the rule that says so."""
    grids: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if values_of(item) and costs.starts(item):
            grids[file_of(item), item.nodeid.partition("[")[0]].append(item)
    first = {id(_first_of(grid, costs)) for grid in grids.values()}
    in_grids = {id(item) for grid in grids.values() for item in grid}

    left: dict[pytest.Item, str] = {}
    for item in items:
        if item.get_closest_marker("full"):
            left[item] = "marked"
        elif item.get_closest_marker("quick") or item.get_closest_marker("default"):
            continue
        elif item.name == LEARNER:
            cost = costs.of(item)
            if cost is not None and cost.cpu_s > LEARNER_S:
                left[item] = "learner"
        elif values_of(item).get("start") == "torchrun":
            left[item] = "torchrun"
        elif costs.ranks(item) not in (0, 2):
            left[item] = "ranks"
        elif id(item) in in_grids and id(item) not in first:
            left[item] = "grid"
        elif costs.is_dear(item):
            left[item] = "dear"
    return left


def _first_of(grid: Sequence[pytest.Item], costs: Costs) -> pytest.Item:
    """The value of a grid that the default tier keeps: the first with two ranks, else the first."""
    with_two_ranks = (item for item in grid if costs.ranks(item) in (0, 2))
    return next(with_two_ranks, grid[0])


@dataclass(frozen=True)
class Tiers:
    """How the tests of a run are divided."""

    default: list[pytest.Item]
    left: dict[pytest.Item, str]
    default_s: float
    left_s: float

    def __str__(self) -> str:
        by_rule = Counter(self.left.values())
        rules = ", ".join(f"{by_rule[rule]} {rule}" for rule in RULES)
        return (
            f"default tier: {len(self.default):,} tests, {self.default_s:,.0f} CPU seconds of {BUDGET_S:.0f}; "
            f"`-m full` runs {len(self.left):,} more in {self.left_s:,.0f} ({rules})"
        )


TIERS = pytest.StashKey[Tiers]()


# ---- pytest's hooks, which both conftests import: whichever is loaded first acts


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the files that hold what they do."""
    for add_option in (busy.pytest_addoption, progress.pytest_addoption, seconds.pytest_addoption):
        with suppress(ValueError):  # the other conftest has added it
            add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """The plugins of a run: once, whichever conftest is loaded first."""
    if not config.pluginmanager.has_plugin("fsdplab-configured"):
        config.pluginmanager.register(object(), "fsdplab-configured")
        seconds.configure(config)
        progress.configure(config)


def is_whole(config: pytest.Config) -> bool:
    """Whether nobody said which tests to run."""
    chosen = config.option.markexpr or config.option.keyword or config.getoption("write_seconds", False)
    return not chosen and _asks_for_all(config)


def _asks_for_all(config: pytest.Config) -> bool:
    return [Path(folder).name for folder in config.args] == config.getini("testpaths")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what the rules leave to the full tier, leave it out of a whole run, and put the longest files first."""
    if TIERS not in config.stash:
        costs = Costs()
        left = left_to_full(items, costs)
        default = [item for item in items if item not in left]
        default_s = costs.seconds(default) + costs.short_seconds(default)
        config.stash[TIERS] = Tiers(default, left, default_s, costs.seconds(list(left)))
        for item in left:
            item.add_marker("full")
        _order(items, costs, config)
        _tell(config)
    tiers = config.stash[TIERS]
    if is_whole(config):
        _leave_out(items, [item for item in items if item in tiers.left], config)
    elif config.option.markexpr == "full":
        _keep_what_learner_editions_need(items)
    elif config.option.markexpr == "quick":
        costs = Costs()
        _leave_out(items, [item for item in items if costs.is_slow_for_quick(item)], config)


def _leave_out(items: list[pytest.Item], left: Sequence[pytest.Item], config: pytest.Config) -> None:
    """Take tests out of a run, and say how many; this may be called again with what is left."""
    if left:
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]


def _order(items: list[pytest.Item], costs: Costs, config: pytest.Config) -> None:
    """Files by their seconds, the longest first: one that came last would keep a worker busy while others have nothing.

    With a deadline those come first that were not run for longest.
    """
    by_file: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_file[file_of(item)].append(item)
    if config.getoption("deadline", None) is not None:
        files = longest_not_run_first(list(by_file))
    else:
        files = sorted(by_file, key=lambda file: -costs.seconds(by_file[file]))
    items[:] = [item for file in files for item in by_file[file]]


def said_of_tiers(config: pytest.Config) -> str:
    """How the tests are divided, for the header of a run of a tier; nothing where somebody chose files or names."""
    return str(config.stash[TIERS]) if is_whole(config) or config.option.markexpr == "full" else ""


def _tell(config: pytest.Config) -> None:
    """Under xdist: leave the tiers for the process that prints them (tests/progress.py)."""
    worker = getattr(config, "workerinput", {})
    if worker.get("workerid") == "gw0" and "fsdplab_tiers_file" in worker:
        Path(worker["fsdplab_tiers_file"]).write_text(said_of_tiers(config), encoding="utf-8")


def _keep_what_learner_editions_need(items: list[pytest.Item]) -> None:
    """The learner edition runs in the kernel of the cells before it: these are of the full tier too, where it is."""
    notebooks = {file_of(item) for item in items if item.name == LEARNER and item.get_closest_marker("full")}
    for item in items:
        if file_of(item) in notebooks:
            item.add_marker("full")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling:
    """Whole files in the order of `_order`, whatever --dist says: a notebook's cells follow each other, and a module's
    runs are made once. The files of JupyterLab's tests are one, so that they share one server.
    """
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "browser" if file.endswith("_browser.py") else file

    config.option.loadscopereorder = False
    return Files(config, log)
