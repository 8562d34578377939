"""Which runs of the suite leave out the tests marked soak: those in which nobody said what to run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.soak import others_soak
from tests.spread import pytest_collection_modifyitems, pytest_report_header

pytestmark = pytest.mark.quick
EVERYTHING = ["tests", "notebooks"]


class Item(SimpleNamespace):
    """A test as pytest collects it: its file, and whether it is marked."""

    def get_closest_marker(self, name: str) -> bool:
        return name == "soak" and self.soak


def left_of(args: list[str], markexpr: str = "", keyword: str = "") -> tuple[list[str], list[str]]:
    """(the tests that are run, those that are reported as deselected) of a soak test and another one."""
    told: list[str] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: told.extend(each.name for each in items))
    config: Any = SimpleNamespace(
        option=SimpleNamespace(markexpr=markexpr, keyword=keyword), args=args, hook=hook, getini=lambda name: EVERYTHING
    )
    items: Any = [Item(name=name, path=SimpleNamespace(stem=name), soak=name == "long") for name in ("long", "short")]
    pytest_collection_modifyitems(config, items)
    assert bool(pytest_report_header(config)) == bool(told)
    return [each.name for each in items], told


@pytest.mark.parametrize("args", [EVERYTHING, ["/somewhere/tests", "/somewhere/notebooks"]])
def test_a_whole_run_says_that_it_has_no_soak_tests(args: list[str]) -> None:
    assert left_of(args) == (["short"], ["long"])


@pytest.mark.parametrize(
    ("args", "more"),
    [
        (["tests"], {}),
        (["tests/test_crash.py"], {}),
        (["tests/test_crash.py::test_ten_kills_lose_nothing"], {}),
        (EVERYTHING, {"markexpr": "soak"}),
        (EVERYTHING, {"keyword": "kills"}),
    ],
)
def test_who_says_what_to_run_gets_it(args: list[str], more: dict[str, str]) -> None:
    assert left_of(args, **more) == (["long", "short"], [])


def test_some_parameters_are_kept_and_all_are_there() -> None:
    first, second, third = others_soak(["a", ("b", 1), "c"], ["a"])
    assert first == "a" and (second.values, third.values) == (("b", 1), ("c",))
    assert {mark.name for each in (second, third) for mark in each.marks} == {"soak"}
    with pytest.raises(AssertionError, match="are to be kept"):
        others_soak(["a"], ["misspelt"])
