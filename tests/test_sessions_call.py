"""`call_on_ranks` with right and wrong functions on real ranks: the values come back, or one report that names the
rank.

All calls are made at the same time, since some do nothing but wait for their time limit.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fsdplab.sessions import RanksFailed, RankValues, call_on_ranks
from fsdplab.sessions.worker import rank_process

LEARNER = Path(__file__).with_name("learner.py")
STARTS = ("warm", "torchrun")
# Every way to end a call, under both ways to start: test_sessions_runs.py has the ends of runs in the default tier.
pytestmark = pytest.mark.full("every end of a call")
HANG_AFTER_S = {"warm": 10.0, "torchrun": 40.0}  # a busy machine takes half a minute to start Pythons
CALLS: dict[str, dict[str, Any]] = {
    "hang_on_one": {},  # the hanging ones first: they wait while the others run
    "wait_for_each_other": {},
    "add_up": {"payload": {"start": torch.tensor([1.0, 2.0]), "word": "slice"}},
    "only_the_payload": {"payload": 4, "world_size": 1},
    "pass_around": {},
    "raise_on_one": {},
    "die_on_one": {},
    "exit_on_one": {},
    "leave_on_one": {},
    "forget_to_send": {},
    "return_an_object": {},
}


@pytest.fixture(scope="module")
def by_start() -> dict[tuple[str, str], Any]:
    """What each call gave under each way to start ranks: its values, or its failure."""

    def outcome(case: tuple[str, str]) -> RankValues | RanksFailed:
        start, name = case
        try:
            return call_on_ranks(
                LEARNER,
                name,
                **{
                    "world_size": 2,
                    "time_limit": HANG_AFTER_S[start] if "hang" in name or "wait" in name else 60.0,
                    "start": start,
                    **CALLS[name],
                },
            )
        except RanksFailed as failed:
            return failed

    cases = [(start, name) for name in CALLS for start in STARTS]
    with ThreadPoolExecutor(5) as pool:
        return dict(zip(cases, pool.map(outcome, cases)))


@pytest.fixture(params=STARTS)
def outcomes(request: pytest.FixtureRequest, by_start: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """The same of one way to start them."""
    return {name: ended for (start, name), ended in by_start.items() if start == request.param}


def test_values_output_and_collectives_come_back_in_rank_order(outcomes: dict[str, Any]) -> None:
    values = outcomes["add_up"]
    assert [value["rank"] for value in values] == [0, 1]
    assert all(torch.equal(value["sum"], torch.tensor([3.0, 5.0])) for value in values)
    assert values[0]["again"] == ("slice", [1.5, None, True])
    assert values.output == ["rank 0 has [3.0, 5.0]\n", "rank 1 has [3.0, 5.0]\n"]
    assert values.collectives == [[("all_reduce", 8)]] * 2


def test_a_function_of_the_payload_alone_is_called_with_it(outcomes: dict[str, Any]) -> None:
    assert outcomes["only_the_payload"] == [40]


def test_point_to_point_calls_are_counted_and_work(outcomes: dict[str, Any]) -> None:
    values = outcomes["pass_around"]
    assert values == [1.0, 0.0]
    assert values.collectives[0] == [("isend", 32), ("irecv", 32), ("barrier", 0)]


def test_a_rank_that_raises_is_named_with_its_traceback(outcomes: dict[str, Any]) -> None:
    report = outcomes["raise_on_one"].report
    assert (report.kind, report.rank) == ("raised", 1)
    assert "Rank 1 raised: ValueError: the slices do not fit." in str(outcomes["raise_on_one"])
    assert 'raise ValueError("the slices do not fit")' in report.traceback
    assert "remote_call.py" not in report.traceback


def test_a_rank_that_hangs_is_named_with_the_line_it_hangs_in(outcomes: dict[str, Any]) -> None:
    report = outcomes["hang_on_one"].report
    assert (report.kind, report.rank) == ("hung", 1)
    assert "time.sleep(10_000)" in report.traceback and "dist.all_reduce(torch.ones(4))" in report.traceback


def test_ranks_that_wait_for_each_other_blame_nobody(outcomes: dict[str, Any]) -> None:
    report = outcomes["wait_for_each_other"].report
    assert (report.kind, report.rank) == ("hung", None)
    assert "All ranks wait for each other" in report.message and "recv of 16 bytes" in report.message


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("die_on_one", "SIGKILL (signal 9)"),
        ("exit_on_one", "exit code 3"),
        ("leave_on_one", "exit code 0 before its work was done"),
    ],
)
def test_a_rank_that_dies_is_named_with_how(outcomes: dict[str, Any], name: str, says: str) -> None:
    report = outcomes[name].report
    assert (report.kind, report.rank) == ("died", 1)
    assert says in report.message


def test_a_rank_that_waits_for_one_that_has_finished_says_so(outcomes: dict[str, Any]) -> None:
    report = outcomes["forget_to_send"].report
    assert (report.kind, report.rank) == ("raised", 1)
    assert "Rank 0 had already finished" in report.message and "recv of 16 bytes" in report.message


def test_a_value_that_cannot_travel_is_refused_by_its_type(outcomes: dict[str, Any]) -> None:
    assert (
        "return_an_object returned something of type object, which cannot be sent"
        in outcomes["return_an_object"].report.message
    )


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


def test_a_rank_leaves_only_when_its_peers_have_connected():
    """One that left sooner broke the connection that a peer was making."""
    store, connected = torch.distributed.HashStore(), threading.Event()

    def connect() -> None:
        connected.set()
        store.set(rank_process._connected(1), "")

    store.set(rank_process._connected(0), "")
    late = threading.Timer(0.3, connect)
    late.start()
    rank_process._wait_for_peers(store, 2)
    assert connected.is_set()
    late.join()


def test_a_peer_that_never_connects_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(rank_process, "_PEERS_CONNECT", timedelta(seconds=0.2))
    store, begin = torch.distributed.HashStore(), time.monotonic()
    store.set(rank_process._connected(0), "")
    rank_process._wait_for_peers(store, 2)
    assert time.monotonic() - begin >= 0.2
