"""Why a step was slower than its computing: at most five findings, the costliest first, each with a number and a
remedy.

An engineer who opens a trace looks for one of a few causes. Each rule below looks for one in the record's tables and
says how many seconds of a step it costs. Communication beyond computing is due to the link. Further exposed time is due
to a late gather, a busy queue, a unit without computing beside it, or a late rank.

Figures are of the rank that is exposed longest, means over the profiled steps (step_summary.py).
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.profiling.step_summary import step_summary, summaries
from fsdplab.records import RunRecord

MOST = 5
WORTH_SAYING = 0.02  # part of a step below which a cause is not mentioned
BIG_UNIT = 0.6  # part of all parameters in one unit from which on it has nothing to hide behind
SLOW_RANK = 1.15  # computing time over the other ranks' from which on a rank is slow
LATENCY_BOUND = 0.4  # part of communication that is latency from which on units are too small

Row = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """One cause: `seconds` of a step that it costs (0 for memory), what was seen, what to do."""

    kind: str
    seconds: float
    title: str
    text: str
    remedy: str


@dataclass(frozen=True)
class Scene:
    """The input of the rules: one record's profiled steps, in seconds a step of the most exposed rank."""

    record: RunRecord
    step_s: float
    compute_s: dict[int, float]
    own_s: dict[int, float]
    communication_s: float
    exposed_s: float
    exposed: list[Row]
    profiled: int

    @property
    def busy_s(self) -> float:
        """Seconds of computing a step: the ranks' median."""
        return statistics.median(self.compute_s.values())

    @property
    def excess_s(self) -> float:
        """Communication that even a perfect schedule leaves exposed; waiting for a late rank is not the link's.

        On an emulated link with one queue, gathers and reductions could travel side by side: then the longer of the two
        counts.
        """
        link = self.record.summary.get("link")
        moving = max(self.by_kind().values(), default=0.0) if link and link.get("queues") == 1 else self.communication_s
        return max(0.0, min(moving, self.communication_s) - self.by_cause("waiting_for_peer") - self.busy_s)

    def by_kind(self) -> dict[str, float]:
        """Seconds a step of gathers, and of reductions."""
        sums: dict[str, float] = defaultdict(float)
        for row in self.exposed:
            sums["gathers" if row["kind"] == "all_gather" else "reductions"] += (
                row["communication_ns"] / 1e9 / self.profiled
            )
        return sums

    def by_cause(self, *causes: str, kind: str | None = None, phase: str | None = None) -> float:
        """Exposed seconds a step for the given causes."""
        rows = [
            row
            for row in self.exposed
            if row["cause"] in causes and kind in (None, row["kind"]) and phase in (None, row["phase"])
        ]
        return sum(row["exposed_ns"] for row in rows) / 1e9 / self.profiled

    def worst(self, *causes: str, kind: str | None = None) -> Row | None:
        """The collective of these causes that costs most, with its exposed time a step."""
        sums: dict[tuple[str, str, str], float] = defaultdict(float)
        for row in self.exposed:
            if row["cause"] in causes and kind in (None, row["kind"]):
                sums[row["unit"], row["phase"], row["kind"]] += row["exposed_ns"] / self.profiled
        costly = max(sums, key=lambda each: sums[each], default=None)
        if costly is None or not sums[costly]:
            return None
        return {**dict(zip(("unit", "phase", "kind"), costly)), "exposed_ns": sums[costly]}


def findings(record: RunRecord) -> list[Finding]:
    """At most five findings on a profiled run, costliest first; ValueError when the run was not profiled.

    A full_shard run with prefetch=0 on a slow link gives first `Finding("no_prefetch", 0.21, "the gathers set out too
    late: ...", ...)`.
    """
    scene = _scene(record)
    found = [finding for rule in _RULES if (finding := rule(scene)) is not None]
    found = [finding for finding in found if finding.seconds >= WORTH_SAYING * scene.step_s]
    explained = {kind for finding in found for kind in _EXPLAINS.get(finding.kind, ())}
    found = [finding for finding in found if finding.kind not in explained]
    found = sorted(found, key=lambda finding: -finding.seconds)[: MOST - 1]
    peak = _peak(record)
    return found + ([peak] if peak else [])


def _scene(record: RunRecord) -> Scene:
    breakdown = record.table("breakdown")
    if not breakdown:
        raise ValueError(
            "findings need a profiled run, and this record has no profiled step; run it again with --profile 2"
        )
    ranks = summaries(breakdown)
    worst = step_summary(breakdown)
    assert worst is not None  # there are rows
    return Scene(
        record,
        step_s=worst.step_ns / 1e9,
        compute_s={rank: each.compute_ns / 1e9 for rank, each in ranks.items()},
        own_s={rank: (each.step_ns - each.exposed_ns) / 1e9 for rank, each in ranks.items()},
        communication_s=worst.communication_ns / 1e9,
        exposed_s=worst.exposed_ns / 1e9,
        exposed=[row for row in record.table("exposed") if row["rank"] == worst.rank],
        profiled=worst.steps,
    )


# ---- the rules


def _slow_link(scene: Scene) -> Finding | None:
    seconds = scene.excess_s - _latency_s(scene)
    if seconds <= 0 or not scene.busy_s:  # nothing was computed: no schedule would hide anything
        return None
    factor = scene.communication_s / scene.busy_s
    title = (
        f"the link is too slow for this work: {_ms(scene.communication_s)} of communication beside {_ms(scene.busy_s)}"
        " of computing"
    )
    text = f"Even a perfect schedule would leave {_ms(seconds)} a step exposed ({_link(scene.record)})."
    remedy = (
        f"About {factor:.1f} times the tokens a rank and step would hide it (larger batch, or more micro-batches where"
        " the strategy reduces once); or send less: bf16, shard_grad_op instead of full_shard, hybrid_shard with the"
        " shard group on a fast axis."
    )
    return Finding("slow_link", seconds, title, text, remedy)


def _no_prefetch(scene: Scene) -> Finding | None:
    seconds = scene.by_cause("late_start", kind="all_gather")
    worst = scene.worst("late_start", kind="all_gather")
    if worst is None:
        return None
    depth = scene.record.spec.get("prefetch") if scene.record.spec.get("engine") == "lab" else None
    title = (
        f"gathers set out too late: {_ms(seconds)} a step exposed, {_row(worst)} alone {_ms(worst['exposed_ns'] / 1e9)}"
    )
    text = "They are issued when their unit is needed, so nothing runs while they travel" + (
        f" (prefetch={depth})." if depth == 0 else "."
    )
    remedy = (
        "Gather a unit ahead: prefetch=1 (or set_modules_to_forward_prefetch and set_modules_to_backward_prefetch)."
    )
    return Finding("no_prefetch", min(seconds, _beyond(scene)), title, text, remedy)


def _one_communicator(scene: Scene) -> Finding | None:
    worst, link = scene.worst("link_busy"), scene.record.summary.get("link")
    if worst is None or link and link.get("queues") == 2:
        return None
    # side by side, the shorter of the two kinds is all that can be saved
    saved = scene.communication_s - max(scene.by_kind().values())
    seconds = min(scene.by_cause("link_busy"), saved, _beyond(scene))
    title = (
        f"gathers and reductions queue behind each other: {_ms(seconds)} a step exposed, {_row(worst)} alone"
        f" {_ms(worst['exposed_ns'] / 1e9)}"
    )
    text = (
        "The link was carrying another unit's collective when this one was issued: one communicator runs them one after"
        " the other."
    )
    remedy = (
        "Give reductions a communicator of their own (set_separate_reduce_scatter_group, --link-queues 2), or gather"
        " two units ahead (prefetch=2)."
    )
    return Finding("one_communicator", seconds, title, text, remedy)


def _tiny_units(scene: Scene) -> Finding | None:
    latency = _latency_s(scene)
    if not scene.communication_s or latency < LATENCY_BOUND * scene.communication_s:
        return None
    rows = _last_step(scene.record)
    size = statistics.mean(row["logical_bytes"] for row in rows)
    title = (
        f"units are too small: {len(rows)} collectives a step of {size / 1e3:.3g} kB each spend {_ms(latency)} on"
        " latency"
    )
    text = f"Latency is {latency / scene.communication_s:.0%} of all communication; it does not shrink with the bytes."
    seconds = latency * min(1.0, scene.exposed_s / scene.communication_s)
    return Finding(
        "tiny_units",
        seconds,
        title,
        text,
        'Make whole blocks units (units="auto"), or several blocks one unit: fewer, larger collectives.',
    )


def _one_big_unit(scene: Scene) -> Finding | None:
    held = Counter(
        {
            row["unit"]: row["logical_bytes"]
            for row in _last_step(scene.record)
            if row["kind"] in ("all_gather", "reduce_scatter")
        }
    )
    total = sum(held.values())
    if not total or (biggest := held.most_common(1)[0])[1] < BIG_UNIT * total:
        return None
    name, share = _named(biggest[0]), biggest[1] / total
    seconds = sum(row["exposed_ns"] for row in scene.exposed if _named(row["unit"]) == name) / 1e9 / scene.profiled
    title = f"one unit holds {share:.0%} of the parameters: {name} is exposed {_ms(seconds)} a step"
    text = (
        "Its gather has nothing to hide behind before it, its reduction nothing after it, and all of it is in memory at"
        " once."
    )
    return Finding(
        "one_big_unit",
        seconds,
        title,
        text,
        'Cut it: make each block a unit (units="auto"), so that a unit travels while its neighbour computes.',
    )


def _slow_rank(scene: Scene) -> Finding | None:
    if len(scene.own_s) < 2:
        return None
    slow = max(scene.own_s, key=scene.own_s.__getitem__)
    others = statistics.median(seconds for rank, seconds in scene.own_s.items() if rank != slow)
    seconds = scene.own_s[slow] - others
    if scene.own_s[slow] < SLOW_RANK * others:
        return _skew(scene)
    title = f"rank {slow} is slow: it is busy for {_ms(scene.own_s[slow])} a step, the others for {_ms(others)}"
    text = f"At every collective the others wait for it, {_ms(seconds)} a step in all."
    remedy = (
        f"Look at rank {slow}'s machine (another job, a hot or throttled card, fewer cores) and at its data (longer"
        " sequences than the others')."
    )
    return Finding("slow_rank", seconds, title, text, remedy)


def _skew(scene: Scene) -> Finding | None:
    """No rank is slow on average, but ranks wait for each other."""
    worst = scene.worst("waiting_for_peer")
    if worst is None:
        return None
    seconds = scene.by_cause("waiting_for_peer")
    title = f"ranks wait for each other: {_ms(seconds)} a step, at {_row(worst)} alone {_ms(worst['exposed_ns'] / 1e9)}"
    text = "No rank is slow on the whole; each is late now and then, and at a collective all wait for the last."
    return Finding(
        "skew",
        seconds,
        title,
        text,
        "Give each rank cores of its own, balance the lengths of sequences, and keep other work off the machine.",
    )


def _nothing_beside(scene: Scene) -> Finding | None:
    worst = scene.worst("nothing_to_hide_behind")
    if worst is None:
        return None
    seconds = min(scene.by_cause("nothing_to_hide_behind"), _beyond(scene))
    title = (
        f"communication with nothing to hide behind: {_ms(seconds)} a step, {_row(worst)} alone"
        f" {_ms(worst['exposed_ns'] / 1e9)}"
    )
    text = (
        "The first gather of a step and the last reduction have no computing beside them, and a large unit outlasts its"
        " small neighbour."
    )
    remedy = (
        "Make units alike in size, keep the root small (embedding and head in units of their own), or give each step"
        " more work."
    )
    return Finding("nothing_to_hide_behind", seconds, title, text, remedy)


_RULES: Sequence[Callable[[Scene], Finding | None]] = (
    _slow_link, _no_prefetch, _one_communicator, _tiny_units, _one_big_unit, _slow_rank, _nothing_beside,
)  # fmt: skip

_EXPLAINS = {  # consequences of a cause, which are no causes
    "one_big_unit": ("no_prefetch", "nothing_to_hide_behind"),
    "tiny_units": ("no_prefetch", "nothing_to_hide_behind", "one_communicator"),
}
_REMEDIES = {
    "activations": 'recompute them (checkpoint="full" or "selective"), or take a smaller micro-batch',
    "optimizer_state": "cut it over more ranks, or offload it",
    "whole_gradients": "shard them: zero2, shard_grad_op or full_shard",
    "gathered_parameters": "drop units after their forward (full_shard), make units smaller, gather fewer ahead",
    "parameter_slices": "cut them over more ranks (full_shard), or offload them",
    "gradient_slices": "cut them over more ranks, or reduce in bf16",
    "communication_buffers": "make units smaller, or allow fewer reductions in flight",
    "other": "look at the memory timeline: the optimizer's temporaries are the usual reason",
}


def _peak(record: RunRecord) -> Finding | None:
    """The largest category at the memory's peak."""
    measured = (record.summary.get("peak_memory_bytes") or {}).get("by_category") or {}
    split = {name: nbytes for name, nbytes in measured.items() if name in CATEGORY_ROWS and nbytes is not None}
    total = sum(split.values())
    if not total:
        return None
    name = max(split, key=split.__getitem__)
    words = CATEGORY_ROWS[name].words
    title = f"memory peaks at {total / 1e6:.0f} MB, {split[name] / total:.0%} of it {words}"
    text = f"At the peak's instant: {split[name] / 1e6:.0f} MB of {words}."
    return Finding("peak", 0.0, title, text, f"To lower it: {_REMEDIES[name]}.")


# ---- shared by the rules


def _beyond(scene: Scene) -> float:
    """Exposed seconds that another schedule could hide."""
    return max(0.0, scene.exposed_s - scene.excess_s)


def _last_step(record: RunRecord) -> list[Row]:
    """The collectives of rank 0's last step in the ledger."""
    rows = [row for row in record.table("ledger") if row["rank"] == 0]
    last = max((row["step"] for row in rows), default=0)
    return [row for row in rows if row["step"] == last]


def _latency_s(scene: Scene) -> float:
    """Seconds a step that collectives spend on latency: the emulated link's, or as long as the quickest collective of
    the step took.
    """
    rows, link = _last_step(scene.record), scene.record.summary.get("link")
    if not rows:
        return 0.0
    if link and link.get("bytes_per_s"):
        return sum(
            (row["end_ns"] - row["start_ns"]) / 1e9 - row["wire_bytes"] / link["bytes_per_s"]
            for row in rows
            if row["emulated"]
        )
    timed = [
        row for row in scene.record.table("timeline") if row["lane"] in ("all_gather", "reduce_scatter", "all_reduce")
    ]
    quickest = min((row["end_ns"] - row["start_ns"] for row in timed), default=0) / 1e9
    return quickest * len(rows) if statistics.mean(row["logical_bytes"] for row in rows) < 100_000 else 0.0


def _row(row: Row) -> str:
    return f"{row['kind']} of {_named(row['unit'])} in {row['phase'] or 'the step'}"


def _link(record: RunRecord) -> str:
    link = record.summary.get("link")
    if not link or not link.get("bytes_per_s"):
        return "the machine's own transport, measured"
    return f"{link['name']}: {link['bytes_per_s'] / 1e6:,.0f} MB/s, {record.provenance.get('link', 'emulated')}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _named(unit: str) -> str:
    return "the root" if unit in ("", "root") else unit
