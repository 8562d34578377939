"""The rules of tests/tiers.py: which tests the default tier leaves to the full one, and that it keeps its budget."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from tests.seconds import OTHERS, Cost
from tests.tiers import BUDGET_S, TIERS, Costs, file_of, is_whole, left_to_full

FILE = "tests/test_some.py"
STARTS = Cost(cpu_s=1.0, others_s=0.9)
ALONE = Cost(cpu_s=1.0, others_s=0.0)


def item(name: str, values: Mapping[str, object] | None = None, marks: tuple[str, ...] = (), reason: str = "") -> Any:
    """A test as pytest collects it; `reason` is what its marks say."""
    call = SimpleNamespace(params=values) if values else None
    by_name = {mark: SimpleNamespace(args=(reason,) if reason else ()) for mark in marks}
    return SimpleNamespaceItem(name=name, nodeid=f"{FILE}::{name}", callspec=call, get_closest_marker=by_name.get)


class SimpleNamespaceItem(SimpleNamespace):
    """One that can be a key, as pytest's items can."""

    __hash__ = object.__hash__


def left(items: list[Any], rows: dict[str, Cost]) -> dict[str, str]:
    """The names of the tests that are left out, and the rules."""
    costs = Costs({(FILE, name): cost for name, cost in {OTHERS: Cost(0.0, 0.0), **rows}.items()})
    return {item.name: rule for item, rule in left_to_full(items, costs).items()}


def grid(values: list[object], name: str = "value", marks: tuple[str, ...] = ()) -> list[Any]:
    """One function with these values."""
    return [item(f"test_f[{value}]", {name: value}, marks) for value in values]


def test_a_grid_that_starts_processes_keeps_its_first_value() -> None:
    rows = dict.fromkeys(("test_f[a]", "test_f[b]", "test_f[c]"), STARTS)
    assert left(grid(["a", "b", "c"]), rows) == {"test_f[b]": "grid", "test_f[c]": "grid"}
    assert left(grid(["a", "b", "c"]), dict.fromkeys(rows, ALONE)) == {}, "a grid over words stays whole"
    assert left(grid(["a", "b", "c"]), {"test_f[a]": STARTS}) == {}, "the first one pays for what all of them share"
    assert left(grid(["a", "b", "c"], marks=("default",)), rows) == {} == left(grid(["a", "b"], marks=("quick",)), rows)


def test_the_default_tier_has_two_ranks() -> None:
    names = [f"test_f[{ranks}]" for ranks in (1, 2, 3, 4)]
    expected = {"test_f[1]": "ranks", "test_f[3]": "ranks", "test_f[4]": "ranks"}
    assert left(grid([1, 2, 3, 4], "world_size"), dict.fromkeys(names, STARTS)) == expected
    assert left(grid([1, 2, 3, 4], "world_size"), dict.fromkeys(names, ALONE)) == {}, "arithmetic starts no ranks"
    four = {"test_g": Cost(1.0, 0.9, ranks=4), "test_h": Cost(1.0, 0.9, ranks=2)}
    assert left([item("test_g"), item("test_h")], four) == {"test_g": "ranks"}
    assert left([item("test_g", marks=("quick",))], four) == {}


def test_long_learner_editions_and_what_is_marked_are_of_the_full_tier() -> None:
    edition = item("learner edition")
    assert left([edition], {"learner edition": Cost(5.1, 5.0)}) == {"learner edition": "learner"}
    assert left([edition], {"learner edition": Cost(4.9, 4.8)}) == {}
    assert left([item("test_f", marks=("full",)), item("test_g")], {}) == {"test_f": "marked"}


def test_what_takes_long_by_itself_is_of_the_full_tier_unless_it_is_marked() -> None:
    dear = {"test_f": Cost(1.6, 1.5)}
    assert left([item("test_f")], dear) == {"test_f": "dear"}
    assert left([item("test_f", marks=("default",))], dear) == {} == left([item("test_f")], {"test_f": Cost(1.4, 1.3)})


def test_quick_tests_that_take_long_wait_for_the_default_tier_unless_a_reason_is_given() -> None:
    costs = Costs({(FILE, "test_f"): Cost(0.9, 0.8), (FILE, "test_g"): Cost(0.7, 0.6)})
    slow, short, unmarked = item("test_f", marks=("quick",)), item("test_g", marks=("quick",)), item("test_f")
    assert [costs.is_slow_for_quick(test) for test in (slow, short, unmarked)] == [True, False, False]
    reasoned = item("test_f", marks=("quick",), reason="ranks train")
    assert not costs.is_slow_for_quick(reasoned)


@pytest.mark.parametrize(
    ("args", "chosen", "whole"),
    [
        (["tests", "notebooks"], {}, True),
        (["/somewhere/tests", "/somewhere/notebooks"], {}, True),
        (["tests"], {}, False),
        (["tests/test_crash.py::test_kills"], {}, False),
        (["tests", "notebooks"], {"markexpr": "full"}, False),
        (["tests", "notebooks"], {"keyword": "kills"}, False),
    ],
)
def test_who_says_what_to_run_gets_it(args: list[str], chosen: dict[str, str], whole: bool) -> None:
    option = SimpleNamespace(**{"markexpr": "", "keyword": "", **chosen})
    config: Any = SimpleNamespace(
        option=option, args=args, getini=lambda name: ["tests", "notebooks"], getoption=lambda name, default: default
    )
    assert is_whole(config) == whole


def test_the_default_tier_keeps_its_budget(request: pytest.FixtureRequest) -> None:
    """Of the tests that this run has collected; all of them in a run of everything."""
    tiers = request.config.stash[TIERS]
    assert tiers.default_s <= BUDGET_S, f"{tiers}; which tests are dear is in tests/seconds.csv"


def test_every_file_has_its_seconds(request: pytest.FixtureRequest) -> None:
    tiers, rows = request.config.stash[TIERS], Costs().rows
    files = {file_of(each) for each in [*tiers.default, *tiers.left]}
    missing = sorted(file for file in files if (file, OTHERS) not in rows)
    assert not missing, f"nobody knows what these take; run `pytest --write-seconds {' '.join(missing)}`"
