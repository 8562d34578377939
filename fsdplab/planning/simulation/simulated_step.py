"""`simulate(spec)`: a plan's step, event by event, as a run record that every figure draws.

Ranks that are alike are simulated once, so 10,000 ranks cost what one does, and a slow rank costs a few classes more.
The record holds a rank of each class; its summary says how many ranks each stands for.

All-reduces may take trees, where these are faster than rings: few bytes over many ranks. A ring's latency grows with
the ranks, 2 (n - 1) steps; that of a tree, up and down again, with their logarithm. Two binary trees at once, in which
no rank is inside both, reach almost the full bandwidth (Sanders, Speck and Traeff 2009; in NCCL since 2.4): the busiest
rank sends 2 S for S bytes, where a ring's sends 2 S (n - 1)/n. All-gathers and reduce-scatters are rings.

A rank's step is told in the record's terms, in whole nanoseconds: every instant in one part of the step, and the rows
of the record's tables, a rank of each class. The definitions are those of measured steps
(`profiling/traces/account.py`): an instant with communication and without compute is exposed, and belongs to the
collective that ends first; between a collective's turn on this rank and its beginning, the rank waits for its peers.
`emulated` is False in every row: nothing waited for an emulated link. That all of it is simulated stands in the
record's provenance, which every figure shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, log2
from pathlib import Path
from typing import Any

from fsdplab.common.names import CATEGORIES
from fsdplab.common.rows import grouped
from fsdplab.common.thinning import downsample
from fsdplab.engine.core.step import Schedule
from fsdplab.planning.links import ring_steps
from fsdplab.planning.memory import Memory, memory_of_program
from fsdplab.planning.plan_spec import AS_IN_A_RUN, PlanError, PlanSpec
from fsdplab.planning.plan_traffic import bytes_by_axis, plan_traffic
from fsdplab.planning.program import OPTIMIZER, Program, StepWork, Transfer, program_of
from fsdplab.planning.step_time import work_of
from fsdplab.records import LANES, RunRecord, Spread, Summary
from fsdplab.records.summary import Comm, Peak, Profile, SimulatedRanks
from fsdplab.records.tables import IDLE_PARTS

from .ranks import Clock, Collective, Network, Rank, RankLog, Span, rank_classes
from .spread import spread_slowed

# ---- the account of a rank's step


Row = dict[str, Any]
STEP = 0  # the number of the one step
_ENOUGH = 0.1  # computing of a tenth of the exposed time is something to hide behind, as for measured steps


def nanoseconds(seconds: float) -> int:
    """Convert to whole nanoseconds: `nanoseconds(0.0015) == 1_500_000`."""
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
    """Account for a rank's log; `index` is its class's. The parts' sum is the step's length, which is asserted."""
    passages = [_passage(collective, index) for collective in log.collectives]
    parts = Account(nanoseconds(log.end), passages)
    computed = [(nanoseconds(span.start), nanoseconds(span.end)) for span in log.computed]
    edges = {0, parts.step_ns}.union(*computed)
    for passage in passages:
        edges.update((passage.start, passage.begin, passage.end))
    travelling = sorted(passages, key=lambda passage: passage.start)
    active: list[Passage] = []
    begun = computing = 0  # places in `travelling` and `computed`
    ordered = sorted(edges)
    for low, high in zip(ordered, ordered[1:]):  # in between nothing begins and nothing ends
        while begun < len(travelling) and travelling[begun].start <= low:
            active.append(travelling[begun])
            begun += 1
        active = [passage for passage in active if passage.end > low]
        while computing < len(computed) and computed[computing][1] <= low:
            computing += 1
        busy = computing < len(computed) and computed[computing][0] <= low
        first_to_end = min(active, key=lambda passage: passage.end, default=None)
        _add(parts, low, high, busy, first_to_end)
    total = parts.compute_only_ns + parts.overlapped_ns + parts.exposed_ns + parts.other_ns
    assert total == parts.step_ns, f"the parts of a simulated step sum to {total} ns, and the step is {parts.step_ns}"
    return parts


def _passage(collective: Collective, index: int) -> Passage:
    begun, ended = collective.begun, collective.ended
    assert begun is not None and ended is not None, f"{collective.unit}'s {collective.transfer.kind} never ended"
    return Passage(
        collective,
        issue=nanoseconds(collective.issued[index]),
        start=nanoseconds(collective.started[index]),
        begin=nanoseconds(begun),
        end=nanoseconds(ended),
    )


def _add(parts: Account, low: int, high: int, busy: bool, owner: Passage | None) -> None:
    """Add an interval in which nothing begins and nothing ends; `owner` is the collective that it belongs to."""
    length = high - low
    if busy and owner:
        parts.overlapped_ns += length
    elif busy:
        parts.compute_only_ns += length
    elif owner is None:
        parts.other_ns += length
    else:
        parts.exposed_ns += length
        if high <= owner.begin:
            owner.waiting_ns += length
        else:
            owner.on_link_ns += length
        if parts.exposed:
            earlier_low, earlier_high, earlier_owner = parts.exposed[-1]
            if earlier_high == low and earlier_owner is owner:  # it goes on
                parts.exposed.pop()
                low = earlier_low
        parts.exposed.append((low, high, owner))


def cause_of(passage: Passage, computed: Sequence[Span]) -> str:
    """Say why its exposed time was not hidden: one of the record's causes, in the order of `account.py`."""
    exposed = passage.exposed_ns
    if not exposed:
        return "hidden"
    if 2 * (passage.start - passage.issue) >= exposed:
        return "link_busy"
    if 2 * passage.waiting_ns >= exposed:
        return "waiting_for_peer"
    before = 0  # nanoseconds of compute that it could have run beside, had it been issued earlier
    for span in computed:
        if nanoseconds(span.end) <= passage.issue:
            before += nanoseconds(span.end) - nanoseconds(span.start)
    if passage.collective.on_demand and before > _ENOUGH * exposed:
        return "late_start"
    return "nothing_to_hide_behind"


# ---- tables


def tables_of(logs: list[RankLog], inner: int, dtypes: dict[str, str]) -> dict[str, list[Row]]:
    """Make the tables of all classes' logs; `inner` GPUs share one log's rank (tensor parallelism); the dtype of each
    kind of collective.
    """
    tables: dict[str, list[Row]] = {name: [] for name in ("ledger", "timeline", "breakdown", "exposed", "life", "idle")}
    for index, log in enumerate(logs):
        parts = account(log, index)
        key = {"rank": log.rank.first * inner, "step": STEP}
        tables["ledger"] += [{**key, **row} for row in _ledger(parts, dtypes)]
        tables["timeline"] += [{**key, **row, "emulated": False} for row in _timeline(log, parts)]
        tables["breakdown"].append({**key, **_breakdown(parts)})
        tables["exposed"] += [{**key, **row} for row in _exposed(log, parts)]
        for unit, state, phase, time in log.life:
            moved = {"unit": unit, "state": state, "phase": phase, "time_ns": nanoseconds(time)}
            tables["life"].append({**key, **moved})
        tables["idle"].append({**key, **dict.fromkeys(IDLE_PARTS, 0), "rest_ns": parts.other_ns})
    return tables


def _ledger(parts: Account, dtypes: dict[str, str]) -> list[Row]:
    """`logical_bytes` are those sent, too: the simulation knows what travels, not what it is cut from."""
    rows = []
    for passage in parts.passages:
        unit, phase, kind = passage.where
        sent = round(passage.collective.transfer.wire_bytes)
        rows.append(
            {
                "unit": unit,
                "phase": phase,
                "kind": kind,
                "logical_bytes": sent,
                "wire_bytes": sent,
                "padding_bytes": 0,
                "dtype": dtypes.get(kind, ""),
                "start_ns": passage.start,
                "end_ns": passage.end,
                "emulated": False,
                "waited_ns": passage.exposed_ns,
            }
        )
    return rows


_OF_A_LANE = ("lane", "unit", "phase", "name", "start_ns", "end_ns")


def _timeline(log: RankLog, parts: Account) -> list[Row]:
    rows: list[tuple[Any, ...]] = [("step", "", "", f"step {STEP}", 0, parts.step_ns)]
    for lane, spans in (("compute", log.computed), ("waiting", log.waited)):
        for span in spans:
            name = span.kind or f"{span.unit} {span.phase}".strip()
            rows.append((lane, span.unit, span.phase, name, nanoseconds(span.start), nanoseconds(span.end)))
    for passage in parts.passages:
        unit, phase, kind = passage.where
        lane = kind if kind in LANES else "other_communication"
        rows.append((lane, unit, phase, kind, passage.start, passage.end))
    for start, end, owner in parts.exposed:
        rows.append(("exposed", *owner.where, start, end))
    return [dict(zip(_OF_A_LANE, row)) for row in rows]


def _breakdown(parts: Account) -> Row:
    return {
        "step_ns": parts.step_ns,
        "compute_ns": parts.compute_only_ns + parts.overlapped_ns,
        "compute_only_ns": parts.compute_only_ns,
        "overlapped_ns": parts.overlapped_ns,
        "exposed_ns": parts.exposed_ns,
        "other_ns": parts.other_ns,
        "on_link_ns": sum(passage.on_link_ns for passage in parts.passages),
        "copying_ns": 0,
        "no_core_ns": 0,
        "waiting_ns": sum(passage.waiting_ns for passage in parts.passages),
    }


def _exposed(log: RankLog, parts: Account) -> list[Row]:
    """One row a unit, phase and kind; of several collectives the most exposed one gives the cause."""
    rows = []
    for (unit, phase, kind), passages in grouped(parts.passages, lambda passage: passage.where).items():
        worst = max(passages, key=lambda passage: passage.exposed_ns)
        rows.append(
            {
                "unit": unit,
                "phase": phase,
                "kind": kind,
                "communication_ns": sum(passage.end - passage.start for passage in passages),
                "exposed_ns": sum(passage.exposed_ns for passage in passages),
                "cause": cause_of(worst, log.computed),
                "on_link_ns": sum(passage.on_link_ns for passage in passages),
                "copying_ns": 0,
                "no_core_ns": 0,
                "waiting_ns": sum(passage.waiting_ns for passage in passages),
            }
        )
    return rows


# ---- a simulated step


_MOST_IN_FLIGHT = 10_000
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Simulated:
    """The logs of a step, one a class of ranks, how many events it took, and the program of every rank."""

    logs: tuple[RankLog, ...]
    operations: int
    program: Program

    @property
    def step_s(self) -> float:
        """Until the last rank has ended."""
        return max(log.end for log in self.logs)


def simulate_work(
    work: StepWork,
    *,
    communicators: int = 1,
    paces: Mapping[int, float] | None = None,
    schedule: Callable[[int], Schedule] = Schedule,
) -> Simulated:
    """Simulate a step of units whose costs are given; `paces` are those of slow ranks, over `shards` x `replicas`.

    `schedule` makes a rank's rule of what to gather ahead, from the prefetch depth.

    Two blocks of 1 s forward and 2 s backward without communication take 6 s, and the optimizer's time.
    """
    return simulate_program(work, program_of(work, schedule), communicators, paces)


def simulate_program(
    work: StepWork, program: Program, communicators: int = 1, paces: Mapping[int, float] | None = None
) -> Simulated:
    """Simulate a step whose operations are given: one program serves every link and every amount of compute."""
    clock = Clock()
    network = Network(clock, communicators)
    classes = rank_classes(work.shards, work.replicas, paces or {})
    ranks = [Rank(index, alike, work, program, clock, network) for index, alike in enumerate(classes)]
    for rank in ranks:
        clock.at(0.0, rank.go_on)
    clock.run()
    logs = [rank.log for rank in ranks]
    if len(logs) == 1:  # of ranks with paces of their own the same compute is slowed at different times
        logs = [spread_slowed(logs[0])]
    return Simulated(tuple(logs), clock.operations, program)


def simulate(
    spec: PlanSpec,
    *,
    communicators: int = 1,
    in_flight: int = 1,
    paces: Mapping[int, float] | None = None,
    trees: bool = False,
    efficiency: float | None = None,
    folder: str | Path | None = None,
    schedule: Callable[[int], Schedule] = Schedule,
    streams: bool = True,
) -> RunRecord:
    """Make a record of one simulated step of `spec`, not saved: `.save()` writes it to `folder`.

    `communicators`: 2 lets reductions and gathers share the link at once; `in_flight`: reductions under way, as
    `set_reduce_scatter_max_input_buffers` sets; `paces`: GPU -> by how much its compute takes longer (1.5). The ranks
    of a tensor- or context-parallel group go at the pace of their slowest. `trees`: all-reduces take trees where these
    are faster than rings. `schedule`: another rule than the engine's of what to gather ahead. `streams`: False for
    ranks on a CPU, whose host issues an all-reduce over replicas only when its reduce-scatter is complete. Raises
    PlanError.

    >>> from fsdplab.planning.planner import plan_spec
    >>> found = simulate(plan_spec("llama-3.1-8b", "h100", gpus=8))
    >>> found.provenance["step_time_s"], found.summary.simulated.ranks
    ('simulated', {0: 8})
    """
    _check(spec, communicators, in_flight, paces or {})
    work = work_of(spec, efficiency, in_flight).shared(streams=streams)
    if trees:
        work = with_trees(work)
    group_paces = _group_paces(spec, paces or {})
    simulated = simulate_work(work, communicators=communicators, paces=group_paces, schedule=schedule)
    gathered, reduced = _DTYPES[spec.param_dtype], _DTYPES[spec.reduce_dtype]
    dtypes = {"all_gather": gathered, "ring": gathered, "reduce_scatter": reduced, "all_reduce": reduced}
    tables = tables_of(list(simulated.logs), spec.tensor_parallel, dtypes)
    memory = memory_of_program(simulated.program, spec)
    tables["steps"], tables["memory"] = [], []
    tokens = spec.tokens * spec.grad_accum
    for log in simulated.logs:
        rank = log.rank.first * spec.tensor_parallel
        step = {"step": STEP, "loss": None, "tokens": tokens, "loading_s": None}
        tables["steps"].append({"rank": rank, "step_time_s": log.end, **step})
        tables["memory"] += [{"rank": rank, "step": STEP, **row} for row in _memory_rows(memory, log)]
    quantities = ("step_time_s", "tokens_per_s", "exposed_s", "comm", "peak_memory_bytes")
    return RunRecord(
        Path(folder or f"simulated-{spec.strategy}-{spec.gpus}-ranks"),
        spec=_spec_of(spec, communicators=communicators, in_flight=in_flight, trees=trees),
        environment={"device": "cuda", "device_name": spec.gpu.name},
        summary=_summary(spec, simulated, tables, memory),
        provenance=dict.fromkeys(quantities, "simulated"),
        tables=tables,
    )


def _check(spec: PlanSpec, communicators: int, in_flight: int, paces: Mapping[int, float]) -> None:
    if spec.pipeline_parallel > 1:
        raise PlanError(
            f"a step in {spec.pipeline_parallel} stages is not simulated event by event; leave --pp out, or take the"
            " closed form of fsdplab plan"
        )
    if communicators not in (1, 2):
        raise PlanError(f"communicators is {communicators!r}; expected 1, or 2 for reductions on one of their own")
    if not isinstance(in_flight, int) or isinstance(in_flight, bool) or not 1 <= in_flight <= _MOST_IN_FLIGHT:
        raise PlanError(f"in_flight is {in_flight!r}; expected a whole number from 1 to {_MOST_IN_FLIGHT:,}")
    for rank, pace in paces.items():
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < spec.gpus:
            raise PlanError(f"a pace is given for rank {rank!r}; expected one from 0 to {spec.gpus - 1:,}")
        if not isinstance(pace, (int, float)) or isinstance(pace, bool) or not math.isfinite(pace) or pace <= 0:
            raise PlanError(
                f"the pace of rank {rank} is {pace!r}; expected a number above 0, such as 1.5 for a slow one"
            )


def _group_paces(spec: PlanSpec, paces: Mapping[int, float]) -> dict[int, float]:
    """GPU -> pace becomes rank of the shards -> pace of its tensor- and context-parallel group."""
    slowest: dict[int, float] = {}
    members = spec.tensor_parallel * spec.context_parallel
    for group in {rank // members for rank in paces}:
        ranks = range(group * members, (group + 1) * members)
        pace = max(paces.get(rank, 1.0) for rank in ranks)
        first = group * spec.context_parallel
        slowest |= dict.fromkeys(range(first, first + spec.context_parallel), float(pace))
    return slowest


_CHOICES = (
    "strategy",
    "gpus",
    "micro_batch",
    "seq",
    "grad_accum",
    "param_dtype",
    "checkpointing",
    "prefetch",
    "optimizer",
    "shard_size",
    "tensor_parallel",
    "context_parallel",
)


def _spec_of(spec: PlanSpec, **choices: object) -> dict[str, Any]:
    """The plan under the names that a run's spec has."""
    named = {AS_IN_A_RUN.get(name, name): getattr(spec, name) for name in _CHOICES}
    return {"engine": "lab", "model": spec.model.name, "gpu": spec.gpu.name, **named, **choices}


def _memory_rows(memory: Memory, log: RankLog) -> list[Row]:
    """The moments of the plan at the times that the simulation gives them, as many as a measured timeline has at most;
    the first of the largest is the peak.
    """
    resting, *passing, stepping = memory.moments
    timed = [(0.0, resting)]
    timed += [(log.passed[moment.place], moment) for moment in passing]
    timed += [(log.end, stepping), (log.end, resting)]
    rows = []
    for place in downsample([moment.total for _, moment in timed]):
        time, moment = timed[place]
        by_category = {name: round(moment.by_category[name]) for name in CATEGORIES}
        rows.append({"time_ns": nanoseconds(time), **by_category, "is_peak": moment is memory.peak})
    return rows


def _summary(spec: PlanSpec, simulated: Simulated, tables: Mapping[str, list[Row]], memory: Memory) -> Summary:
    inner = spec.tensor_parallel
    ranks = {log.rank.first * inner: log for log in simulated.logs}
    # of the class that waits longest for communication
    worst = max(tables["breakdown"], key=lambda row: (row["exposed_ns"], -row["rank"]))
    log = ranks[worst["rank"]]
    stepping_s = sum(span.end - span.start for span in log.computed if span.phase == OPTIMIZER)
    exchange_s = sum(span.end - span.start for span in log.waited if span.phase == OPTIMIZER)
    sent = sum(bytes_by_axis(plan_traffic(spec)).values())
    peak = memory.peak
    return Summary(
        step_time_s=Spread.of([simulated.step_s]),
        tokens_per_s=spec.step_tokens / simulated.step_s,
        memory_start_ns=dict.fromkeys(ranks, 0),
        peak_memory_bytes=Peak(round(peak.total), {name: round(part) for name, part in peak.by_category.items()}),
        comm=_communication(worst, sent, sum(row["rank"] == worst["rank"] for row in tables["ledger"])),
        formula_bytes_per_step=sent,
        profile=Profile(steps=1, source="simulation", optimizer_s=exchange_s + stepping_s, exchange_s=exchange_s),
        simulated=SimulatedRanks(
            {rank: alike.rank.count * inner for rank, alike in ranks.items()}, simulated.operations
        ),
    )


def _communication(breakdown: Row, sent: int, collectives: int) -> Comm:
    """What one rank sends in a step, and what of its seconds is exposed."""
    overlap = None
    communication_ns = breakdown["overlapped_ns"] + breakdown["exposed_ns"]
    if communication_ns:
        overlap = breakdown["overlapped_ns"] / communication_ns
    return Comm(
        bytes_per_step=sent,
        collectives_per_step=collectives,
        exposed_s=breakdown["exposed_ns"] / 1e9,
        on_link_s=breakdown["on_link_ns"] / 1e9,
        copying_s=breakdown["copying_ns"] / 1e9,
        waiting_s=breakdown["waiting_ns"] / 1e9,
        overlap=overlap,
    )


# ---- trees


def with_trees(work: StepWork) -> StepWork:
    """Return the same step, each all-reduce by a ring or by trees, whichever is faster."""
    ranks = {"shard": work.shards, "replicate": work.replicas}

    def faster(transfer: Transfer) -> Transfer:
        return faster_all_reduce(transfer, ranks[transfer.axis]) if transfer.kind == "all_reduce" else transfer

    return work.on_links(faster)


def faster_all_reduce(ring: Transfer, ranks: int) -> Transfer:
    """Return the ring's transfer, or that of trees; `wire_bytes`, which a rank sends on average, are the same.

    1,024 ranks, 10 us a step: 20 ms of latency in a ring, 0.2 ms in a tree.

    >>> ring = Transfer("all_reduce", 1e6, 50e9, 2 * 1023 * 10e-6)
    >>> round(ring.seconds * 1e3, 2), round(faster_all_reduce(ring, 1024).seconds * 1e3, 2)
    (20.48, 0.22)
    """
    if ranks < 2:
        return ring
    step_s = ring.latency_s / ring_steps("all_reduce", ranks)
    up_and_down_s = 2 * ceil(log2(ranks)) * step_s
    # the busiest rank sends 2 S, where a ring's sends 2 S (n - 1)/n
    tree = replace(ring, latency_s=up_and_down_s, bytes_per_s=ring.bytes_per_s * (ranks - 1) / ranks)
    return min(ring, tree, key=lambda transfer: transfer.seconds)
