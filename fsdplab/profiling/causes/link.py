"""Exposed time on the link, and copies.

What no schedule could hide comes first, then what a schedule, other units or a second communicator would.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from fsdplab.common.names import IN_GROUPS, SAVES_MOST, STRATEGY_ROWS, strategies_that
from fsdplab.common.sizes import percent, seconds, size
from fsdplab.profiling.rules import Fact, Rule, named_unit, of_claim
from fsdplab.profiling.step_facts import StepFacts, Unclaimed
from fsdplab.profiling.step_summary import ExposedCell
from fsdplab.records import RunRecord

_REDUCED_ONCE = strategies_that(lambda row: row.reduces_once)
BIG_UNIT = 0.6  # part of all parameters in one unit from which on it has nothing to hide behind
LATENCY_BOUND = 0.4  # part of communication that is latency from which on units are too small
ALIKE = 1.5  # the largest unit over the smallest up to which units are alike


# ---- a link that is slower than the work


def _slow_link(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim what even a perfect schedule would leave exposed."""
    # latency is the units' fault and not the link's, and `tiny_units` claims it
    most = facts.excess_s - facts.latency_s
    if most <= 0 or not facts.busy_s:  # nothing was computed: no schedule would hide anything
        return None
    claim = left.claim("on_link_ns", at_most=most)
    if claim.cell is None:
        return None
    what = "The link is too slow for this work"
    unseen = ""
    if facts.absent:
        what = "Communication takes longer than the work"
        unseen = (
            f" Waiting for {facts.absent}, whose traces were not given, is in it: the link may be faster than this."
        )
    values = {
        "what": what,
        "link": seconds(facts.link_s),
        "busy": seconds(facts.busy_s),
        "carrier": _link(facts.record),
        "apart": ", gathers and reductions side by side," if facts.one_queue else "",
        "unseen": unseen,
    }
    return Fact(kind, claim.seconds, values=values)


def _link(record: RunRecord) -> str:
    """What carried the bytes, and whether that was measured."""
    link = record.summary.link
    if link and link.bytes_per_s:
        origin = record.provenance.get("link", "emulated")
        return f"{link.name}: {link.bytes_per_s / 1e6:,.0f} MB/s, {origin}"
    if record.provenance.get("step_time_s") == "simulated":
        return "the data sheet's link, simulated"
    return "the machine's own transport, measured"


def _faster_link(facts: StepFacts) -> str:
    """The remedies of a slow link: more work a step, or fewer bytes."""
    # micro-batches help where gradients are reduced once a step, whatever their number
    more_work = facts.words["larger_batch"]
    if facts.spec.get("strategy") in _REDUCED_ONCE:
        more_work += ", or more micro-batches"
    remedy = f"About {facts.link_s / facts.busy_s:.1f} times the tokens a rank and step would hide it ({more_work})"
    if facts.absent:
        remedy = f"Give the other ranks' traces too, which tell waiting from sending. {remedy}"
    fewer_bytes = _fewer_bytes(facts)
    if _can_be_grouped(facts.spec):
        fewer_bytes.append(facts.words["hybrid"])
    if fewer_bytes:
        remedy += f"; or send less: {', '.join(fewer_bytes)}"
    return f"{remedy}."


def _can_be_grouped(spec: Mapping[str, Any]) -> bool:
    """Whether the ranks can be cut into groups of two or more that shard, and DDP into fewer buckets."""
    if spec.get("engine") == "torch-ddp":
        return True
    ranks = spec.get("world_size") or 0
    has_groups = any(ranks % group == 0 for group in range(2, ranks // 2 + 1))
    return has_groups and _gathers_units(spec) and spec.get("strategy") not in IN_GROUPS


def _gathers_units(spec: Mapping[str, Any]) -> bool:
    """Whether a step gathers its units; where the strategy is not known, it may."""
    row = STRATEGY_ROWS.get(str(spec.get("strategy")))
    return row is None or not row.gathers_once


def _fewer_bytes(facts: StepFacts) -> list[str]:
    """Ways to send less that the run does not follow already."""
    ways = []
    if facts.spec.get("precision") != "bf16":
        ways.append(facts.words["low_precision"])
    if facts.spec.get("strategy") in SAVES_MOST:
        ways.append(facts.words["keep_gathered"])
    return ways


# ---- how the model is cut into units


def _tiny_units(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim the latency of many small collectives, as far as it is exposed."""
    latency = facts.latency_s
    communication = facts.communication_s
    if not communication or latency < LATENCY_BOUND * communication:
        return None
    # of latency as much is taken to be exposed as of all communication
    exposed_part = min(1.0, facts.exposed_s / communication)
    claim = left.claim("on_link_ns", at_most=latency * exposed_part)
    if claim.cell is None:
        return None
    rows = facts.last_step
    values = {
        "count": len(rows),
        "size": size(statistics.mean(row["logical_bytes"] for row in rows)),
        "latency": seconds(latency),
        "part": percent(latency / communication),
    }
    return Fact(kind, claim.seconds, values=values)


def _units_are_blocks(facts: StepFacts) -> bool:
    return facts.spec.get("units", "auto") in ("auto", "block")


def _larger_units(facts: StepFacts) -> str:
    return facts.words["fewer_units" if _units_are_blocks(facts) else "blocks_as_units"]


def _one_big_unit(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim all that a unit costs that holds most of the parameters."""
    bytes_by_unit = facts.unit_bytes
    total = sum(bytes_by_unit.values())
    if not total:
        return None
    [(unit, nbytes)] = bytes_by_unit.most_common(1)
    if nbytes < BIG_UNIT * total:
        return None
    if not unit:  # of no unit: buckets of DDP, or what a trainer gathers besides
        return None
    on_link = left.claim("on_link_ns", lambda cell: cell.unit == unit)
    copying = left.claim("copying_ns", lambda cell: cell.unit == unit)
    cost = on_link.seconds + copying.seconds
    if not cost:
        return None
    return Fact(kind, cost, unit=unit, values={"unit": named_unit(unit), "part": percent(nbytes / total)})


def _cut_unit(facts: StepFacts) -> str:
    return facts.words["cut_unit" if _units_are_blocks(facts) else "cut_into_blocks"]


# ---- when collectives are issued


def _no_prefetch(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim all-gathers that were issued only when their unit was needed."""
    claim = left.claim("on_link_ns", lambda cell: cell.cause == "late_start" and cell.kind == "all_gather")
    depth = _depth(facts)
    return of_claim(kind, claim, depth="" if depth is None else f" (prefetch={depth})")


def _blocking(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim other collectives whose call kept the host until they had ended, though there was work left."""
    return of_claim(kind, left.claim("on_link_ns", _caused("late_start")))


def _depth(facts: StepFacts) -> int | None:
    """How many units the run gathers ahead; None where another engine decides."""
    return facts.spec.get("prefetch") if facts.spec.get("engine") == "lab" else None


def _gather_ahead(facts: StepFacts) -> str:
    names = "set_modules_to_forward_prefetch and set_modules_to_backward_prefetch"
    if depth := _depth(facts):
        return f"The run gathers ahead already, but not these: name them with {names}, or try prefetch={depth + 1}."
    return facts.words["gather_ahead"]


# ---- collectives behind each other, and beside too little computing


def _one_communicator(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim the queueing of gathers behind reductions, which two queues would save."""
    link = facts.record.summary.link
    if link and link.queues == 2:
        return None
    # side by side, the shorter of the two kinds is all that can be saved
    saved = facts.communication_s - facts.longer_kind_s
    return of_claim(kind, left.claim("on_link_ns", _caused("link_busy"), saved))


def _side_by_side(facts: StepFacts) -> str:
    return f"{facts.words['apart']}{_deeper(facts)}."


def _busy_link(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim what gathers and reductions side by side would not save: queueing behind collectives of one's own kind."""
    return of_claim(kind, left.claim("on_link_ns", _caused("link_busy")))


def _more_work(facts: StepFacts) -> str:
    return f"Give the step more work beside them ({facts.words['larger_batch']}){_deeper(facts)}."


def _deeper(facts: StepFacts) -> str:
    """The remedy of gathering further ahead, where the run does not do so."""
    is_deep = facts.spec.get("engine") != "lab" or (facts.spec.get("prefetch") or 0) >= 2
    if is_deep or not _gathers_units(facts.spec):
        return ""
    return ", or gather two units ahead (prefetch=2)"


def _nothing_beside(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim collectives beside which too little computing was left."""
    blocks, _ = _blocks_and_root(facts)
    more = ", and a large unit outlasts its small neighbour" if _are_unlike(blocks) else ""
    # what a collective still sends once its last rank has come has nothing beside it either
    causes = ("nothing_to_hide_behind", "waiting_for_peer")
    return of_claim(kind, left.claim("on_link_ns", lambda cell: cell.cause in causes), more=more)


def _units_alike(facts: StepFacts) -> str:
    blocks, root = _blocks_and_root(facts)
    ways = []
    if _are_unlike(blocks):
        ways.append("make units alike in size")
    if blocks and root is not None and root > ALIKE * statistics.median(blocks):
        ways.append("keep the root small (embedding and head in units of their own)")
    ways.append(f"give each step more work ({facts.words['larger_batch']})")
    if not blocks:  # a trace does not say
        ways.append("if units or buckets differ in size, make them alike")
    remedy = ", or ".join(ways)
    return f"{remedy[0].upper()}{remedy[1:]}."


def _blocks_and_root(facts: StepFacts) -> tuple[list[int], int | None]:
    """(the bytes of the units but for the root, the root's), where the ledger tells."""
    sizes = {unit: nbytes for unit, nbytes in facts.unit_bytes.items() if nbytes}
    root = sizes.pop("root", None)
    return list(sizes.values()), root


def _are_unlike(blocks: list[int]) -> bool:
    return bool(blocks) and max(blocks) > ALIKE * min(blocks)


def _caused(cause: str) -> Callable[[ExposedCell], bool]:
    return lambda cell: cell.cause == cause


# ---- copies


def _copies(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim packing and unpacking."""
    return of_claim(kind, left.claim("copying_ns"))


def _fewer_copies(facts: StepFacts) -> str:
    ways = [*_fewer_bytes(facts), "more tokens per step"]
    return f"Use {', or '.join(ways)}."


# ---- the rules, a cause before its consequences

# what a schedule, other units or a second communicator could hide
OF_THE_SCHEDULE = (
    "tiny_units",
    "one_big_unit",
    "no_prefetch",
    "blocking",
    "one_communicator",
    "busy_link",
    "nothing_to_hide_behind",
)

ON_LINK = (
    Rule(
        "slow_link",
        _slow_link,
        "{what}: {link} of communication beside {busy} of computing",
        "Even a perfect schedule{apart} would leave {seconds} of each step exposed ({carrier}).{unseen}",
        _faster_link,
    ),
    Rule(
        "tiny_units",
        _tiny_units,
        "Units are too small: {count} collectives a step of {size} each spend {latency} on latency",
        "Latency is {part} of all communication; it does not shrink with the bytes. {seconds} of each step are"
        " exposed.",
        _larger_units,
    ),
    Rule(
        "one_big_unit",
        _one_big_unit,
        "One unit holds {part} of the parameters: {unit} costs {seconds} of each step",
        "Its all-gather has nothing to overlap with before it, its reduction nothing after it, and all of it is in"
        " memory at once.",
        _cut_unit,
    ),
    Rule(
        "no_prefetch",
        _no_prefetch,
        "All-gathers are issued too late: {seconds} of each step ({share}) are exposed, {where}",
        "They are issued when their unit is needed, so nothing runs while they travel{depth}.",
        _gather_ahead,
    ),
    Rule(
        "blocking",
        _blocking,
        "Calls wait for the collectives that they issue: {seconds} of each step ({share}) are exposed, {where}",
        "The host issued nothing else until the bytes had arrived, though there was work left.",
        "Issue them with async_op=True, and wait() where their result is needed.",
    ),
    Rule(
        "one_communicator",
        _one_communicator,
        "Gathers and reductions queue behind each other: {seconds} of each step are exposed, {where}",
        "The link was carrying another unit's collective when this one was issued: one communicator runs them one"
        " after the other.",
        _side_by_side,
    ),
    Rule(
        "busy_link",
        _busy_link,
        "Collectives queue behind others of their kind: {seconds} of each step are exposed, {where}",
        "The link was still carrying earlier ones when they were issued: for a while it cannot keep up.",
        _more_work,
    ),
    Rule(
        "nothing_to_hide_behind",
        _nothing_beside,
        "Communication has nothing to overlap with for {seconds} of each step ({share}), {where}",
        "Too little computing is left beside it: the first gathers of a step and the last reductions have none{more}.",
        _units_alike,
    ),
    Rule(
        "copies",
        _copies,
        "Packing and unpacking buffers takes {seconds} of each step ({share}), while nothing computes, {where}",
        "The rank packs gradients before a reduction and unpacks parameters after an all-gather.",
        _fewer_copies,
    ),
)
