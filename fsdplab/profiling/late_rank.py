"""Finds the rank that is persistently late to the collectives of a run's steps, beyond chance.

On a busy machine some rank is always last, and it often stays last for several collectives, because ranks run ahead of
each other between the collectives for which they really wait. The evidence is therefore the step and not the
collective, and a rank is named only if three statements hold:

1. Chance. The own delays of all steps and ranks are ranked. If no rank were slower than another, a rank would have any
   of a step's ranks with the same probability, and the sum of its ranks over the steps would have a known distribution.
   The probability of a sum as high as the rank's, times the number of ranks that might have been named, is at most
   0.8 %.
2. Effect. The rank delays a step by at least 2 % of its length, also after subtracting its error (`_errors`). The
   effect is the median over the steps at each collective, summed over the collectives: an occasional delay does not
   count.
3. Repetition. The same rank has the largest effect in the first half of the steps and in the second. In three of four
   steps it is late by at least half of the 2 %, not counting delays that are unusually long.

A half needs three steps so that one bad step does not decide it. So a rank can be named from 6 steps on among three
ranks or more, and from 8 steps on between two ranks, where each step is a coin toss (2 x 0.5^8 = 0.8 %).

A delay of one's own is what a rank took from one collective to the next, on a clock of its own that stands still while
it waits for others: from its release to its next arrival. Where the rows do not say how long a rank waited, it is
estimated from the arrivals alone (`own_delays`), which is less sharp.

The test assumes that a disturbance in one step says nothing about the next step. The medians and the halves make up for
disturbances that stay on one rank for some steps. They do not make up for a speed that drifts by 2 % or more, so slowly
that a rank stays slow for most of the steps. A rank that something else slows down in all of the steps is late.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from fsdplab.common.collectives import PAIRED
from fsdplab.common.words import plural
from fsdplab.profiling.step_summary import step_summary
from fsdplab.profiling.traces.clocks import clocks_of, contradict
from fsdplab.profiling.traces.groups import of_axis
from fsdplab.profiling.traces.meeting import Key, matched
from fsdplab.records import RunRecord
from fsdplab.records.tables import Row

Arrivals = Mapping[Any, Mapping[int, int]]  # of each collective (by its `Key`): rank -> when it came, in ns
Array = Any  # a numpy array of floats

CHANCE = 0.008  # largest probability of naming a rank although none is slower; busy machines make 1 % of it
WORTH_NAMING = 0.02  # part of a step below which a delay is not mentioned
FEWEST_STEPS = 6
_STANDARD_ERRORS = 2.0  # by which the effect may be overestimated
_MOST_STEPS = 0.75  # part of the steps in which the rank must be late
_LEVELS = 100  # of ranked delays that are told apart
_ALL_IN_ONE_PHASE = 0.85  # part of the rank's delay from which on it is late in that phase only


@dataclass(frozen=True)
class LateRank:
    """The late rank: it came last to `last` of `of` collectives, at the median `by_ns` after the median of the others.

    `a_step_ns` is the time that its own delays add to a step. `awaited_ns` is how long another rank waits for it in a
    step: at the collectives to which it comes last, less what is waited for another rank on average; `awaited` is that
    as a part of all waiting. `p_value` is the probability that some rank comes as late in as many steps by chance.
    `phase` is "" if the rank is late in more than one phase, else all figures but the probability are of that phase.
    """

    rank: int
    last: int
    of: int
    by_ns: float
    a_step_ns: float
    awaited_ns: float
    awaited: float
    p_value: float
    phase: str = ""

    def of_waiting(self, waiting_ns: float) -> float:
        """How much of this waiting in a step is for the rank, in ns: no more than its arrivals account for.

        >>> LateRank(7, 18, 30, 6.1e6, 18.3e6, 18.3e6, 0.9, 3.1e-05).of_waiting(10e6)
        9000000.0
        """
        return min(self.awaited * waiting_ns, self.awaited_ns)


@dataclass(frozen=True)
class _Peers:
    """Ranks that take part in the same collectives, and these collectives in time order.

    `times` is steps x collectives x ranks, in ns since the first arrival of the step; `own` are the ranks' own delays.
    """

    ranks: tuple[int, ...]
    phases: tuple[str, ...]
    times: Array
    own: Array


def late_rank(arrivals: Arrivals, step_ns: float, own_clock: Arrivals | None = None) -> LateRank | None:
    """The rank that is persistently late in these steps of `step_ns` each; None if no rank is, or with too few steps.

    `own_clock`: the same arrivals on clocks that stand still while their rank waits for others, where that is known.
    A collective counts if the same ranks recorded it in all complete steps. Rank 7 of 8 that comes 6.1 ms after the
    others to 3 of 5 collectives in each of 6 steps of 100 ms: LateRank(7, 18, 30, 6.1e6, 18.3e6, 18.3e6, 1.0, 3.1e-05).
    ValueError if `step_ns` is not above 0.
    """
    if not step_ns > 0:
        raise ValueError(f"step_ns is {step_ns}; expected the length of a step in ns, above 0")
    groups = list(_peers(arrivals, own_clock))
    candidates = sum(len(peers.ranks) for peers in groups)
    waiting = sum(float(_waiting(peers.times).sum()) for peers in groups)
    found = [late for peers in groups if (late := _late(peers, candidates, step_ns, waiting)) is not None]
    return max(found, key=lambda late: late.a_step_ns, default=None)


def fewest_steps(ranks: int, candidates: int | None = None) -> int:
    """The steps that it takes to name one of so many ranks: to be last in all of them by chance is rarer than `CHANCE`.
    `candidates`: how many might be named, where ranks meet in several groups of so many.

    >>> fewest_steps(2), fewest_steps(8), fewest_steps(2, candidates=8)
    (8, 6, 10)
    """
    return max(FEWEST_STEPS, math.ceil(math.log((candidates or ranks) / CHANCE) / math.log(ranks)))


def _late(peers: _Peers, candidates: int, step_ns: float, waiting: float) -> LateRank | None:
    own = peers.own
    index, p_value = verdict(own, step_ns, candidates)
    if p_value > CHANCE:
        return None
    phase = _phase(peers.phases, np.median(own[..., index], axis=0))
    within = np.array([phase in ("", each) for each in peers.phases])
    late = lateness(peers.times)[:, within]
    last = late.argmax(axis=-1) == index
    awaited_ns = _awaited_ns(peers.times[:, within], index)
    return LateRank(
        rank=peers.ranks[index], last=int(last.sum()), of=last.size, by_ns=float(np.median(late[..., index])),
        a_step_ns=float(effects(own[:, within])[index]), awaited_ns=awaited_ns / last.shape[0] / (len(peers.ranks) - 1),
        awaited=awaited_ns / waiting if waiting else 0.0, p_value=float(p_value), phase=phase,
    )  # fmt: skip


def _waiting(times: Array) -> Array:
    """How long all ranks together wait at each collective for its last rank. Shape (steps, collectives)."""
    return (times.max(axis=-1, keepdims=True) - times).sum(axis=-1)


def _awaited_ns(times: Array, index: int) -> float:
    """How long all ranks together wait for this rank, less how long for another rank on average."""
    by_rank = np.bincount(times.argmax(axis=-1).ravel(), _waiting(times).ravel(), minlength=times.shape[-1])
    others = (by_rank.sum() - by_rank[index]) / (len(by_rank) - 1)
    return max(0.0, float(by_rank[index] - others))


def _phase(phases: Sequence[str], delays: Array) -> str:
    """The phase with nearly all of the rank's delay; "" if there is no such phase, or no other."""
    by_phase: dict[str, float] = defaultdict(float)
    for phase, delay in zip(phases, delays):
        by_phase[phase] += delay
    most = max(by_phase, key=by_phase.__getitem__)
    return most if len(by_phase) > 1 and by_phase[most] >= _ALL_IN_ONE_PHASE * sum(delays) else ""


# ---- arrivals as arrays


def _peers(arrivals: Arrivals, own_clock: Arrivals | None) -> Iterator[_Peers]:
    """The collectives that the same ranks have in all complete steps, by these ranks; none if the steps are too few."""
    begins = _complete_steps(arrivals)
    if len(begins) < FEWEST_STEPS:
        return
    by_ranks: dict[tuple[int, ...], list[tuple[Any, Array]]] = defaultdict(list)
    for name in sorted({key[1:] for key in arrivals}):
        each = [arrivals.get(key_of(step, name), {}) for step in begins]
        ranks = tuple(sorted(each[0]))
        if len(ranks) > 1 and all(times.keys() == each[0].keys() for times in each):
            by_ranks[ranks].append((name, _since(each, ranks, begins)))
    for ranks, columns in by_ranks.items():
        columns.sort(key=lambda column: column[1].max(axis=-1).mean())
        names, all_times = zip(*columns)
        times = np.stack(all_times, axis=1)
        if own_clock is None:
            own = own_delays(times, [name[2] for name in names])
        else:
            passed = [_since([own_clock[key_of(step, name)] for step in begins], ranks, begins) for name in names]
            own = own_delays_by_clock(times, np.stack(passed, axis=1), list(begins.items()))
        yield _Peers(ranks, tuple(name[1] for name in names), times, own)


def key_of(step: int, name: tuple[Any, ...]) -> tuple[Any, ...]:
    """The identity of a collective of a step."""
    return (step, *name)


def _since(each: Sequence[Mapping[int, int]], ranks: Sequence[int], begins: Mapping[int, int]) -> Array:
    """The times of one collective in each step, steps x ranks, since the step began."""
    return np.array([[times[rank] - begin for rank in ranks] for begin, times in zip(begins.values(), each)], float)


def _complete_steps(arrivals: Arrivals) -> dict[int, int]:
    """step -> its first arrival, of steps with at least half as many arrivals as the step with the most: a trace may
    begin or end within a step.
    """
    by_step: dict[int, list[int]] = defaultdict(list)
    for key, times in arrivals.items():
        by_step[key[0]].extend(times.values())
    most = max(map(len, by_step.values()), default=0)
    return {step: min(by_step[step]) for step in sorted(by_step) if 2 * len(by_step[step]) >= max(most, 1)}


# ---- the statistics, on arrays (..., steps, collectives, ranks)


def lateness(times: Array) -> Array:
    """By how much each rank came after the median of the other ranks; below 0 where it was early. Same shape."""
    ordered = np.sort(times, axis=-1)
    middles = []
    for place in ((times.shape[-1] - 2) // 2, (times.shape[-1] - 1) // 2):  # of the others, in order
        without = times <= ordered[..., place, None]  # the rank itself is before the place: the others move up
        middles.append(np.where(without, ordered[..., place + 1, None], ordered[..., place, None]))
    return times - (middles[0] + middles[1]) / 2


def own_delays_by_clock(times: Array, own_clock: Array, steps: Sequence[tuple[int, int]]) -> Array:
    """By how much longer than the others each rank took, on its own clock, since the collective before. Same shape.

    `own_clock`: the arrivals on the ranks' own clocks, which stand still while they wait. `steps`: their numbers and
    when they began, in ns. A first collective whose step before is not known counts with its whole lateness. A delay
    counts as far as the rank came late by it: who works longer while the others wait elsewhere delays nobody.
    """
    took = np.diff(own_clock, axis=-2, prepend=own_clock[..., :1, :])
    for place, ((before, began), (step, begin)) in enumerate(zip(steps, steps[1:]), start=1):
        if step == before + 1:
            took[..., place, 0, :] = own_clock[..., place, 0, :] + (begin - began) - own_clock[..., place - 1, -1, :]
        else:
            took[..., place, 0, :] = times[..., place, 0, :]
    took[..., 0, 0, :] = times[..., 0, 0, :]
    own: Array = np.minimum(lateness(took), np.maximum(lateness(times), 0.0))
    return own


def own_delays(times: Array, kinds: Sequence[str]) -> Array:
    """The part of each lateness that arose since the previous collective. `kinds` are the collectives'. Same shape.

    If ranks wait for each other at every collective, all of a lateness is new. If they run ahead, a rank that is late
    once stays late, and only what it adds is new: of a rank that comes 1, 2, 3 ms late, 1 ms each time. The others run
    ahead to the next collective of the same kind at most, so a longer lateness has made them wait.
    """
    late = lateness(times)
    released = times.max(axis=-1, keepdims=True)
    horizon = _until_next_alike(released, kinds)
    kept = 1.0 - _waited(times, released, horizon)[..., None, None, None]
    own: Array = late.copy()
    own[..., 1:, :] -= kept * np.clip(late[..., :-1, :], -horizon, horizon)
    return own


def _until_next_alike(released: Array, kinds: Sequence[str]) -> Array:
    """The time from each collective but the last to the next one of its kind, infinite if there is none."""
    horizon = np.full_like(released[..., 1:, :], np.inf)
    for place, kind in enumerate(kinds[:-1]):
        if kind in kinds[place + 1 :]:
            following = kinds.index(kind, place + 1)
            horizon[..., place, :] = np.maximum(released[..., following, :] - released[..., place, :], 0.0)
    return horizon


def _waited(times: Array, released: Array, horizon: Array) -> Array:
    """Which part of the time until a collective's last rank came the other ranks wait for it, from 0 to 1. Shape (...).

    It is the slope of a rank's time from one arrival to the next over the time for which it had to wait, if it did:
    from step to step at the same collective, after removing how slow the whole step was.
    """
    if times.shape[-2] < 2:
        return np.ones(times.shape[:-3])
    ahead = (released - times)[..., :-1, :]
    interval = np.diff(times, axis=-2)
    usual = np.median(interval, axis=-3, keepdims=True)
    pace = np.divide(interval, usual, out=np.ones_like(interval), where=usual > 0)
    interval = interval - np.median(pace, axis=(-2, -1), keepdims=True) * usual
    clear = ahead < horizon / 2  # beyond it a rank that runs ahead may have to wait, too
    number = np.maximum(clear.sum(axis=-3, keepdims=True), 1)
    ahead, interval = (
        np.where(clear, values - np.where(clear, values, 0).sum(axis=-3, keepdims=True) / number, 0)
        for values in (ahead, interval)
    )
    of_all = (-3, -2, -1)
    as_if_waiting = 1.0  # ns^2: decides only where no time varies from step to step
    slope = ((ahead * interval).sum(of_all) + as_if_waiting) / ((ahead**2).sum(of_all) + as_if_waiting)
    return np.clip(slope, 0.0, 1.0)


def effects(own: Array) -> Array:
    """By how much each rank delays a step: at each collective the median over the steps, summed. Shape (..., ranks)."""
    return np.median(own, axis=-3).sum(axis=-2)


def _errors(own: Array, usual: Array) -> Array:
    """By how much each effect may be overestimated. Shape (..., ranks).

    It is twice the standard error of what scatters at each collective by itself, or once that of whole steps, which
    clocks and temperatures make slower or faster at all their collectives together.
    """
    of_steps = usual.std(axis=-2, ddof=1) / own.shape[-3] ** 0.5
    return np.maximum(_STANDARD_ERRORS * _standard_errors(own), of_steps)


def _standard_errors(own: Array) -> Array:
    """The standard error of each effect, from how much the delays at each collective scatter over the steps."""
    deviation = np.median(np.abs(own - np.median(own, axis=-3, keepdims=True)), axis=-3)
    error = 1.4826 * 1.2533 * deviation / own.shape[-3] ** 0.5  # of the median of normal noise
    return np.sqrt((error**2).sum(axis=-2))


def verdict(own: Array, step_ns: float, candidates: int) -> tuple[Array, Array]:
    """(index of the rank with the largest effect, its p-value corrected for the candidates), each of shape (...).

    The p-value is 1 where the effect is too small or does not repeat.
    """
    steps = own.shape[-3]
    worth = WORTH_NAMING * step_ns
    first, second = effects(own[..., : steps // 2, :, :]), effects(own[..., steps // 2 :, :, :])
    whole = effects(own)
    index = whole.argmax(axis=-1)
    usual = _usual_delays(own)
    mine = np.take_along_axis(usual, index[..., None, None], axis=-1)
    sure = np.take_along_axis(whole - _errors(own, usual), index[..., None], axis=-1)[..., 0]
    repeats = (first.argmax(axis=-1) == index) & (second.argmax(axis=-1) == index)
    repeats &= (mine[..., 0] >= worth / 2).mean(axis=-1) >= _MOST_STEPS
    chance = np.minimum(1.0, candidates * probability(usual, index))
    return index, np.where((sure >= worth) & repeats, chance, 1.0)


def _usual_delays(own: Array) -> Array:
    """Each rank's delay in each step, without what is unusual. Shape (..., steps, ranks).

    A delay at a collective counts for no more than the usual delay there of the rank that is latest, so that one long
    disturbance does not outweigh a step.
    """
    most = np.median(np.abs(own), axis=-3, keepdims=True).max(axis=-1, keepdims=True)
    return np.clip(own, -most, most).sum(axis=-2)


def probability(delays: Array, index: Array) -> Array:
    """The probability that a rank's delays are, by chance, together as high as those of the rank `index`. Shape (...).

    `delays`: (..., steps, ranks). All delays, each less the mean of its step, are ranked together, so that a long delay
    counts more than a short one, and none counts without limit. If no rank were slower than another, a rank would have
    any of a step's ranks with the same probability: the sum over the steps has the distribution computed here.

    Of two ranks, of which the second is later in all of 8 steps: 0.5^8.
    """
    steps, ranks = delays.shape[-2:]
    scores = _ranked(delays - delays.mean(axis=-1, keepdims=True)) * _LEVELS // (steps * ranks)
    of_step = (scores[..., None] == np.arange(_LEVELS)).mean(axis=-2)  # how probable each score is in each step
    size = steps * (_LEVELS - 1) + 1
    sums = np.fft.irfft(np.fft.rfft(of_step, size, axis=-1).prod(axis=-2), size, axis=-1)
    tail = np.cumsum(sums[..., ::-1], axis=-1)[..., ::-1]
    own = np.take_along_axis(scores, index[..., None, None], axis=-1)[..., 0]
    found = np.take_along_axis(tail, own.sum(axis=-1)[..., None], axis=-1)[..., 0]
    # the highest sum of all is rarer than rounding: it is the product over the steps
    is_highest = (own == scores.max(axis=-1)).all(axis=-1)
    of_highest = (own[..., None] == scores).mean(axis=-1).prod(axis=-1)
    return np.where(is_highest, of_highest, np.clip(found, float(ranks) ** -steps, 1.0))


def _ranked(values: Array) -> Array:
    """How many of all values (..., steps, ranks) are lower than each. Same shape, whole numbers."""
    flat = values.reshape(*values.shape[:-2], -1)
    order = np.argsort(flat, axis=-1, kind="stable")
    ordered = np.take_along_axis(flat, order, axis=-1)
    place = np.arange(flat.shape[-1])
    is_new = np.diff(ordered, axis=-1, prepend=-np.inf) > 0
    below = np.maximum.accumulate(np.where(is_new, place, 0), axis=-1)  # equal values have the first one's place
    found = np.empty_like(order)
    np.put_along_axis(found, order, below, axis=-1)
    return found.reshape(values.shape)


# ---- the arrivals of a record: a late rank is every other rank's exposed time. On the CPU a rank comes to a collective
# when it issues it; on a GPU its host runs ahead, so it comes when the device begins


@dataclass(frozen=True)
class _Seen:
    """The rows of a record's collectives, and how far the clock of each rank is ahead."""

    rows: Sequence[Row]
    met: Mapping[Key, Sequence[Row]]
    ahead: Mapping[int, int]
    on_gpu: bool

    def came(self, row: Row) -> int:
        """When the rank of a row came."""
        issue: int | None = None if self.on_gpu else row.get("issue_ns")
        return int(row["start_ns"] if issue is None else issue) - self.ahead.get(row["rank"], 0)

    def ended(self, row: Row) -> int:
        """When it ended there."""
        return int(row["end_ns"]) - self.ahead.get(row["rank"], 0)


def _seen(record: RunRecord, steps: Iterable[int]) -> _Seen:
    """The ledger has all steps of the lab's engine, the table `collectives` the profiled ones of every engine."""
    wanted = set(steps)
    ledger = [row for row in record.table("ledger") if row["step"] in wanted]
    rows = [_of_axis(row, record.spec) for row in ledger]
    rows = rows or [row for row in record.table("collectives") if row["step"] in wanted]
    met = {key: members for key, members in matched(rows).items() if len(members) > 1}
    # a ledger's ends are those of its host: it shows only that clocks differ by far
    believed = bool(ledger) and not contradict(met.values())
    ahead = {} if believed else {rank: clock.ahead_ns for rank, clock in clocks_of(met.values()).items()}
    return _Seen(rows, met, ahead, record.environment.get("device") == "cuda")


def _of_axis(row: Row, spec: Mapping[str, Any]) -> Row:
    """A row of the ledger with its process group: that of the mesh's axis."""
    group = of_axis(spec, row["rank"], row["kind"])
    return row if row["kind"] == PAIRED else row | {"members": group.members, "group_size": group.size}


def arrivals_of(record: RunRecord, steps: Iterable[int]) -> dict[Key, dict[int, int]]:
    """For each collective, by its identity: rank -> when it came, in ns on one clock, of these steps; collectives of
    one rank alone are left out.
    """
    return _arrivals(_seen(record, steps))


def _arrivals(seen: _Seen) -> dict[Key, dict[int, int]]:
    return {key: {row["rank"]: seen.came(row) for row in members} for key, members in seen.met.items()}


def _own_clocks(seen: _Seen) -> dict[Key, dict[int, int]] | None:
    """The same arrivals on the ranks' own clocks, which stand still while they wait for others; None where the rows do
    not say how long they waited.
    """
    last = {id(row): max(map(seen.came, members)) for members in seen.met.values() for row in members}
    waits: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of each rank: until when it waited, and for how long
    for row in seen.rows:
        waited = _waited_ns(row, seen, last.get(id(row)))
        if waited is None:
            return None
        waits[row["rank"]].append((min(last.get(id(row), seen.ended(row)), seen.ended(row)), waited))
    clocks = {rank: _StandingClock(each) for rank, each in waits.items()}
    return {
        key: {row["rank"]: clocks[row["rank"]].at(seen.came(row)) for row in members}
        for key, members in seen.met.items()
    }


class _StandingClock:
    """A clock that stands still during its rank's waits."""

    def __init__(self, waits: Sequence[tuple[int, int]]) -> None:
        ordered = sorted(waits)
        self._until = [until for until, _ in ordered]
        self._waited = [0, *accumulate(waited for _, waited in ordered)]

    def at(self, instant: int) -> int:
        """What it shows: the instant, less all waits that have ended by then."""
        return instant - self._waited[bisect_right(self._until, instant)]


def _waited_ns(row: Row, seen: _Seen, last: int | None) -> int | None:
    """For how long a rank stood still in a collective until its last rank came, at `last`; where nobody knows who that
    was, for how long it stood still at all.
    """
    if "waited_ns" in row:  # of a ledger: the time before the end in which whoever needs the result stood still
        blocked, came, ended = row["waited_ns"], seen.came(row), seen.ended(row)
        if blocked is None:
            return None
        return max(0, min(ended, ended if last is None else last) - max(ended - blocked, came))
    waiting: int | None = row.get("waiting_ns")
    return waiting if waiting is None or last is not None else waiting + row["on_link_ns"]


def late_rank_of(record: RunRecord) -> LateRank | None:
    """The rank that came late beyond chance in the profiled steps and, where the ledger has them, in the timed ones;
    None where nobody did.
    """
    summary = step_summary(record.table("breakdown"))
    if summary is None or not summary.step_ns:
        return None
    seen = _seen(record, _steps_of(record))
    arrivals, own_clock = _arrivals(seen), _own_clocks(seen)
    if record.provenance.get("step_time_s") == "simulated":  # every step would be the same
        arrivals, own_clock = _repeated(arrivals), None
    return late_rank(arrivals, summary.step_ns, own_clock)


def _repeated(arrivals: Mapping[Key, dict[int, int]]) -> dict[Key, dict[int, int]]:
    """The only step as often as it takes to name a rank."""
    return {key._replace(step=step): times for key, times in arrivals.items() for step in range(fewest_steps(2))}


def too_few_steps(record: RunRecord) -> str:
    """What to say where nobody can be named since the record has too few steps; "" where it has enough.

    Of 6 steps between 2 ranks: `6 steps cannot tell (8 can: --steps 8)`; of a recorded job `--steps 8:16`.
    """
    if record.provenance.get("step_time_s") == "simulated":
        return ""
    ledger = _steps_of_tables(record, "ledger") or _steps_of_tables(record, "collectives")
    groups = {tuple(sorted(times)) for times in arrivals_of(record, _steps_of(record)).values()}
    largest = max(map(len, groups), default=max(2, record.spec.get("world_size") or 0))
    known, fewest = len(_steps_of(record) & ledger), fewest_steps(largest, sum(map(len, groups)))
    return (
        "" if known >= fewest else f"{plural(known, 'step')} cannot tell ({fewest} can: {_more_steps(record, fewest)})"
    )


def _more_steps(record: RunRecord, steps: int) -> str:
    """How so many steps are recorded: as `record` takes them, as `run` does, or by the profiler's schedule."""
    if record.summary.traces is not None:
        return f"torch.profiler.schedule(active={steps})"
    if record.spec.get("job"):
        first = min(_steps_of_tables(record, "breakdown"), default=FEWEST_STEPS)
        return f"--steps {first}:{first + steps}"
    return f"--steps {steps}"


def _steps_of_tables(record: RunRecord, *names: str) -> set[int]:
    return {row["step"] for name in names for row in record.table(name)}


def _steps_of(record: RunRecord) -> set[int]:
    """The timed steps and the profiled ones."""
    timed = {row["step"] for row in record.table("steps") if row["step_time_s"] is not None}
    return timed | _steps_of_tables(record, "breakdown")
