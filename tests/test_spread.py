"""A winner is named only beyond chance: the rule on hand-made steps, and by seeded simulation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest

from fsdplab.records import Race, Spread, Summary, is_below, race
from fsdplab.records.spread import least_difference, step_seconds

pytestmark = pytest.mark.quick

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
STEPS: dict[str, Draw] = {
    "normal": lambda rng, shape: 1 + 0.05 * rng.standard_normal(shape),
    "log-normal": lambda rng, shape: np.exp(0.5 * rng.standard_normal(shape)),
    "heavy-tailed": lambda rng, shape: 1 + 0.02 * np.abs(rng.standard_t(2, shape)),
    "outliers": lambda rng, shape: (
        1 + 0.02 * rng.standard_normal(shape) + (rng.random(shape) < 0.15) * rng.exponential(0.8, shape)
    ),
}
TRIALS = 1_000


def test_a_spread_is_the_median_the_quartiles_and_the_extremes() -> None:
    spread = Spread.of([0.5, 0.1, 0.3, 0.2, 0.4])
    assert spread == Spread(median=0.3, min=0.1, q1=0.2, q3=0.4, max=0.5, count=5)
    assert spread.scatter == pytest.approx(1 / 3)
    assert Spread.of([]) == Spread() and Spread().scatter is None
    assert Spread.of([0.2]) == Spread(0.2, 0.2, 0.2, 0.2, 0.2, 1) and Spread.of([0.2]).scatter is None
    (row,) = [{"rank": 0, "step": 1, "step_time_s": None}]
    slowest = [{**row, "rank": rank, "step_time_s": seconds} for rank, seconds in ((0, 0.1), (1, 0.3))]
    assert step_seconds([row, *slowest]) == [0.3], "a step is as slow as its slowest rank"


def test_a_record_and_its_json_come_to_the_same_race() -> None:
    spreads = [Spread.of([0.50, 0.51, 0.52, 0.53]), Spread.of([0.40, 0.41, 0.42, 0.43])]
    again = [Summary.from_dict(json.loads(json.dumps({"step_time_s": asdict(each)}))).step_time_s for each in spreads]
    assert again == spreads and race(again) == race(spreads) == Race((1,))


@pytest.mark.parametrize(
    ("fast", "slow"),
    [
        (Spread.of([0.4]), Spread.of([0.5])),
        (Spread.of([0.4] * 3), Spread.of([0.5] * 3)),
        (Spread.of([0.4] * 4), Spread.of([0.5] * 3)),
        (Spread(), Spread.of([0.5] * 4)),
        (Spread(median=0.4, min=0.3), Spread(median=0.5, min=0.4)),
        (Spread.of([0.4] * 4), Spread.of([0.405] * 4)),
        (Spread.of([0.4, 0.4, 0.4, 0.51]), Spread.of([0.5] * 4)),
        (Spread.of([0.5] * 4), Spread.of([0.4] * 4)),
    ],
    ids=["one step", "three", "three of one", "no step", "a record of before", "1 %", "one step is longer", "slower"],
)
def test_what_is_no_claim(fast: Spread, slow: Spread) -> None:
    assert not is_below(fast, slow)


def test_equal_steps_and_steps_of_nothing_divide_by_nothing() -> None:
    same = Spread.of([0.4] * 6)
    assert is_below(same, Spread.of([0.5] * 6)) and least_difference(same, same) == pytest.approx(0.02 * 0.4)
    assert race([Spread(), Spread()]) == race([]) == Race(()) and race([Spread.of([0.3])]).winner == 0
    assert race([Spread.of([0.0] * 4), same]).winner == 1, "a step of no time is no step"


def test_runs_that_cannot_be_told_apart_lead_together() -> None:
    first, second = Spread.of([0.40, 0.41, 0.42, 0.43]), Spread.of([0.41, 0.42, 0.43, 0.44])
    slow = Spread.of([0.80, 0.81, 0.82, 0.83])
    found = race([slow, second, Spread(), first])
    assert found.leaders == (3, 1) and found.winner is None
    assert found.within == pytest.approx(least_difference(first, second) / first.median)
    assert not is_below(first, second) and is_below(first, slow)
    shifted = Spread.of([each + found.within * first.median for each in (0.41, 0.42, 0.43, 0.44)])
    assert is_below(first, shifted), "so far apart they are distinguished"
    assert race([Spread.of([0.4] * 2), Spread.of([0.5] * 2)]) == Race((0, 1), within=None)


def claims(trials: np.ndarray) -> float:
    """The part of the trials (trial, run, step) in which one run is called fastest."""
    return float(np.mean([race([Spread.of(run.tolist()) for run in trial]).winner is not None for trial in trials]))


@pytest.mark.parametrize("steps", [4, 10, 30])
@pytest.mark.parametrize("runs", [2, 3, 8])
@pytest.mark.parametrize("kind", STEPS)
def test_among_equal_runs_a_winner_is_rare(kind: str, runs: int, steps: int) -> None:
    drawn = STEPS[kind](np.random.default_rng(36), (TRIALS // (runs - 1), runs, steps))
    assert claims(drawn) <= 0.02


@pytest.mark.parametrize("steps", [4, 10, 30])
def test_a_run_that_is_15_percent_faster_is_found(steps: int) -> None:
    drawn = 1 + 0.02 * np.random.default_rng(36).standard_normal((TRIALS, 2, steps))
    drawn[:, 1] *= 0.85
    winners = [race([Spread.of(run.tolist()) for run in trial]).winner for trial in drawn]
    assert winners.count(1) >= 0.95 * TRIALS and winners.count(0) == 0
