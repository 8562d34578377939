"""How often a late rank is found, and how often one is named though none is late: the table of docs/reading_results.md.

    python -m tests.late_rank_power

Steps are simulated (seeded). Each of ten collectives waits for its last rank; between two of them a rank computes. Its
times scatter by 3 %: each segment by itself, or all segments of a step together, as clocks and temperatures do it.
Where the machine is busy, another process takes 10 to 50 ms of a step of 400 ms from one rank in half of the steps,
often the same rank in the next step too, and the speed of each rank drifts by 0.5 %.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fsdplab.profiling.late_rank import CHANCE, FEWEST_STEPS
from fsdplab.profiling.lateness import effects, own_delays_by_clock, verdict

MS = 1_000_000
STEP = 400 * MS
RANKS, STEPS, COLLECTIVES = (2, 4, 8, 64), (10, 20), 10
JITTER = 0.03
TRANSFER = MS


def drift(rng: np.random.Generator, jobs: int, steps: int, ranks: int, correlation: float = 0.8) -> np.ndarray:
    drift = rng.standard_normal((jobs, steps, ranks))
    for step in range(1, steps):
        drift[:, step] = correlation * drift[:, step - 1] + np.sqrt(1 - correlation**2) * drift[:, step]
    return drift


def disturb(rng: np.random.Generator, segments: np.ndarray, stays: float) -> None:
    """Another process takes time from one rank, in half of the steps."""
    jobs, steps, collectives, ranks = segments.shape
    victim, runs = rng.integers(ranks, size=(jobs, steps)), rng.random((jobs, steps)) < 0.5
    for step in range(1, steps):
        same = rng.random(jobs) < stays
        victim[same, step], runs[same, step] = victim[same, step - 1], runs[same, step - 1]
    number = rng.integers(1, 6, size=(jobs, steps))
    place = np.arange(collectives) - rng.integers(collectives, size=(jobs, steps))[..., None]
    takes = runs * rng.uniform(10 * MS, 50 * MS, size=(jobs, steps)) / number
    job, step = np.ogrid[:jobs, :steps]
    segments[job, step, :, victim] += np.where((place >= 0) & (place < number[..., None]), takes[..., None], 0)


def work(
    rng: np.random.Generator,
    jobs: int,
    steps: int,
    ranks: int,
    *,
    together: bool,
    slower: float = 0.0,
    busy: bool = False,
) -> np.ndarray:
    """How long each rank computes before each collective, in ns: jobs x steps x collectives x ranks. The last rank's
    steps are longer by `slower`, as a part of a step. `together`: the segments of a step scatter together.
    """
    lengths = rng.gamma(8, size=(jobs, 1, COLLECTIVES, 1))
    lengths *= STEP / lengths.sum(axis=2, keepdims=True)
    segments = lengths * np.exp(JITTER * rng.standard_normal((jobs, steps, 1 if together else COLLECTIVES, ranks)))
    segments = segments * np.exp(0.05 * rng.standard_normal((jobs, steps, 1, 1)))  # as a whole, on all ranks
    segments[..., -1] *= 1 + slower
    if busy:
        segments *= np.exp(0.005 * drift(rng, jobs, steps, ranks))[:, :, None]
        disturb(rng, segments, 0.5)
    return segments


def named(segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the rank that is named in each job, -1 where none is; the effect of the last rank, as a part of a step), where
    all ranks wait at each collective for the last one.
    """
    jobs, steps, collectives, ranks = segments.shape
    times, own_clock = np.empty_like(segments), np.empty_like(segments)
    released, worked = np.zeros((jobs, 1)), np.zeros((jobs, ranks))
    for step in range(steps):
        for number in range(collectives):
            worked = worked + segments[:, step, number]
            own_clock[:, step, number] = worked
            times[:, step, number] = released + segments[:, step, number]
            released = times[:, step, number].max(axis=-1, keepdims=True) + TRANSFER
            worked = worked + TRANSFER
    own = own_delays_by_clock(times, own_clock, [(step, 0) for step in range(steps)])
    found = np.full(jobs, -1)
    if steps >= FEWEST_STEPS:
        index, p_value = verdict(own, STEP, ranks)
        found = np.where(p_value <= CHANCE, index, -1)
    return found, effects(own)[:, -1] / STEP


def rate(ranks: int, steps: int, jobs: int, happens: Callable[[np.ndarray], np.ndarray], **of_work: object) -> float:
    """The part of jobs in which something happens to the rank that is named."""
    rng = np.random.default_rng([ranks, steps, jobs])
    hits = [happens(named(work(rng, 50, steps, ranks, **of_work))[0]) for _ in range(jobs // 50)]  # type: ignore[arg-type]
    return float(np.mean(hits))


def table(jobs: int = 500) -> list[str]:
    """The rows, as Markdown."""
    lines = [
        "| ranks | steps | jitter of | found: 3 % late | 5 % late | 8 % late | false alarms | on a busy machine |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for ranks in RANKS:
        for steps in STEPS:
            many = jobs if ranks < 64 else jobs // 5
            for together in (False, True):
                found = [
                    rate(ranks, steps, many, lambda who, last=ranks - 1: who == last, together=together, slower=late)
                    for late in (0.03, 0.05, 0.08)
                ]
                alarms = [
                    rate(ranks, steps, 4 * many, lambda who: who >= 0, together=together, busy=busy)
                    for busy in (False, True)
                ]
                cells = [*(f"{part:.0%}" for part in found), *(f"{part:.1%}" for part in alarms)]
                lines.append(
                    f"| {ranks} | {steps} | {'whole steps' if together else 'each segment'} | {' | '.join(cells)} |"
                )
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
