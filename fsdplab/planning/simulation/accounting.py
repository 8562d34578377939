"""A simulated rank's step in the record's terms, in whole nanoseconds: every instant in one part of the step, and the
rows of the record's tables, a rank of each class.

The definitions are those of measured steps (`profiling/traces/account.py`): an instant with communication and
without compute is exposed, and belongs to the collective that ends first; between a collective's turn on this rank and
its beginning, the rank waits for its peers. `emulated` is False in every row: nothing waited for an emulated link.
That all of it is simulated stands in the record's provenance, which every figure shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdplab.common.rows import grouped
from fsdplab.records import LANES
from fsdplab.records.tables import IDLE_PARTS

from .network import Collective
from .ranks import RankLog, Span

Row = dict[str, Any]
STEP = 0  # the number of the one step
_ENOUGH = 0.1  # computing of a tenth of the exposed time is something to hide behind, as for measured steps


def nanoseconds(seconds: float) -> int:
    """Whole nanoseconds: `nanoseconds(0.0015) == 1_500_000`."""
    return round(seconds * 1e9)


@dataclass
class Passage:
    """One collective as one rank saw it, and how much of it was exposed."""

    collective: Collective
    issue: int
    start: int  # its turn came on this rank
    begin: int  # on all of its ranks
    end: int
    waiting_ns: int = 0
    on_link_ns: int = 0

    @property
    def where(self) -> tuple[str, str, str]:
        """Unit, phase and kind."""
        return self.collective.unit, self.collective.phase, self.collective.transfer.kind

    @property
    def exposed_ns(self) -> int:
        """On the link and waiting for a peer."""
        return self.waiting_ns + self.on_link_ns


@dataclass
class Account:
    """The parts of a rank's step in ns, its collectives, and the exposed intervals with the collective of each."""

    step_ns: int
    passages: list[Passage]
    compute_only_ns: int = 0
    overlapped_ns: int = 0
    exposed_ns: int = 0
    other_ns: int = 0
    exposed: list[tuple[int, int, Passage]] = field(default_factory=list)


def account(log: RankLog, index: int) -> Account:
    """The account of a rank's log; `index` is its class's. The parts' sum is the step's length, which is asserted."""
    passages = [_passage(each, index) for each in log.collectives]
    found = Account(nanoseconds(log.end), passages)
    computed = [(nanoseconds(span.start), nanoseconds(span.end)) for span in log.computed]
    edges = {0, found.step_ns}.union(*computed, *((each.start, each.begin, each.end) for each in passages))
    travelling = sorted(passages, key=lambda each: each.start)
    active: list[Passage] = []
    busy_at = at = 0
    ordered = sorted(edges)
    for low, high in zip(ordered, ordered[1:]):
        while at < len(travelling) and travelling[at].start <= low:
            active.append(travelling[at])
            at += 1
        active = [each for each in active if each.end > low]
        while busy_at < len(computed) and computed[busy_at][1] <= low:
            busy_at += 1
        busy = busy_at < len(computed) and computed[busy_at][0] <= low
        _add(found, low, high, busy, min(active, key=lambda each: each.end, default=None))
    parts = found.compute_only_ns + found.overlapped_ns + found.exposed_ns + found.other_ns
    assert parts == found.step_ns, f"the parts of a simulated step sum to {parts} ns, and the step is {found.step_ns}"
    return found


def _passage(each: Collective, index: int) -> Passage:
    assert each.begun is not None and each.ended is not None, f"{each.unit}'s {each.transfer.kind} never ended"
    times = (each.issued[index], each.started[index], each.begun, each.ended)
    return Passage(each, *map(nanoseconds, times))


def _add(found: Account, low: int, high: int, busy: bool, owner: Passage | None) -> None:
    """An interval in which nothing begins and nothing ends."""
    length = high - low
    if busy:
        found.overlapped_ns += length if owner else 0
        found.compute_only_ns += 0 if owner else length
    elif owner is None:
        found.other_ns += length
    else:
        found.exposed_ns += length
        owner.waiting_ns += length if high <= owner.begin else 0
        owner.on_link_ns += 0 if high <= owner.begin else length
        if found.exposed and found.exposed[-1][1] == low and found.exposed[-1][2] is owner:
            low = found.exposed.pop()[0]
        found.exposed.append((low, high, owner))


def cause_of(passage: Passage, computed: Sequence[Span]) -> str:
    """Why its exposed time was not hidden: one of the record's causes, in the order of `account.py`."""
    exposed = passage.exposed_ns
    if not exposed:
        return "hidden"
    if 2 * (passage.start - passage.issue) >= exposed:
        return "link_busy"
    if 2 * passage.waiting_ns >= exposed:
        return "waiting_for_peer"
    before = sum(
        nanoseconds(span.end) - nanoseconds(span.start) for span in computed if nanoseconds(span.end) <= passage.issue
    )
    late = passage.collective.on_demand and before > _ENOUGH * exposed
    return "late_start" if late else "nothing_to_hide_behind"


# ---- tables


def tables_of(logs: list[RankLog], inner: int, dtypes: dict[str, str]) -> dict[str, list[Row]]:
    """The tables of all classes' logs; `inner` GPUs share one log's rank (tensor parallelism); the dtype of each kind
    of collective.
    """
    tables: dict[str, list[Row]] = {name: [] for name in ("ledger", "timeline", "breakdown", "exposed", "life", "idle")}
    for index, log in enumerate(logs):
        found, key = account(log, index), {"rank": log.rank.first * inner, "step": STEP}
        tables["ledger"] += [{**key, **row} for row in _ledger(found, dtypes)]
        tables["timeline"] += [{**key, **row, "emulated": False} for row in _timeline(log, found)]
        tables["breakdown"].append({**key, **_breakdown(found)})
        tables["exposed"] += [{**key, **row} for row in _exposed(log, found)]
        tables["life"] += [
            {**key, "unit": unit, "state": state, "phase": phase, "time_ns": nanoseconds(time)}
            for unit, state, phase, time in log.life
        ]
        tables["idle"].append({**key, **dict.fromkeys(IDLE_PARTS, 0), "rest_ns": found.other_ns})
    return tables


def _ledger(found: Account, dtypes: dict[str, str]) -> list[Row]:
    """`logical_bytes` are those sent, too: the simulation knows what travels, not what it is cut from."""
    rows = []
    for each in found.passages:
        unit, phase, kind = each.where
        sent = round(each.collective.transfer.wire_bytes)
        rows.append(
            {
                "unit": unit, "phase": phase, "kind": kind, "logical_bytes": sent, "wire_bytes": sent,
                "padding_bytes": 0, "dtype": dtypes.get(kind, ""), "start_ns": each.start, "end_ns": each.end,
                "emulated": False, "waited_ns": each.exposed_ns,
            }
        )  # fmt: skip
    return rows


_OF_A_LANE = ("lane", "unit", "phase", "name", "start_ns", "end_ns")


def _timeline(log: RankLog, found: Account) -> list[Row]:
    rows: list[tuple[Any, ...]] = [("step", "", "", f"step {STEP}", 0, found.step_ns)]
    for spans, lane in ((log.computed, "compute"), (log.waited, "waiting")):
        for span in spans:
            name = span.kind or f"{span.unit} {span.phase}".strip()
            rows.append((lane, span.unit, span.phase, name, nanoseconds(span.start), nanoseconds(span.end)))
    for each in found.passages:
        lane = each.where[2] if each.where[2] in LANES else "other_communication"
        rows.append((lane, *each.where, each.start, each.end))
    rows += [("exposed", *owner.where, start, end) for start, end, owner in found.exposed]
    return [dict(zip(_OF_A_LANE, row)) for row in rows]


def _breakdown(found: Account) -> Row:
    return {
        "step_ns": found.step_ns, "compute_ns": found.compute_only_ns + found.overlapped_ns,
        "compute_only_ns": found.compute_only_ns, "overlapped_ns": found.overlapped_ns,
        "exposed_ns": found.exposed_ns, "other_ns": found.other_ns,
        "on_link_ns": sum(each.on_link_ns for each in found.passages), "copying_ns": 0, "no_core_ns": 0,
        "waiting_ns": sum(each.waiting_ns for each in found.passages),
    }  # fmt: skip


def _exposed(log: RankLog, found: Account) -> list[Row]:
    """One row a unit, phase and kind; of several collectives the most exposed one gives the cause."""
    rows = []
    for (unit, phase, kind), members in grouped(found.passages, lambda each: each.where).items():
        worst = max(members, key=lambda each: each.exposed_ns)
        rows.append(
            {
                "unit": unit, "phase": phase, "kind": kind,
                "communication_ns": sum(each.end - each.start for each in members),
                "exposed_ns": sum(each.exposed_ns for each in members), "cause": cause_of(worst, log.computed),
                "on_link_ns": sum(each.on_link_ns for each in members), "copying_ns": 0, "no_core_ns": 0,
                "waiting_ns": sum(each.waiting_ns for each in members),
            }
        )  # fmt: skip
    return rows
