"""Which rank came late to the collectives of a record, how often and by how much.

A collective cannot begin before its last rank has come, so a late rank is every other rank's exposed time. That it came
last once says nothing: on a busy machine somebody always does. A rank is late if it is last in a clear majority of
collectives, in most of the steps, and by more than its own lateness scatters.

On an emulated link a row of the ledger begins when the link starts the collective, for all ranks at once; there, a
gather's arrival is read from the units' states and a reduction's from the end of the unit's backward.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fsdplab.records import RunRecord

Row = dict[str, Any]
Key = tuple[int, str, str, str, int]  # step, unit, phase, kind, which of them
Arrivals = Mapping[Key, Mapping[int, int]]  # of each collective: rank -> when it came, in ns
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "other_communication")
CLEAR_MAJORITY = 0.6  # part of the collectives from which on the same rank is last not by chance
_MOST_STEPS = 0.75  # part of the steps in which it must be last most often
_FEWEST = 4  # collectives below which nothing repeats
_PAIRED = "send_recv"
_OF_COPIES = (" copy-in", " copy-out", " blocked")
_CLOCKS_NS = 1_000_000  # ranks that end the same collectives further apart than this are on different clocks


@dataclass(frozen=True)
class LateRank:
    """The rank that comes late: last in `last` of `of` collectives, `by_ns` after the middle of the others (median).

    `phase` is "" where it is late in the whole step; `a_step_ns` is its lateness summed over the collectives of a step.
    """

    rank: int
    last: int
    of: int
    by_ns: float
    a_step_ns: float
    phase: str = ""


def arrivals_of(record: RunRecord, steps: Iterable[int]) -> tuple[dict[Key, dict[int, int]], str]:
    """(when each rank came to each collective of these steps, the words on a source other than the collective's own
    start). Collectives of one rank alone are left out.
    """
    wanted = set(steps)
    rows = [row for row in record.table("timeline") if row["step"] in wanted]
    # copies on the host are no collectives
    travel = [row for row in rows if row["lane"] in COLLECTIVES and not row["name"].endswith(_OF_COPIES)]
    if any(row["emulated"] for row in travel):
        return _matched(_issues(record, rows, travel, wanted)), "reductions: after backward"
    ledger = [{**row, "name": row["kind"]} for row in record.table("ledger") if row["step"] in wanted]
    if ledger:
        return _matched([(row, row["start_ns"]) for row in ledger]), ""
    shift = _clock_shifts(travel)
    return _matched([(row, row["start_ns"] - shift.get(row["rank"], 0)) for row in travel]), ""


def _issues(record: RunRecord, rows: Sequence[Row], travel: Sequence[Row], steps: set[int]) -> list[tuple[Row, int]]:
    """Behind an emulated link: gathers as their units begin to unshard, reductions as the units' backwards end."""
    life = [row for row in record.table("life") if row["state"] == "unsharding" and row["step"] in steps]
    gathers = [({**row, "name": "all_gather"}, row["time_ns"]) for row in life]
    ends: dict[tuple[int, int, str], int] = {}
    for row in rows:
        if row["lane"] == "compute" and row["phase"] == "backward":
            key = row["rank"], row["step"], _named(row["unit"])
            ends[key] = max(ends.get(key, 0), row["end_ns"])
    found = [
        (row, ends.get((row["rank"], row["step"], _named(row["unit"]))))
        for row in travel
        if row["lane"] == "reduce_scatter"
    ]
    return gathers + [(row, end) for row, end in found if end]


def _named(unit: str) -> str:
    """The ledger writes the root's name, traces leave it empty."""
    return unit or "root"


def _clock_shifts(travel: Sequence[Row]) -> dict[int, int]:
    """How far each rank's clock is ahead of the others': all ranks end a collective together, so ends that are always
    apart are of different clocks.
    """
    ends = _matched([(row, row["end_ns"]) for row in travel if row["name"] != _PAIRED])
    apart: dict[int, list[float]] = defaultdict(list)
    for times in ends.values():
        middle = median(times.values())
        for rank, end in times.items():
            apart[rank].append(end - middle)
    shifts = {rank: round(median(each)) for rank, each in apart.items()}
    return {rank: shift for rank, shift in shifts.items() if abs(shift) > _CLOCKS_NS}


def _matched(found: Sequence[tuple[Row, int]]) -> dict[Key, dict[int, int]]:
    """Times by collective; the n-th of a kind on one rank meets the n-th on the others.

    Of two ranks a send meets a receive, in whichever phase. Of more, sends and receives of a ring meet by their number;
    where one rank has more of them than another, as in a pipeline, the rows do not say who meets whom.
    """
    ranks = {row["rank"] for row, _ in found}
    met: dict[tuple[int, str, str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, time_ns in sorted(found, key=lambda pair: pair[1]):
        phase = "" if row["name"] == _PAIRED and len(ranks) == 2 else row["phase"]
        met[row["step"], _named(row["unit"]), phase, row["name"]][row["rank"]].append(time_ns)
    times: dict[Key, dict[int, int]] = {}
    for which, by_rank in met.items():
        counts = {len(each) for each in by_rank.values()}
        if which[3] == _PAIRED and len(ranks) > 2 and (len(counts) > 1 or len(by_rank) < len(ranks)):
            continue
        for number in range(max(counts)):
            key: Key = (*which, number)
            times[key] = {rank: each[number] for rank, each in by_rank.items() if number < len(each)}
    return {key: each for key, each in times.items() if len(each) > 1}


def late_rank_of(record: RunRecord, profiled: Iterable[int]) -> LateRank | None:
    """The rank that comes late in the profiled steps and, where the ledger has them, in the timed ones: what a busy
    machine does to two steps does not repeat in ten.
    """
    timed = {row["step"] for row in record.table("steps") if row["step_time_s"] is not None}
    return late_rank(arrivals_of(record, timed.union(profiled))[0])


def late_rank(arrivals: Arrivals) -> LateRank | None:
    """The rank that comes late to the collectives of the whole step, or of one of its phases; None where nothing
    repeats.

    Rank 7 of 8 that comes 6.1 ms after the others to 5 of 8 collectives: `LateRank(7, 5, 8, 6.1e6, 30.5e6)`.
    """
    phases = sorted({key[2] for key in arrivals if key[2]})
    groups = {"": arrivals} | {
        phase: {key: times for key, times in arrivals.items() if key[2] == phase} for phase in phases
    }
    found = [late for phase, group in groups.items() if (late := _late(group, phase)) is not None]
    return max(found, key=lambda late: late.a_step_ns, default=None)


def _late(arrivals: Arrivals, phase: str) -> LateRank | None:
    lasts = Counter(last_of(times) for times in arrivals.values())
    if len(arrivals) < _FEWEST:
        return None
    rank, last = lasts.most_common(1)[0]
    mine = {key: lateness(times, rank) for key, times in arrivals.items() if rank in times}
    by = median(mine.values())
    scatter = median(abs(each - by) for each in mine.values())
    if last < CLEAR_MAJORITY * len(mine) or by <= scatter or not _repeats(arrivals, rank):
        return None
    steps = len({key[0] for key in mine})
    in_all = sum(each for key, each in mine.items() if last_of(arrivals[key]) == rank)
    return LateRank(rank, last, len(mine), by, in_all / steps, phase)


def _repeats(arrivals: Arrivals, rank: int) -> bool:
    """Whether in three of four steps the rank is the one that is last most often: one long step is no slow rank."""
    by_step: dict[int, Counter[int]] = defaultdict(Counter)
    for key, times in arrivals.items():
        by_step[key[0]][last_of(times)] += 1
    so = [lasts.most_common(1)[0][0] == rank for lasts in by_step.values()]
    return sum(so) >= _MOST_STEPS * len(so)


def last_of(times: Mapping[int, int]) -> int:
    """The rank that came last, the first of equals."""
    return max(times, key=lambda rank: (times[rank], -rank))


def lateness(times: Mapping[int, int], rank: int) -> float:
    """By how many ns a rank came after the middle of the others; below 0 where it was early."""
    return times[rank] - median(time for other, time in times.items() if other != rank)
