"""`call_on_ranks` with right and wrong functions on real ranks: the values come back, or one report that names the rank.

All wrong functions run at the same time, since most of them do nothing but wait for their time limit.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch

from fsdplab.sessions import RanksFailed, call_on_ranks

LEARNER = Path(__file__).with_name("learner.py")
WRONG = (
    "raise_on_one", "hang_on_one", "wait_for_each_other", "die_on_one", "exit_on_one", "leave_on_one", "forget_to_send", "return_an_object",
)  # fmt: skip
HANG_AFTER_S = 20.0


@pytest.fixture(scope="module")
def reports() -> dict[str, RanksFailed]:
    def report_of(name: str) -> RanksFailed:
        with pytest.raises(RanksFailed) as caught:
            call_on_ranks(LEARNER, name, world_size=2, time_limit=HANG_AFTER_S)
        return caught.value

    # the hanging ones first: they wait while the others run
    in_order = sorted(WRONG, key=lambda name: name not in ("hang_on_one", "wait_for_each_other"))
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(in_order, pool.map(report_of, in_order)))


def test_values_output_and_collectives_come_back_in_rank_order() -> None:
    values = call_on_ranks(LEARNER, "add_up", world_size=2, payload={"start": torch.tensor([1.0, 2.0]), "word": "slice"})
    assert [value["rank"] for value in values] == [0, 1]
    assert all(torch.equal(value["sum"], torch.tensor([3.0, 5.0])) for value in values)
    assert values[0]["again"] == ("slice", [1.5, None, True])
    assert values.output == ["rank 0 has [3.0, 5.0]\n", "rank 1 has [3.0, 5.0]\n"]
    assert values.collectives == [[("all_reduce", 8)]] * 2


def test_a_function_of_the_payload_alone_is_called_with_it() -> None:
    assert call_on_ranks(LEARNER, "only_the_payload", world_size=1, payload=4) == [40]


def test_point_to_point_calls_are_counted_and_work() -> None:
    values = call_on_ranks(LEARNER, "pass_around", world_size=2)
    assert values == [1.0, 0.0]
    assert values.collectives[0] == [("isend", 32), ("irecv", 32), ("barrier", 0)]


def test_a_rank_that_raises_is_named_with_its_traceback(reports: dict[str, RanksFailed]) -> None:
    report = reports["raise_on_one"].report
    assert (report.kind, report.rank) == ("raised", 1)
    assert "Rank 1 raised: ValueError: the slices do not fit." in str(reports["raise_on_one"])
    assert 'raise ValueError("the slices do not fit")' in report.traceback
    assert "callee.py" not in report.traceback


def test_a_rank_that_hangs_is_named_with_the_line_it_hangs_in(reports: dict[str, RanksFailed]) -> None:
    report = reports["hang_on_one"].report
    assert (report.kind, report.rank) == ("hung", 1)
    assert "time.sleep(10_000)" in report.traceback and "dist.all_reduce(torch.ones(4))" in report.traceback


def test_ranks_that_wait_for_each_other_blame_nobody(reports: dict[str, RanksFailed]) -> None:
    report = reports["wait_for_each_other"].report
    assert (report.kind, report.rank) == ("hung", None)
    assert "All ranks wait for each other" in report.message and "recv of 16 bytes" in report.message


@pytest.mark.parametrize(
    ("name", "says"),
    [("die_on_one", "SIGKILL (signal 9)"), ("exit_on_one", "exit code 3"), ("leave_on_one", "exit code 0 before its work was done")],
)
def test_a_rank_that_dies_is_named_with_how(reports: dict[str, RanksFailed], name: str, says: str) -> None:
    report = reports[name].report
    assert (report.kind, report.rank) == ("died", 1)
    assert says in report.message


def test_a_rank_that_waits_for_one_that_has_finished_says_so(reports: dict[str, RanksFailed]) -> None:
    report = reports["forget_to_send"].report
    assert (report.kind, report.rank) == ("raised", 1)
    assert "Rank 0 had already finished" in report.message and "recv of 16 bytes" in report.message


def test_a_value_that_cannot_travel_is_refused_by_its_type(reports: dict[str, RanksFailed]) -> None:
    assert "return_an_object returned something of type object, which cannot be handed over" in reports["return_an_object"].report.message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source_path": "nowhere.py"}, "no file"),
        ({"world_size": 0}, "world_size is 0"),
        ({"payload": {"key": [numpy.float64(1)]}}, "type float64"),
    ],
)
def test_a_call_that_cannot_be_is_refused_before_ranks_start(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call_on_ranks(**{"source_path": LEARNER, "function_name": "add_up", "world_size": 2, **arguments})  # type: ignore[arg-type]
