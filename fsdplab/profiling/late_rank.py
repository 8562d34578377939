"""Which rank, if any, is persistently late to the collectives of a run's steps, beyond chance.

On a busy machine some rank is always last, and it often stays last for several collectives, because ranks run ahead of
each other between the collectives for which they really wait. The evidence is therefore the step and not the collective,
and a rank is named only if three statements hold:

1. Chance. Each step puts the ranks in the order of their own delays. If no rank were slower than another, every order
   would be equally likely, and the sum of a rank's places over the steps has an exact distribution. The probability of a
   sum as high as the rank's, times the number of ranks that might have been named, is at most 1 %.
2. Effect. The rank delays a step by at least 2 % of its length: by the median over the steps at each collective, summed
   over the collectives, so that a disturbance now and then counts for nothing. Of more than two ranks it stands out by
   three times the spread of the others.
3. Repetition. The same rank has the largest effect, of at least 2 %, in the first half of the steps and in the second.

A half needs three steps for one bad step not to decide it. So with six steps a rank can be named among three ranks or
more; two ranks need eight steps, because each step is then a coin toss (2 x 0.5^8 = 0.8 %).

The test assumes that one step's disturbance says nothing about the next step's. The medians and the two halves allow for
disturbances that stay on a rank for a few steps. Work that slows the same rank down in all of the steps is a late rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Key = tuple[int, str, str, str, int]  # step, unit, phase, kind, occurrence
Arrivals = Mapping[Key, Mapping[int, int]]  # of each collective: rank -> when it came, in ns
Array = Any  # a numpy array of floats

CHANCE = 0.01  # largest probability of naming a rank although none is slower
WORTH_NAMING = 0.02  # part of a step below which a delay is not mentioned
STANDS_OUT = 3.0  # spreads of the other ranks' effects by which a late rank's effect exceeds them
FEWEST_STEPS = 6
_ALL_IN_ONE_PHASE = 0.9  # part of the rank's delay from which on it is late in that phase only


@dataclass(frozen=True)
class LateRank:
    """The rank that is late: it came last to `last` of `of` collectives, `by_ns` after the middle of the others (median).

    `a_step_ns` is what its own delays add to a step. `p_value` is the probability that chance names a rank with such an
    order of steps, corrected for the number of ranks. `phase` is "" if the rank is late in more than one phase; all
    figures are of the phase.
    """

    rank: int
    last: int
    of: int
    by_ns: float
    a_step_ns: float
    p_value: float
    phase: str = ""


@dataclass(frozen=True)
class _Peers:
    """Ranks that take part in the same collectives. `times` is steps x collectives x ranks, in ns since each step's first
    arrival; collectives are in time order.
    """

    ranks: tuple[int, ...]
    phases: tuple[str, ...]
    times: Array


def late_rank(arrivals: Arrivals, step_ns: float) -> LateRank | None:
    """The rank that is persistently late in these steps of `step_ns` each; None if none is, or if the steps are too few.

    Steps and collectives that not all peers recorded are left out. Rank 7 of 8 that comes 6.1 ms after the others to 3 of
    5 collectives in each of 6 steps of 100 ms: `LateRank(7, 18, 30, 6.1e6, 18.3e6, 3.1e-05)`.
    """
    if not step_ns > 0:
        raise ValueError(f"a step of {step_ns} ns: expected its length in ns, above 0")
    groups = [peers for peers in _peers(arrivals) if len(peers.times) >= FEWEST_STEPS]
    candidates = sum(len(peers.ranks) for peers in groups)
    found = [late for peers in groups if (late := _late(peers, candidates, step_ns)) is not None]
    return max(found, key=lambda late: late.a_step_ns, default=None)


def _late(peers: _Peers, candidates: int, step_ns: float) -> LateRank | None:
    own = own_delays(peers.times)
    index, p_value = verdict(own, step_ns, candidates)
    if p_value > CHANCE:
        return None
    phase = _phase(peers.phases, np.median(own[..., index], axis=0))
    within = np.array([phase in ("", each) for each in peers.phases])
    late = lateness(peers.times)[:, within]
    last = late.argmax(axis=-1) == index
    return LateRank(
        rank=peers.ranks[index], last=int(last.sum()), of=last.size, by_ns=float(np.median(late[..., index])),
        a_step_ns=float(effects(own[:, within])[index]), p_value=float(p_value), phase=phase,
    )  # fmt: skip


def _phase(phases: Sequence[str], delays: Array) -> str:
    """The phase with nearly all of the rank's delay; "" if there is no such phase, or no other."""
    by_phase: dict[str, float] = defaultdict(float)
    for phase, delay in zip(phases, delays):
        by_phase[phase] += delay
    most = max(by_phase, key=by_phase.__getitem__)
    return most if len(by_phase) > 1 and by_phase[most] >= _ALL_IN_ONE_PHASE * sum(delays) else ""


# ---- arrivals as arrays


def _peers(arrivals: Arrivals) -> Iterator[_Peers]:
    """The collectives that all complete steps have, by the ranks that take part in them."""
    steps = _complete_steps(arrivals)
    begins = {step: min(min(times.values()) for key, times in arrivals.items() if key[0] == step) for step in steps}
    by_ranks: dict[tuple[int, ...], list[tuple[str, Array]]] = defaultdict(list)
    for name in sorted({key[1:] for key in arrivals}):
        each = [arrivals.get((step, *name), {}) for step in steps]
        ranks = tuple(sorted(each[0]))
        if len(ranks) > 1 and all(times.keys() == each[0].keys() for times in each):
            since = [[times[rank] - begins[step] for rank in ranks] for step, times in zip(steps, each)]
            by_ranks[ranks].append((name[1], np.array(since, dtype=float)))
    for ranks, columns in by_ranks.items():
        columns.sort(key=lambda column: column[1].max(axis=-1).mean())
        yield _Peers(ranks, tuple(phase for phase, _ in columns), np.stack([times for _, times in columns], axis=1))


def _complete_steps(arrivals: Arrivals) -> list[int]:
    """Steps with at least half of the arrivals of the step that has most: a trace may begin or end within a step."""
    counts: dict[int, int] = defaultdict(int)
    for key, times in arrivals.items():
        counts[key[0]] += len(times)
    return sorted(step for step, count in counts.items() if 2 * count >= max(counts.values()) > 0)


# ---- the statistics, on arrays (..., steps, collectives, ranks)


def lateness(times: Array) -> Array:
    """By how much each rank came after the median of the other ranks; below 0 where it was early. Same shape."""
    ordered = np.sort(times, axis=-1)
    middles = []
    for place in ((times.shape[-1] - 2) // 2, (times.shape[-1] - 1) // 2):  # of the others, in order
        without = times <= ordered[..., place, None]  # the rank itself is before the place: the others move up
        middles.append(np.where(without, ordered[..., place + 1, None], ordered[..., place, None]))
    return times - (middles[0] + middles[1]) / 2


def own_delays(times: Array) -> Array:
    """The part of each lateness that arose since the previous collective. Same shape.

    If ranks wait for each other at every collective, all of a lateness is new. If they run ahead, a rank that is late
    once stays late, and only what it adds is new: of a rank that comes 1, 2, 3 ms late, 1 ms each time. A lateness
    survives at most as long as the others compute until the next collective.
    """
    late = lateness(times)
    if times.shape[-2] < 2:
        return late
    released = times.max(axis=-1, keepdims=True)
    until_next = np.maximum(np.diff(released, axis=-2), 0.0)
    carried = np.clip(late[..., :-1, :], -until_next, until_next)
    kept = 1.0 - _waited(times, released, until_next)[..., None, None, None]
    return np.concatenate([late[..., :1, :], late[..., 1:, :] - kept * carried], axis=-2)


def _waited(times: Array, released: Array, until_next: Array) -> Array:
    """Which part of the time until a collective's last rank came the other ranks wait for it, from 0 to 1. Shape (...).

    It is the slope of a rank's time from one arrival to the next over the time for which it had to wait, if it did:
    from step to step at the same collective, after removing how slow the whole step was.
    """
    ahead = (released - times)[..., :-1, :]
    interval = np.diff(times, axis=-2)
    usual = np.median(interval, axis=-3, keepdims=True)
    pace = np.divide(interval, usual, out=np.ones_like(interval), where=usual > 0)
    interval = interval - np.median(pace, axis=(-2, -1), keepdims=True) * usual
    clear = ahead < until_next / 2  # beyond it even a rank that runs ahead may have to wait
    number = np.maximum(clear.sum(axis=-3, keepdims=True), 1)
    ahead, interval = (
        np.where(clear, values - np.where(clear, values, 0).sum(axis=-3, keepdims=True) / number, 0)
        for values in (ahead, interval)
    )
    of_all = (-3, -2, -1)
    as_nothing_is_known = 1.0  # ns^2: without any variation, ranks count as waiting
    slope = ((ahead * interval).sum(of_all) + as_nothing_is_known) / ((ahead**2).sum(of_all) + as_nothing_is_known)
    return np.clip(slope, 0.0, 1.0)


def effects(own: Array) -> Array:
    """By how much each rank delays a step: at each collective the median over the steps, summed. Shape (..., ranks)."""
    return np.median(own, axis=-3).sum(axis=-2)


def verdict(own: Array, step_ns: float, candidates: int) -> tuple[Array, Array]:
    """(index of the rank with the largest effect, its p-value corrected for the candidates, 1 where its effect is too
    small or does not repeat), each of shape (...).
    """
    steps, ranks = own.shape[-3], own.shape[-1]
    halves = [effects(own[..., : (steps + 1) // 2, :, :]), effects(own[..., (steps + 1) // 2 :, :, :])]
    whole = effects(own)
    index = whole.argmax(axis=-1)
    enough = (_of(whole, index) >= WORTH_NAMING * step_ns) & _stands_out(whole)
    for half in halves:
        enough &= (half.argmax(axis=-1) == index) & (_of(half, index) >= WORTH_NAMING * step_ns)
    chance = _tail(ranks, steps)[_places(own, index).sum(axis=-1)]
    return index, np.where(enough, np.minimum(1.0, candidates * chance), 1.0)


def _of(values: Array, index: Array) -> Array:
    return np.take_along_axis(values, index[..., None], axis=-1)[..., 0]


def _stands_out(effect: Array) -> Array:
    """Whether the largest effect exceeds the others by more than they differ among each other."""
    ordered = np.sort(effect, axis=-1)
    others = ordered[..., :-1]
    middle = np.median(others, axis=-1)
    spread = 1.4826 * np.median(np.abs(others - middle[..., None]), axis=-1)  # of normal noise: its deviation
    return ordered[..., -1] - middle >= STANDS_OUT * spread


def _places(own: Array, index: Array) -> Array:
    """How many ranks one rank was later than, in each step. Shape (..., steps).

    A delay counts for no more than is usual, in the rank where it is largest, at the same collective: so one long
    disturbance does not outweigh a step.
    """
    usual = np.median(np.abs(own), axis=-3, keepdims=True).max(axis=-1, keepdims=True)
    in_all = np.clip(own, -usual, usual).sum(axis=-2)
    mine = np.take_along_axis(in_all, index[..., None, None], axis=-1)
    return (mine > in_all).sum(axis=-1)


def _tail(ranks: int, steps: int) -> Array:
    """The probability that the places of one rank, each from 0 to ranks - 1 by chance, sum to at least 0, 1, 2, ..."""
    size = steps * (ranks - 1) + 1
    sums = np.fft.irfft(np.fft.rfft(np.full(ranks, 1 / ranks), size) ** steps, size)
    return np.clip(np.cumsum(sums[::-1])[::-1], float(ranks) ** -steps, 1.0)
