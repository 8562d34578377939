"""Who came late: arrivals matched over ranks, clocks set alike, and a verdict only on what repeats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fsdplab.profiling.arrivals import arrivals_of
from fsdplab.profiling.late_rank import late_rank_of
from fsdplab.records import RunRecord

pytestmark = pytest.mark.quick
MS = 1_000_000


def row(rank: int, start: float, end: float, kind: str = "all_gather", phase: str = "", step: int = 3) -> dict:
    return {
        "rank": rank, "step": step, "unit": "a", "phase": phase, "kind": kind, "issue_ns": round(start * MS),
        "start_ns": round((start + 0.5) * MS), "end_ns": round(end * MS), "emulated": False,
    }  # fmt: skip


def came(rows: list[dict], device: str = "cpu") -> dict:
    """Arrivals in ms, by phase, kind and number."""
    found = arrivals_of(RunRecord(Path("nowhere"), environment={"device": device}, tables={"collectives": rows}), {3})
    return {key[2:5]: {rank: ns / MS for rank, ns in times.items()} for key, times in found.items()}


def test_the_nth_meets_the_nth() -> None:
    rows = [row(rank, 10 * number + rank, 10 * number + 5) for rank in (0, 1) for number in (0, 1)]
    rows += [row(0, 50, 60, "all_reduce")]
    assert came(rows) == {("", "all_gather", 0): {0: 0, 1: 1}, ("", "all_gather", 1): {0: 10, 1: 11}}, (
        "one alone is out"
    )


def test_on_a_gpu_the_device_comes_and_not_its_host() -> None:
    rows = [row(0, 1, 9), row(1, 2, 9)]
    assert came(rows, "cuda") == {("", "all_gather", 0): {0: 1.5, 1: 2.5}}
    assert came(rows) == {("", "all_gather", 0): {0: 1, 1: 2}}


def test_sends_receives_and_all_to_all_count() -> None:
    rows = [row(0, 1, 9, "send_recv", "forward"), row(1, 4, 9, "send_recv", "backward"),
            row(0, 11, 19, "all_to_all"), row(1, 13, 19, "all_to_all")]  # fmt: skip
    assert came(rows) == {("forward", "send_recv", 0): {0: 1, 1: 4}, ("", "all_to_all", 0): {0: 11, 1: 13}}


def test_a_pipelines_sends_do_not_say_who_meets_whom() -> None:
    ring = [row(rank, rank, 9, "send_recv") for rank in range(3)]
    assert came(ring) == {("", "send_recv", 0): {0: 0, 1: 1, 2: 2}}
    assert came([*ring, row(1, 20, 29, "send_recv")]) == {}, "the middle stage sends and receives"


def test_clocks_that_are_apart_are_set_alike() -> None:
    """Rank 1's clock is 70 ms ahead; it comes 2 ms before rank 0, and both end together."""
    rows = [row(0, 10 * n + 2, 10 * n + 5) for n in range(4)] + [row(1, 70 + 10 * n, 75 + 10 * n) for n in range(4)]
    assert [times[0] - times[1] for times in came(rows).values()] == [2, 2, 2, 2]


def test_timed_steps_count_where_the_ledger_has_them() -> None:
    """Late in the two profiled steps, in turns in the timed ones: a busy machine. Late in all of them: late."""

    def record(late: Callable[[int, int], bool]) -> RunRecord:
        ledger = [
            {**row(rank, 10 * number + 3 * late(rank, step), 10 * number + 5, "all_gather", "forward", step),
             "logical_bytes": 1}
            for step in range(10) for rank in (0, 1) for number in range(5)
        ]  # fmt: skip
        steps = [{"step": step, "step_time_s": 0.1 if step < 8 else None} for step in range(10)]
        breakdown = [
            {"rank": rank, "step": step, "step_ns": 100 * MS, "compute_ns": 90 * MS, "compute_only_ns": 90 * MS,
             "overlapped_ns": 0, "exposed_ns": 10 * MS, "other_ns": 0}
            for step in (8, 9) for rank in (0, 1)
        ]  # fmt: skip
        return RunRecord(Path("nowhere"), tables={"ledger": ledger, "steps": steps, "breakdown": breakdown})

    assert late_rank_of(record(lambda rank, step: rank == (1 if step >= 8 else step % 2))) is None
    found = late_rank_of(record(lambda rank, step: rank == 1))
    assert found is not None and (found.rank, found.last, found.of, found.by_ns) == (1, 50, 50, 3 * MS)
    assert late_rank_of(RunRecord(Path("nowhere"))) is None, "no profiled step"


def test_behind_an_emulated_link_a_rank_comes_when_it_issues() -> None:
    """The link starts a collective for all ranks at once."""
    at_once = [{**row(rank, 3 * rank, 9, "all_gather"), "start_ns": 3 * MS, "emulated": True} for rank in (0, 1)]
    assert came(at_once) == {("", "all_gather", 0): {0: 0, 1: 3}}
    without = [{**each, "issue_ns": None} for each in at_once]
    assert came(without) == {("", "all_gather", 0): {0: 3, 1: 3}}, "records of before do not tell"
