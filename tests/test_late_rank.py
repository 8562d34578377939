"""A rank is named late only beyond chance: false alarms and power of the rule on simulated steps, and its edges.

The simulated steps take 400 ms. Each rank computes segments with noise of 3 %, and at each collective it waits for the
last rank: at once, or, as with prefetching, one segment later. A step is as a whole some percent slower or faster than
the next. The machine is busy: in half of the steps another process takes 10 to 50 ms from one rank, over one to five
collectives, and stays there for the next step with probability 1/2. The speed of each rank drifts by 0.5 %, with a
correlation of 0.8 from one step to the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from fsdplab.profiling.late_rank import CHANCE, FEWEST_STEPS, LateRank, late_rank, late_rank_of
from fsdplab.profiling.lateness import WORTH_NAMING, effects, lateness, own_delays, probability, verdict
from fsdplab.records import RunRecord
from tests.late_rank_power import MS, STEP, disturb, drift, work
from tests.late_rank_power import named as named_by_clock

RANKS, STEPS = (2, 4, 8, 64), (4, 6, 10, 20)
LARGE = [(64, 10), (64, 20)]  # take a second or more
quick = pytest.mark.quick


# ---- the simulation: arrivals of (jobs, steps, collectives, ranks) in ns


def simulated(
    rng: np.random.Generator, jobs: int, steps: int, ranks: int, collectives: int = 10, *,
    slower: np.ndarray | float = 1.0, waits: bool = True, busy: bool = True, stays: float = 0.5, drifts: float = 0.005,
) -> np.ndarray:  # fmt: skip
    """Arrivals; a rank's segments take `slower` times as long. `slower` has the shape (collectives, ranks) or less."""
    shape = jobs, steps, collectives, ranks
    lengths = rng.gamma(8, size=(jobs, 1, collectives, 1))
    lengths *= STEP / lengths.sum(axis=2, keepdims=True)
    segments = lengths.astype(np.float32) * np.exp(np.float32(0.03) * rng.standard_normal(shape, dtype=np.float32))
    segments *= np.exp(0.05 * rng.standard_normal((jobs, steps, 1, 1))).astype(np.float32) * np.float32(slower)
    if busy:
        segments *= np.exp(drifts * drift(rng, jobs, steps, ranks))[:, :, None].astype(np.float32)
        disturb(rng, segments, stays)
    arrivals = np.empty(shape, dtype=np.float32)
    now, released = np.zeros((jobs, steps, ranks), np.float32), np.zeros((jobs, steps, 1), np.float32)
    for number in range(collectives):
        segment = segments[:, :, number]
        now = np.maximum(now, released) + segment if waits else np.maximum(now + segment, released)
        arrivals[:, :, number] = now
        released = now.max(axis=-1, keepdims=True) + np.float32(MS)
    return arrivals


def named(arrivals: np.ndarray) -> np.ndarray:
    """The rank that is named in each job, -1 where none is. Jobs with small effects need no test."""
    found = np.full(len(arrivals), -1)
    if arrivals.shape[1] < FEWEST_STEPS:
        return found
    own = own_delays(arrivals, ["all_gather"] * arrivals.shape[2])
    worth = effects(own).max(axis=-1) >= WORTH_NAMING * STEP
    if worth.any():
        index, p_value = verdict(own[worth], STEP, arrivals.shape[-1])
        found[worth] = np.where(p_value <= CHANCE, index, -1)
    return found


def one_slower(ranks: int, times: float, collectives: int = 10, only: slice = slice(None)) -> np.ndarray:
    """The last rank is so many times slower, in all collectives or in some."""
    slower = np.ones((collectives, ranks))
    slower[only, -1] = times
    return slower


def as_arrivals(times: np.ndarray, phases: int | None = None) -> dict:
    """One job's arrivals as the record has them: the first `phases` collectives of the forward, the others backward."""
    forward = times.shape[1] if phases is None else phases
    return {
        (step, f"unit{number}", "forward" if number < forward else "backward", "all_gather", 0): {
            rank: 10**18 + step * 10**9 + round(float(at)) for rank, at in enumerate(ranks)
        }
        for step, collectives in enumerate(times)
        for number, ranks in enumerate(collectives)
    }


# ---- chance


EACH = list(itertools.product(RANKS, STEPS))


@pytest.mark.parametrize(
    ("ranks", "steps"), [pytest.param(*each, marks=() if each in LARGE else quick) for each in EACH]
)
def test_of_ranks_that_are_alike_at_most_one_in_a_hundred_jobs_names_one(ranks: int, steps: int) -> None:
    rng = np.random.default_rng(1000 * ranks + steps)
    alarms = [named(simulated(rng, 1_000, steps, ranks, waits=waits)) >= 0 for waits in (True, False)]
    assert np.mean(alarms) <= 0.01


@quick
def test_the_probability_of_a_sum_of_ranked_delays_is_exact() -> None:
    """Of all 3^4 ways in which one of three ranks could have been each rank in four steps."""
    delays = np.random.default_rng(2).standard_normal((4, 3))
    aligned = delays - delays.mean(axis=1, keepdims=True)
    scores = (aligned[..., None, None] > aligned).sum(axis=(-2, -1)) * 100 // 12
    sums = np.array([sum(chosen) for chosen in itertools.product(*scores)])
    for rank in range(3):
        assert probability(delays, np.array(rank)) == pytest.approx(np.mean(sums >= scores[:, rank].sum()))
    late = np.zeros((20, 64)) + np.arange(64)
    assert probability(late, np.array(63)) == pytest.approx(64.0**-20), "also where it is far below rounding"


@quick
@pytest.mark.parametrize(("ranks", "fewest"), [(2, 8), (3, 6), (4, 6), (8, 6), (64, 6)])
def test_the_smallest_number_of_steps_with_which_a_rank_can_be_named(ranks: int, fewest: int) -> None:
    found = [late_rank(constant(steps, ranks, 20.0), STEP) for steps in range(1, fewest + 1)]
    assert found[:-1] == [None] * (fewest - 1)
    assert found[-1] is not None and found[-1].rank == ranks - 1
    assert found[-1].p_value == pytest.approx(ranks * float(ranks) ** -fewest, rel=1e-6)


# ---- power


@quick
@pytest.mark.parametrize("waits", [True, False], ids=["waits", "prefetches"])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_that_is_5_percent_slower_is_found_in_ten_steps(ranks: int, waits: bool) -> None:
    rng = np.random.default_rng(ranks)
    arrivals = simulated(rng, 200, 10, ranks, slower=one_slower(ranks, 1.05), waits=waits, busy=False)
    assert np.mean(named(arrivals) == ranks - 1) >= 0.9


@quick
def test_a_rank_that_is_5_percent_slower_is_found_on_a_busy_machine_of_more_than_two_ranks() -> None:
    rng = np.random.default_rng(0)
    found = named(simulated(rng, 200, 10, 8, 20, slower=one_slower(8, 1.05, 20)))
    assert np.mean(found == 7) >= 0.9


@quick
@pytest.mark.parametrize("waits", [True, False], ids=["waits", "prefetches"])
def test_its_cost_is_what_it_computes_longer_however_late_it_comes(waits: bool) -> None:
    """5 % of 400 ms. With prefetching it comes ever later to the next collectives; that is no new delay."""
    rng = np.random.default_rng(5)
    (times,) = simulated(rng, 1, 10, 4, 20, slower=one_slower(4, 1.05, 20), waits=waits, busy=False)
    found = late_rank(as_arrivals(times), STEP)
    assert found is not None and found.a_step_ns == pytest.approx(20 * MS, rel=0.2)
    summed = np.median(lateness(times.astype(float))[..., 3], axis=0).sum()
    assert waits or summed > 4 * found.a_step_ns


@quick
def test_late_in_backward_only_is_late_there() -> None:
    rng = np.random.default_rng(1)
    slower = one_slower(4, 1.05, 30, only=slice(10, None))
    jobs = simulated(rng, 50, 10, 4, 30, slower=slower, busy=False)
    assert np.mean(named(jobs) == 3) >= 0.9
    found = late_rank(as_arrivals(jobs[0], phases=10), STEP)
    assert found is not None and (found.rank, found.phase, found.of) == (3, "backward", 200)
    everywhere = simulated(rng, 1, 10, 4, 30, slower=one_slower(4, 1.05, 30), busy=False)[0]
    assert getattr(late_rank(as_arrivals(everywhere, phases=10), STEP), "phase", None) == ""


@quick
def test_of_two_slower_ranks_one_of_them_is_named_or_none() -> None:
    slower = np.ones((10, 8))
    slower[:, :2] = 1.05
    found = named(simulated(np.random.default_rng(2), 200, 10, 8, slower=slower))
    assert set(found) <= {-1, 0, 1}


# ---- on clocks that stand still while a rank waits


@quick
@pytest.mark.parametrize(("ranks", "least"), [(2, 0.4), (4, 0.6), (8, 0.6)])
def test_a_rank_is_found_with_its_right_size_where_whole_steps_vary(ranks: int, least: float) -> None:
    """By 3 % on each rank, as clocks and temperatures make it: a rank that is 5 % late, in ten steps."""
    found, effect = named_by_clock(work(np.random.default_rng(1), 200, 10, ranks, together=True, slower=0.05))
    assert np.mean(found == ranks - 1) >= least and np.median(effect) == pytest.approx(0.05, abs=0.005)
    alarms, _ = named_by_clock(work(np.random.default_rng(2), 1_000, 10, ranks, together=True))
    assert np.mean(alarms >= 0) <= 0.01


def recorded(segments: np.ndarray, transfer: int = MS, name: str = "collectives") -> RunRecord:
    """A record of ranks that compute these segments (steps x collectives x ranks) and wait at each collective."""
    rows, now, ranks = [], 0, range(segments.shape[-1])
    for step, of_step in enumerate(segments):
        for number, took in enumerate(of_step):
            came = [now + round(float(each)) for each in took]
            last, now = max(came), max(came) + transfer
            for rank in ranks:
                waited = {"waiting_ns": last - came[rank], "on_link_ns": transfer}
                waited = waited if name == "collectives" else {"waited_ns": now - came[rank]}
                rows.append({
                    "rank": rank, "step": step, "unit": f"u{number}", "phase": "forward", "kind": "all_gather",
                    "issue_ns": came[rank], "start_ns": came[rank], "end_ns": now, **waited,
                })  # fmt: skip
    parts = {
        "step_ns": now // len(segments),
        "compute_ns": 0,
        "compute_only_ns": 0,
        "overlapped_ns": 0,
        "exposed_ns": 0,
    }
    breakdown = [
        {"rank": rank, "step": step, **parts, "other_ns": 0} for rank in ranks for step in range(len(segments))
    ]
    return RunRecord(Path("nowhere"), tables={name: rows, "breakdown": breakdown})


@quick
@pytest.mark.parametrize("table", ["collectives", "ledger"])
def test_a_rank_that_sleeps_through_most_of_each_step_is_late(table: str) -> None:
    """150 ms of 195, in each of ten steps whose length varies by a tenth: the others wait for it, and compute 45 ms."""
    rng = np.random.default_rng(3)
    segments = np.full((10, 3, 2), 15.0 * MS) * rng.uniform(0.9, 1.1, size=(10, 1, 2))
    segments[:, 1, 1] += 150 * MS
    found = late_rank_of(recorded(segments, name=table))
    assert found is not None and found.rank == 1 and found.a_step_ns == pytest.approx(150 * MS, rel=0.05)


@quick
def test_a_rank_that_is_6_percent_slower_is_found_in_most_records_and_with_its_size() -> None:
    """4.9 % of each step of 10, where whole steps vary by 3 %; one of the other ranks sets the pace now and then."""
    late = []
    for seed in range(10):
        segments = work(np.random.default_rng(seed), 1, 10, 4, together=True, slower=0.06)[0]
        late.append(late_rank_of(recorded(0.817 * segments, transfer=round(0.0183 * STEP))))
    found = [each for each in late if each is not None]
    assert len(found) >= 6 and {each.rank for each in found} == {3}
    assert 0.04 < np.mean([each.a_step_ns for each in found]) / STEP < 0.065


# ---- what does not repeat


@quick
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("slow", [range(6), range(6, 12), range(0, 12, 2), [4]], ids=str)
def test_late_in_half_of_the_steps_or_in_one_terrible_step_is_not_late(slow: Iterable[int], ranks: int) -> None:
    """Rank 1 comes 15 ms late to each of ten collectives in these steps."""
    times = simulated(np.random.default_rng(3), 200, 12, ranks, busy=False)
    times[:, list(slow), :, 1] += 15 * MS
    assert np.mean(named(times) >= 0) <= 0.01


@quick
def test_a_delay_below_2_percent_of_the_step_is_not_worth_naming() -> None:
    assert late_rank(constant(10, 4, 7.0), STEP) is None
    assert late_rank(constant(10, 4, 9.0), STEP) is not None


# ---- figures and edges


def constant(steps: int, ranks: int, late_ms: float) -> dict:
    """The last rank comes late by as much to the second of three collectives of each step; the others take turns."""
    turns = np.arange(steps)[:, None] % ranks == np.arange(ranks)
    times = np.array([0.0, 100.0, 200.0])[:, None] * MS + np.zeros((steps, 3, ranks))
    times[:, 0] += turns * 0.1 * MS
    times[:, 1, -1] += late_ms * MS
    return as_arrivals(times)


@quick
def test_the_figures_of_a_rank_that_is_late_to_three_of_five_collectives() -> None:
    late = np.array([6.1, 6.1, 6.1, 0.0, 0.0]) * MS
    times = np.arange(5)[:, None] * 20.0 * MS + np.zeros((6, 5, 8))
    times[..., 7] += late
    found = late_rank(as_arrivals(times), 100 * MS)
    assert found == LateRank(
        7, 18, 30, 6.1 * MS, pytest.approx(18.3 * MS), pytest.approx(18.3 * MS), 1.0, pytest.approx(8**-5), ""
    )


@quick
def test_waiting_for_another_rank_is_not_waiting_for_the_late_one() -> None:
    """Seven ranks wait 6 ms twice for rank 7 and once for rank 0: of 126 ms in all 84 are for rank 7, and 6 for each of
    the other seven on average.
    """
    late = np.zeros((4, 8))
    late[:2, 7] = late[2, 0] = 6 * MS
    times = np.arange(4)[:, None] * 20.0 * MS + np.zeros((6, 4, 8)) + late
    found = late_rank(as_arrivals(times), 100 * MS)
    assert found is not None and found.rank == 7 and found.awaited == pytest.approx((84 - 6) / 126)
    assert found.awaited_ns == pytest.approx((84 - 6) / 7 * MS)
    assert found.of_waiting(2 * MS) == pytest.approx(2 * MS * (84 - 6) / 126)
    assert found.of_waiting(100 * MS) == found.awaited_ns, "its arrivals account for no more"


@quick
def test_lateness_is_after_the_median_of_the_other_ranks() -> None:
    times = np.random.default_rng(4).integers(0, 9, size=(5, 3, 6)).astype(float)
    for ranks in range(2, 7):
        some = times[..., :ranks]
        others = [np.median(np.delete(some, rank, axis=-1), axis=-1) for rank in range(ranks)]
        assert (lateness(some) == some - np.stack(others, axis=-1)).all()


@quick
def test_collectives_of_other_ranks_and_steps_that_were_cut_off_are_left_out() -> None:
    """Stages of a pipeline: ranks 0 and 1, ranks 2 to 5; rank 5 lacks a collective, and the trace ends in a step."""
    stage = {key: {0: times[0], 1: times[1]} for key, times in constant(10, 2, 0.0).items()}
    other = {
        (key[0], f"other {key[1]}", *key[2:]): {rank + 2: time for rank, time in times.items()}
        for key, times in constant(10, 4, 20.0).items()
    }
    whole = late_rank(stage | other, STEP)
    assert whole is not None and (whole.rank, whole.last, whole.of) == (5, 12, 30)
    cut = {key: times for key, times in (stage | other).items() if key[0] < 9 or key[1] == "unit0"}
    del cut[3, "other unit2", "forward", "all_gather", 0][5]
    found = late_rank(cut, STEP)
    assert found is not None and (found.rank, found.of) == (5, 18), "two collectives in nine steps"


@quick
def test_nobody_is_late_where_nothing_can_be_compared() -> None:
    assert late_rank({}, STEP) is None
    assert late_rank({(0, "a", "", "all_gather", 0): {}}, STEP) is None
    alone = {key: {0: times[0]} for key, times in constant(10, 2, 20.0).items()}
    assert late_rank(alone, STEP) is None
    assert late_rank(constant(1, 8, 20.0), STEP) is None, "one step"
    at_once = {key: dict.fromkeys(times, 5) for key, times in constant(10, 4, 20.0).items()}
    assert late_rank(at_once, STEP) is None, "all come at the same time"


@quick
@pytest.mark.parametrize("step_ns", [0, -1.0, float("nan")])
def test_a_step_without_a_length_is_refused(step_ns: float) -> None:
    with pytest.raises(ValueError, match=r"step_ns is .*; expected the length of a step in ns, above 0"):
        late_rank(constant(10, 4, 20.0), step_ns)
