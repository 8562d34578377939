"""Who came late: arrivals matched over ranks, clocks set alike, and a verdict only on what repeats."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdplab.profiling.arrivals import LateRank, arrivals_of, late_rank, late_rank_of
from fsdplab.records import RunRecord

pytestmark = pytest.mark.quick
MS = 1_000_000


def row(rank: int, start: float, end: float, name: str = "all_gather", phase: str = "", **more: object) -> dict:
    lane = name if name in ("all_gather", "reduce_scatter", "all_reduce") else "other_communication"
    return {
        "rank": rank, "step": 3, "lane": lane, "unit": "a", "phase": phase, "name": name,
        "start_ns": round(start * MS), "end_ns": round(end * MS), "emulated": False, **more,
    }  # fmt: skip


def came(rows: list[dict]) -> dict:
    """Arrivals in ms, by name, phase and number."""
    found, _ = arrivals_of(RunRecord(Path("nowhere"), tables={"timeline": rows}), {3})
    return {key[2:]: {rank: ns / MS for rank, ns in times.items()} for key, times in found.items()}


def test_the_nth_meets_the_nth_and_copies_are_no_collectives() -> None:
    rows = [row(rank, 10 * number + rank, 10 * number + 5) for rank in (0, 1) for number in (0, 1)]
    rows += [row(0, 3, 4, "all_gather") | {"name": "all_gather copy-out"}, row(0, 50, 60, "all_reduce")]
    assert came(rows) == {("", "all_gather", 0): {0: 0, 1: 1}, ("", "all_gather", 1): {0: 10, 1: 11}}, (
        "one alone is out"
    )


def test_sends_receives_and_all_to_all_count() -> None:
    rows = [row(0, 1, 9, "send_recv", "forward"), row(1, 4, 9, "send_recv", "backward"),
            row(0, 11, 19, "all_to_all"), row(1, 13, 19, "all_to_all")]  # fmt: skip
    assert came(rows) == {("", "send_recv", 0): {0: 1, 1: 4}, ("", "all_to_all", 0): {0: 11, 1: 13}}


def test_a_pipelines_sends_do_not_say_who_meets_whom() -> None:
    ring = [row(rank, rank, 9, "send_recv") for rank in range(3)]
    assert came(ring) == {("", "send_recv", 0): {0: 0, 1: 1, 2: 2}}
    assert came([*ring, row(1, 20, 29, "send_recv")]) == {}, "the middle stage sends and receives"


def test_clocks_that_are_apart_are_set_alike() -> None:
    """Rank 1's clock is 70 ms ahead; it comes 2 ms before rank 0, and both end together."""
    rows = [row(0, 10 * n + 2, 10 * n + 5) for n in range(4)] + [row(1, 70 + 10 * n, 75 + 10 * n) for n in range(4)]
    assert [times[0] - times[1] for times in came(rows).values()] == [2, 2, 2, 2]


def arrivals(*late_ms: float, rank: int = 1, steps: int = 1, phase: str = "") -> dict:
    """One rank's lateness to the collectives of each step, beside two others that come at once."""
    return {
        (step, "a", phase, "all_gather", number): {0: 0, rank: round(ms * MS), 2: 0}
        for step in range(steps)
        for number, ms in enumerate(late_ms)
    }


def test_late_is_who_is_last_in_a_clear_majority_by_more_than_it_scatters() -> None:
    assert late_rank(arrivals(6.1, 6.1, 6.1, 6.1, 6.1, 0, 0, 0)) == LateRank(1, 5, 8, 6.1 * MS, 5 * 6.1 * MS)
    assert late_rank(arrivals(6, 6, 6, 6, -1, -1, -1, -1)) is None, "half of them is no clear majority"
    assert late_rank(arrivals(6, 0.1, 12, 0.2, 0.1, -9)) is None, "it scatters by more than it is late"
    assert late_rank(arrivals(6, 6, 6)) is None, "three are too few"


def test_late_in_one_step_only_does_not_repeat() -> None:
    later = {(step, *key[1:]): {0: 0, 1: 0, 2: 5} for key in arrivals(9, 9, 9, 9) for step in (1, 2)}
    assert late_rank(arrivals(*[9] * 20) | later) is None
    assert late_rank(arrivals(9, 9, 9, 9, steps=3)) == LateRank(1, 12, 12, 9 * MS, 36 * MS)


def test_late_in_one_phase_is_late_there() -> None:
    """It computes more in the forward only: in the backward nobody is late for long."""
    backward = {key: {0: 1, 1: 0, 2: 0} for key in arrivals(*[0] * 30, phase="backward")}
    late = late_rank(arrivals(5, 5, 6, 5, phase="forward") | backward)
    assert late == LateRank(1, 4, 4, 5 * MS, 21 * MS, "forward")


def test_timed_steps_count_where_the_ledger_has_them() -> None:
    """Late in the two profiled steps, in turns in the six timed ones: a busy machine."""
    late = lambda rank, step: rank == (1 if step >= 6 else step % 2)  # noqa: E731
    ledger = [
        {"rank": rank, "step": step, "unit": "a", "phase": "forward", "kind": "all_gather",
         "start_ns": (10 * number + 3 * late(rank, step)) * MS, "end_ns": (10 * number + 5) * MS}
        for step in range(8) for rank in (0, 1) for number in range(5)
    ]  # fmt: skip
    steps = [{"step": step, "step_time_s": 0.1 if step < 6 else None} for step in range(8)]
    record = RunRecord(Path("nowhere"), tables={"ledger": ledger, "steps": steps})
    assert late_rank(arrivals_of(record, {6, 7})[0]) == LateRank(1, 10, 10, 3 * MS, 15 * MS)
    assert late_rank_of(record, {6, 7}) is None
    assert late_rank_of(RunRecord(Path("nowhere"), tables={"ledger": ledger}), {6, 7}) is not None
