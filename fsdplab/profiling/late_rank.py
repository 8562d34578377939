"""Finds the rank that is persistently late to the collectives of a run's steps, beyond chance.

On a busy machine some rank is always last, and it often stays last for several collectives, because ranks run ahead of
each other between the collectives for which they really wait. The evidence is therefore the step and not the
collective, and a rank is named only if three statements hold:

1. Chance. The own delays of all steps and ranks are ranked. If no rank were slower than another, a rank would have any
   of a step's ranks with the same probability, and the sum of its ranks over the steps would have a known distribution.
   The probability of a sum as high as the rank's, times the number of ranks that might have been named, is at most
   0.8 %.
2. Effect. The rank delays a step by at least 2 % of its length, also after subtracting its error. The
   effect is the median over the steps at each collective, summed over the collectives: an occasional delay does not
   count.
3. Repetition. The same rank has the largest effect in the first half of the steps and in the second. In three of four
   steps it is late by at least half of the 2 %, not counting delays that are unusually long.

A half needs three steps so that one bad step does not decide it. So a rank can be named from 6 steps on among three
ranks or more, and from 8 steps on between two ranks, where each step is a coin toss (2 x 0.5^8 = 0.8 %).

`lateness` has the statistics, and says what a delay of one's own is; `arrivals` reads the arrivals of a record.

The test assumes that a disturbance in one step says nothing about the next step. The medians and the halves make up for
disturbances that stay on one rank for some steps. They do not make up for a speed that drifts by 2 % or more, so slowly
that a rank stays slow for most of the steps. A rank that something else slows down in all of the steps is late.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdplab.common.words import plural
from fsdplab.profiling.arrivals import Arrivals, Meetings, arrivals_of
from fsdplab.profiling.lateness import Array, effects, lateness, own_delays, own_delays_by_clock, verdict
from fsdplab.profiling.step_summary import step_summary
from fsdplab.profiling.traces.meeting import Key
from fsdplab.records import RunRecord

CHANCE = 0.008  # largest probability of naming a rank although none is slower; busy machines make 1 % of it
FEWEST_STEPS = 6
_ALL_IN_ONE_PHASE = 0.85  # part of the rank's delay from which on it is late in that phase only


@dataclass(frozen=True)
class LateRank:
    """The late rank: it came last to `last` of `of` collectives, at the median `by_ns` after the median of the others.

    `a_step_ns` is the time that its own delays add to a step. `awaited_ns` is how long another rank waits for it in a
    step: at the collectives to which it comes last, less what is waited for another rank on average; `awaited` is that
    as a part of all waiting. `p_value` is the probability that some rank comes as late in as many steps by chance.
    `phase` is "" if the rank is late in more than one phase; else all figures are of that phase, but for the
    probability and `awaited`, which is a part of the waiting in all phases.
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
    """Ranks that take part in the same collectives, and these collectives in time order."""

    ranks: tuple[int, ...]
    phases: tuple[str, ...]  # of each collective
    times: Array  # steps x collectives x ranks, in ns since the first arrival of the step
    own: Array  # the ranks' own delays, of the same shape


def late_rank(arrivals: Arrivals, step_ns: float, own_clock: Arrivals | None = None) -> LateRank | None:
    """The rank that is persistently late in these steps of `step_ns` each; None if no rank is, or with too few steps.

    `own_clock`: the same arrivals on clocks that stand still while their rank waits for others, where that is known.
    A collective counts if the same ranks recorded it in all complete steps. Rank 7 of 8 that comes 6.1 ms after the
    others to 3 of 5 collectives in each of 6 steps of 100 ms: LateRank(7, 18, 30, 6.1e6, 18.3e6, 18.3e6, 1.0, 3.1e-05).
    ValueError if `step_ns` is not above 0.
    """
    if not step_ns > 0:
        raise ValueError(f"step_ns is {step_ns}; expected the length of a step in ns, above 0")
    # ranks meet in several groups where they shard and replicate: the latest of any of them is looked for
    groups = list(_peers(arrivals, own_clock))
    candidates = sum(len(peers.ranks) for peers in groups)
    waiting = sum(float(_waiting(peers.times).sum()) for peers in groups)
    late_ranks = []
    for peers in groups:
        late = _late(peers, candidates, step_ns, waiting)
        if late is not None:
            late_ranks.append(late)
    return max(late_ranks, key=lambda late: late.a_step_ns, default=None)


def fewest_steps(ranks: int, candidates: int | None = None) -> int:
    """The steps that it takes to name one of so many ranks: to be last in all of them by chance is rarer than `CHANCE`.
    `candidates`: how many might be named, where ranks meet in several groups of so many. ValueError for fewer than 2
    ranks.

    >>> fewest_steps(2), fewest_steps(8), fewest_steps(2, candidates=8)
    (8, 6, 10)
    """
    if ranks < 2:
        raise ValueError(
            f"ranks is {ranks}; expected 2 or more: a rank is late to others, so no steps can name one alone"
        )
    return max(FEWEST_STEPS, math.ceil(math.log((candidates or ranks) / CHANCE) / math.log(ranks)))


def _late(peers: _Peers, candidates: int, step_ns: float, waiting: float) -> LateRank | None:
    """The late rank of these peers, with its figures; None if none is late beyond chance."""
    own = peers.own
    index, p_value = verdict(own, step_ns, candidates)
    if p_value > CHANCE:
        return None

    # its figures, of the phase in which it is late
    phase = _phase(peers.phases, np.median(own[..., index], axis=0))
    in_phase = np.array([phase in ("", of_collective) for of_collective in peers.phases])
    late = lateness(peers.times)[:, in_phase]
    is_last = late.argmax(axis=-1) == index
    steps = is_last.shape[0]
    others = len(peers.ranks) - 1
    awaited_ns = _awaited_ns(peers.times[:, in_phase], index)  # by all ranks in all steps
    return LateRank(
        rank=peers.ranks[index],
        last=int(is_last.sum()),
        of=is_last.size,
        by_ns=float(np.median(late[..., index])),
        a_step_ns=float(effects(own[:, in_phase])[index]),
        awaited_ns=awaited_ns / steps / others,
        awaited=awaited_ns / waiting if waiting else 0.0,
        p_value=float(p_value),
        phase=phase,
    )


def _waiting(times: Array) -> Array:
    """How long all ranks together wait at each collective for its last rank. Shape (steps, collectives).

    Of ranks that come at 0, 10 and 40: 40 + 30 + 0 = 70.
    """
    return (times.max(axis=-1, keepdims=True) - times).sum(axis=-1)


def _awaited_ns(times: Array, index: int) -> float:
    """How long all ranks together wait for this rank, less how long for another rank on average."""
    # Somebody is always last, also where nobody is slow: with 70, 10 and 30 ns of waiting for ranks 0, 1 and 2, the
    # others are waited for 20 each, so 50 are rank 0's.
    last_rank = times.argmax(axis=-1)  # (steps, collectives)
    by_rank = np.bincount(last_rank.ravel(), _waiting(times).ravel(), minlength=times.shape[-1])
    others = (by_rank.sum() - by_rank[index]) / (len(by_rank) - 1)
    return max(0.0, float(by_rank[index] - others))


def _phase(phases: Sequence[str], delays: Array) -> str:
    """The phase with nearly all of the rank's delay; "" if there is no such phase, or no other."""
    by_phase: dict[str, float] = defaultdict(float)
    for phase, delay in zip(phases, delays):
        by_phase[phase] += delay
    most = max(by_phase, key=by_phase.__getitem__)
    has_nearly_all = by_phase[most] >= _ALL_IN_ONE_PHASE * sum(delays)
    if len(by_phase) == 1 or not has_nearly_all:
        return ""
    return most


# ---- arrivals as arrays


def _peers(arrivals: Arrivals, own_clock: Arrivals | None) -> Iterator[_Peers]:
    """The collectives that the same ranks have in all complete steps, by these ranks; none if the steps are too few."""
    begins = _complete_steps(arrivals)
    if len(begins) < FEWEST_STEPS:
        return
    # of each set of ranks its collectives: the name (a key without the step), and the times, steps x ranks
    by_ranks: dict[tuple[int, ...], list[tuple[Any, Array]]] = defaultdict(list)
    for name in sorted({key[1:] for key in arrivals}):
        of_steps = [arrivals.get(key_of(step, name), {}) for step in begins]
        first = of_steps[0]
        ranks = tuple(sorted(first))
        if len(ranks) > 1 and all(times.keys() == first.keys() for times in of_steps):
            by_ranks[ranks].append((name, _since(of_steps, ranks, begins)))

    for ranks, columns in by_ranks.items():
        columns.sort(key=lambda column: column[1].max(axis=-1).mean())  # in order of time
        names = [name for name, _ in columns]
        times = np.stack([of_collective for _, of_collective in columns], axis=1)
        if own_clock is None:
            own = own_delays(times, [kind for _, _, kind, *_ in names])
        else:
            on_own_clock = _on_own_clock(own_clock, names, ranks, begins)
            own = own_delays_by_clock(times, on_own_clock, list(begins.items()))
        yield _Peers(ranks, tuple(phase for _, phase, *_ in names), times, own)


def _on_own_clock(
    own_clock: Arrivals, names: Sequence[tuple[Any, ...]], ranks: Sequence[int], begins: Mapping[int, int]
) -> Array:
    """The arrivals of these collectives on the ranks' own clocks, steps x collectives x ranks."""
    columns = []
    for name in names:
        of_steps = [own_clock[key_of(step, name)] for step in begins]
        columns.append(_since(of_steps, ranks, begins))
    return np.stack(columns, axis=1)


def key_of(step: int, name: tuple[Any, ...]) -> tuple[Any, ...]:
    """The identity of a collective of a step."""
    return (step, *name)


def _since(of_steps: Sequence[Mapping[int, int]], ranks: Sequence[int], begins: Mapping[int, int]) -> Array:
    """The times of one collective in each step, steps x ranks, since the step began."""
    rows = []
    for begin, times in zip(begins.values(), of_steps):
        rows.append([times[rank] - begin for rank in ranks])
    return np.array(rows, float)


def _complete_steps(arrivals: Arrivals) -> dict[int, int]:
    """step -> its first arrival, of steps with at least half as many arrivals as the step with the most: a trace may
    begin or end within a step.
    """
    by_step: dict[int, list[int]] = defaultdict(list)
    for key, times in arrivals.items():
        by_step[key[0]].extend(times.values())
    most = max(map(len, by_step.values()), default=0)
    begins = {}
    for step in sorted(by_step):
        if 2 * len(by_step[step]) >= max(most, 1):
            begins[step] = min(by_step[step])
    return begins


# ---- the late rank of a record


def late_rank_of(record: RunRecord) -> LateRank | None:
    """The rank that came late beyond chance in the profiled steps and, where the ledger has them, in the timed ones;
    None where nobody did.
    """
    summary = step_summary(record.table("breakdown"))
    if summary is None or not summary.step_ns:
        return None
    meetings = Meetings.of(record, _steps_of(record))
    if record.provenance.get("step_time_s") == "simulated":  # every step would be the same
        return late_rank(_repeated(meetings.arrivals()), summary.step_ns)
    return late_rank(meetings.arrivals(), summary.step_ns, meetings.own_clocks())


def _repeated(arrivals: Mapping[Key, dict[int, int]]) -> dict[Key, dict[int, int]]:
    """The only step as often as it takes to name a rank."""
    repeated = {}
    for key, times in arrivals.items():
        for step in range(fewest_steps(2)):
            repeated[key._replace(step=step)] = times
    return repeated


def too_few_steps(record: RunRecord) -> str:
    """What to say where nobody can be named since the record has too few steps, or one rank alone; "" where it has
    enough.

    Of 6 steps between 2 ranks: `6 steps cannot tell (8 can: --steps 8)`; of a recorded job `--steps 8:16`.
    """
    if record.provenance.get("step_time_s") == "simulated":
        return ""
    with_collectives = _steps_of_tables(record, "ledger") or _steps_of_tables(record, "collectives")
    steps = _steps_of(record)
    known = len(steps & with_collectives)
    groups = {tuple(sorted(times)) for times in arrivals_of(record, steps).values()}
    if not groups and len(_ranks_of(record)) == 1:
        return "one rank alone cannot tell (the steps of all ranks can)"
    largest = max(map(len, groups), default=max(2, record.spec.get("world_size") or 0))
    fewest = fewest_steps(largest, candidates=sum(map(len, groups)))
    if known >= fewest:
        return ""
    return f"{plural(known, 'step')} cannot tell ({fewest} can: {_more_steps(record, fewest)})"


def _more_steps(record: RunRecord, steps: int) -> str:
    """How so many steps are recorded: as `record` takes them, as `run` does, or by the profiler's schedule."""
    if record.summary.traces is not None:
        return f"torch.profiler.schedule(active={steps})"
    if record.spec.get("job"):
        first = min(_steps_of_tables(record, "breakdown"), default=FEWEST_STEPS)
        return f"--steps {first}:{first + steps}"
    return f"--steps {steps}"


def _steps_of_tables(record: RunRecord, *names: str) -> set[int]:
    """The steps of which some of these tables have rows."""
    steps: set[int] = set()
    for name in names:
        steps.update(row["step"] for row in record.table(name))
    return steps


def _ranks_of(record: RunRecord) -> set[int]:
    """The ranks of which the record has profiled or timed steps."""
    ranks: set[int] = set()
    for name in ("breakdown", "steps"):
        ranks.update(row["rank"] for row in record.table(name))
    return ranks


def _steps_of(record: RunRecord) -> set[int]:
    """The timed steps and the profiled ones."""
    timed = {row["step"] for row in record.table("steps") if row["step_time_s"] is not None}
    return timed | _steps_of_tables(record, "breakdown")
