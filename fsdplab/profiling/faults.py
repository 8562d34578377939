"""Faults of a job that are seen in counts, and not in times: each a rule of the findings, with its remedy.

A step of a busy machine takes as long as it takes, but gradients that are reduced four times are reduced four times, on
any machine. So these rules look at what was counted: calls of the loop's own (recording/activities.py), collectives and
their bytes, how the job is set up (recording/observed.py). What a fault costs is measured where it can be, and only
orders the findings. A job that has none of them is accused of none.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from fsdplab.common.collectives import bus_factor
from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.common.sizes import percent, seconds, size
from fsdplab.profiling.loop_faults import LOOP_FAULTS, MANY, REGULAR, SMALL_BYTES, backwards, is_state, micro_batches
from fsdplab.profiling.rules import Fact, Rule, fault_rule
from fsdplab.profiling.setup_faults import SETUP_FAULTS
from fsdplab.profiling.step_facts import Activity, Claim, StepFacts, Unclaimed
from fsdplab.profiling.step_summary import ExposedCell
from fsdplab.profiling.training_faults import REDUCTIONS, TRAINS_WRONGLY, backward_begins
from fsdplab.records import PARTS_OF_EXPOSED
from fsdplab.records.tables import Row

SMALL_PART = 1 / 3  # part of an engine's collectives that may be small
BUCKET_BYTES = 5_000_000  # a bucket of DDP that is smaller is small; PyTorch's default is 25 MiB
USUAL_BUCKET = 25 * 2**20
FIRST_BUCKET = 2**20  # PyTorch's first bucket is of 1 MiB, so that its all-reduce begins early
LITTLE_TRAINED = 0.5  # part of the elements of units that are reduced, from which on most of them are trained
KEPT_UNITS = 0.1  # part of the peak that unsharded parameters may be
SMALL_UNITS = 0.05  # part of the peak below which unsharded parameters save nothing worth a second gather
# what a loss may need of other ranks, where reductions and broadcasts in a loop are of figures, flags or weights
_GATHERS = ("all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "reduce_scatter_tensor")
Cells = Callable[[ExposedCell], bool]


# ---- collectives: how often, how large, whose


def _of_engine(facts: StepFacts) -> list[Row]:
    """The collectives of an engine in the last profiled step of rank 0: those of its units; of an engine whose traces
    name no units, all that the loop has not called itself.
    """
    rows = facts.last_step
    of_units = [row for row in rows if row["unit"]]
    if of_units:
        return of_units
    # of 10 all-reduces, of which the loop calls 2 itself, the 8 largest are the engine's
    own_left: Counter[str] = Counter()
    for name, activity in _own(facts).items():
        own_left[name.removeprefix("own ")] = round(activity.count)
    of_engine = []
    for row in sorted(rows, key=lambda row: row["logical_bytes"]):  # the loop's own are the smallest
        if own_left[row["kind"]] > 0:
            own_left[row["kind"]] -= 1
        else:
            of_engine.append(row)
    return of_engine


def _own(facts: StepFacts) -> dict[str, Activity]:
    """The collectives that the loop calls itself in each step."""
    own = {name: activity for name, activity in facts.activities.items() if name.startswith("own ")}
    # full_tensor gathers: of a norm or a loss it is counted here, of a whole model it is the fault `state_dict`
    scalars = facts.activities.get("full_tensor")
    if scalars is not None and not is_state(scalars):
        own["own full_tensor"] = scalars
    return {name: activity for name, activity in own.items() if activity.regular > REGULAR}


def _needless(facts: StepFacts) -> dict[str, Activity]:
    """The collectives of the loop's own that training does not need, without the gradients of a job that has no engine:
    it reduces them itself, in large messages; small ones are of something else.
    """
    needless = {}
    for name, activity in _own(facts).items():
        is_large = activity.nbytes > SMALL_BYTES * activity.count
        may_be_needed = facts.spec.get("engine") == "plain" or name.removeprefix("own ") in _GATHERS
        if not (is_large and may_be_needed):
            needless[name] = activity
    return needless


def _exposed(left: Unclaimed, which: Cells, part: float = 1.0) -> float:
    """Claim a part of all exposed time of some collectives."""
    claims: list[Claim] = []
    for name in PARTS_OF_EXPOSED:
        claimable = left.of(name, which)
        claims.append(left.claim(name, which, at_most=part * claimable))
    return sum(claim.seconds for claim in claims)


def _reduced_often(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim reductions that are made once for each micro-batch."""
    times = micro_batches(facts)
    reductions = [row for row in _of_engine(facts) if row["kind"] in REDUCTIONS and row["phase"] != "optimizer"]
    if times < 2 or not reductions or _none_adds(facts):
        return None
    often_bytes = _repeated_bytes(facts, reductions, times)
    total_bytes = sum(row["logical_bytes"] for row in reductions)
    if 2 * often_bytes <= total_bytes:
        return None
    # bytes that each rank puts on the link; of 4 micro-batches 3 of 4 are avoidable
    ranks = facts.spec.get("world_size") or 2
    sent = sum(row["logical_bytes"] * bus_factor(row["kind"], row.get("group_size") or ranks) for row in reductions)
    avoidable = (times - 1) / times
    cost = _exposed(left, lambda cell: cell.kind in REDUCTIONS and cell.phase != "optimizer", avoidable)
    values = {"times": times, "more": times - 1, "saved": size(avoidable * sent), "sent": size(sent)}
    return Fact(kind, cost, values=values)


def _none_adds(facts: StepFacts) -> bool:
    """Whether gradients are set to zero before each backward of a step, so that each is reduced for itself: of a
    generator and its critic, of a point nearby (SAM), of a closure that is called several times (L-BFGS).
    """
    # where other engines keep gradients between two backwards was not tried
    is_known = facts.spec.get("engine") in ("torch-ddp", "torch-fsdp2")
    return is_known and facts.observed.get("adding_backwards") == 0


def _repeated_bytes(facts: StepFacts, reductions: Sequence[Row], times: int) -> int:
    """Bytes of the reductions that are made once a micro-batch: those of the same unit, kind and bytes.

    Where traces name no units, buckets of one size are told apart by the backward in which they are sent: of four equal
    ones in the last of four backwards none is repeated.
    """
    begins = backward_begins(facts, max(facts.steps, default=0))
    alike: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for row in reductions:
        alike[row["unit"], row["kind"], row["logical_bytes"]].append(row)
    repeated_bytes = 0
    for (unit, _, nbytes), rows in alike.items():
        count = len(rows)
        if not unit and len(begins) >= times:
            # the same number of begins before it: the same backward
            count = len({bisect_right(begins, row["start_ns"]) for row in rows})
        if count >= times:
            repeated_bytes += nbytes * len(rows)
    return repeated_bytes


def _own_collectives(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim collectives of the loop's own in each step."""
    own = _needless(facts)
    if not own:
        return None
    longest = max(own, key=lambda name: own[name].seconds)
    blocked = sum(activity.seconds for activity in own.values())
    values = {
        "listed": ", ".join(_in_words(name, activity) for name, activity in own.items()),
        "blocked": seconds(blocked),
        "which": longest.removeprefix("own "),
    }
    # exposed time where the trace shows it, else a cost of the step that no other finding shares
    rank = own[longest].rank
    claimed = _claim_own(left, {name.removeprefix("own ") for name in own}, blocked)
    if claimed:
        return Fact(kind, claimed, rank=rank, values=values)
    return Fact(kind, blocked, "step", rank=rank, values=values)


def _claim_own(left: Unclaimed, kinds: set[str], blocked: float) -> float:
    """Claim exposed time of the loop's own collectives, where that is most of the time for which they blocked it."""

    def is_own(cell: ExposedCell) -> bool:
        return not cell.unit and cell.kind in kinds

    # where hardly any of it was exposed, the loop was blocked by something else, and nothing is claimed
    parts = ("waiting_ns", "on_link_ns")
    claimable = sum(left.of(part, is_own) for part in parts)
    if 2 * claimable <= blocked:
        return 0.0
    claimed = 0.0
    for part in parts:
        claimed += left.claim(part, is_own, at_most=blocked - claimed).seconds
    return claimed


def _in_words(name: str, activity: Activity) -> str:
    """`4 all_reduce of 4 B`."""
    calls = max(1, round(activity.count))
    of_bytes = f" of {size(activity.nbytes / activity.count)}" if activity.nbytes else ""
    return f"{calls} {name.removeprefix('own ')}{of_bytes}"


def _without_own(facts: StepFacts) -> str:
    """What to do instead, by what the loop calls."""
    own = {name.removeprefix("own "): activity for name, activity in _needless(facts).items()}
    ways = []
    if any("barrier" in name for name in own):
        ways.append("Take the barrier out: a collective waits for its ranks by itself, and nothing else needs one.")
    # weights or batches, where small broadcasts are flags and figures
    large = [name for name, activity in own.items() if "broadcast" in name and activity.nbytes > SMALL_BYTES]
    if large:
        ways.append(
            "Take the broadcast out: ranks that begin with the same weights and step the same gradients stay equal, and"
            " of data each rank can load its own part."
        )
    if any("barrier" not in name and name not in large for name in own):
        ways.append(
            "Do it every hundredth step only: add figures up on each rank, stack them into one tensor, and all_reduce"
            " this one (async_op=True, read a step later) where somebody looks at them."
        )
    return " ".join(ways)


def _reduced_apart(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim the reductions of a job without an engine that reduces its gradients one parameter after the other."""
    reduced = _own(facts).get("own all_reduce")
    parameters = facts.observed.get("parameters") or 0
    if facts.spec.get("engine") != "plain" or reduced is None:
        return None
    if reduced.count < max(MANY, 0.5 * parameters):
        return None
    cost = _claim_own(left, {"all_reduce"}, reduced.seconds)
    values = {
        "count": round(reduced.count),
        "size": size(reduced.nbytes / reduced.count),
        "blocked": seconds(reduced.seconds),
    }
    return Fact(kind, cost or reduced.seconds, "exposed" if cost else "step", rank=reduced.rank, values=values)


def _frozen_reduced(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim the reductions of FSDP1's units in which little is trained: it reduces frozen parameters' zeros too."""
    reduced = facts.observed.get("reduced_elements") or 0
    trained = facts.observed.get("trained_elements") or 0
    if facts.spec.get("engine") != "torch-fsdp1" or not reduced or trained > LITTLE_TRAINED * reduced:
        return None
    rows = [row for row in _of_engine(facts) if row["kind"] in REDUCTIONS and row["phase"] != "optimizer"]
    sent = sum(row["logical_bytes"] for row in rows)
    if not sent:
        return None
    needless = 1 - trained / reduced
    cost = _exposed(left, lambda cell: cell.kind in REDUCTIONS and cell.phase != "optimizer", needless)
    values = {"sent": size(sent), "zeros": size(needless * sent), "part": percent(needless)}
    return Fact(kind, cost, values=values)


def _small_units(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim an engine's collectives where many are so small that latency is all of them."""
    rows = [row for row in _of_engine(facts) if row["unit"]]
    small = [row for row in rows if row["logical_bytes"] < SMALL_BYTES]
    if len(small) < MANY or len(small) < SMALL_PART * len(rows):
        return None
    # all collectives of these units, since they vanish with the unit: its gathers and its reduction
    units = {row["unit"] for row in small}
    cost = _exposed(left, lambda cell: cell.unit in units)
    values = {
        "count": len(rows),
        "small": len(small),
        "part": percent(len(small) / len(rows)),
        "size": size(SMALL_BYTES),
    }
    return Fact(kind, cost, values=values)


def _small_buckets(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim the all-reduces of DDP where its buckets are set smaller than PyTorch makes them."""
    bucket = facts.observed.get("bucket_bytes")
    rows = [row for row in _of_engine(facts) if row["kind"] == "all_reduce"]
    times = backwards(facts)
    # all-reduces of one backward
    buckets = len(rows) / times
    if not bucket or bucket >= BUCKET_BYTES or buckets < MANY / 2:
        return None
    total = sum(row["logical_bytes"] for row in rows) / times
    # of 10 buckets 9 could be spared: what the last one takes stays
    cost = _exposed(left, lambda cell: cell.kind == "all_reduce", 1 - 1 / buckets)
    values = {
        "count": round(buckets),
        "size": size(total / buckets),
        "bucket": size(bucket),
        "needed": max(1, math.ceil(total / 25e6)),
    }
    return Fact(kind, cost, values=values)


def _one_bucket(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim the all-reduce of DDP where its buckets are set so large that one holds all gradients."""
    bucket = facts.observed.get("bucket_bytes")
    rows = [row for row in _of_engine(facts) if row["kind"] == "all_reduce"]
    # one bucket means one all-reduce for each backward
    if not bucket or bucket <= USUAL_BUCKET or len(rows) != backwards(facts):
        return None
    total = rows[0]["logical_bytes"] or 0
    # the gradients of so small a model fit into PyTorch's first bucket too
    if total < FIRST_BUCKET:
        return None
    cost = _exposed(left, lambda cell: cell.kind == "all_reduce")
    return Fact(kind, cost, values={"size": size(total), "bucket": size(bucket)})


def _one_unit(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim all collectives of units where FSDP2 or FSDP1 is around the whole model, and around nothing inside it."""
    is_one_unit = facts.spec.get("job") and facts.spec.get("unit_count") == 1
    parameters = facts.observed.get("parameters") or 0
    if not is_one_unit or parameters < MANY:
        return None
    moved = sum(row["logical_bytes"] for row in _of_engine(facts) if row["kind"] == "all_gather")
    cost = _exposed(left, lambda cell: bool(cell.unit))
    return Fact(kind, cost, unit="root", values={"parameters": parameters, "moved": size(moved)})


def _not_ahead(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim forward gathers on CPUs, where FSDP2 gathers ahead only if it is told to; on a GPU its host runs ahead."""
    is_told = facts.observed.get("prefetches_forward", True)
    if is_told or facts.record.environment.get("device") != "cpu":
        return None
    gathers = [row for row in _of_engine(facts) if row["kind"] == "all_gather" and row["phase"] == "forward"]
    units = {row["unit"] for row in gathers}
    if len(units) < 3:
        return None
    claim = left.claim("on_link_ns", lambda cell: cell.kind == "all_gather" and cell.phase == "forward")
    return Fact(kind, claim.seconds, values={"count": len(gathers)})


def _needless_resharding(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim backward gathers where all units unsharded would hardly raise the peak."""
    gathers = [row for row in _of_engine(facts) if row["kind"] == "all_gather" and row["unit"]]
    again = sum(row["logical_bytes"] for row in gathers if row["phase"] == "backward")
    # by unit, since a unit that is gathered twice is in memory once
    bytes_of_units = {row["unit"]: row["logical_bytes"] for row in gathers}
    whole = sum(bytes_of_units.values())
    peak = facts.record.summary.peak_memory_bytes.total
    if not again or not peak or not facts.spec.get("job") or whole > SMALL_UNITS * peak:
        return None
    cost = _exposed(left, lambda cell: cell.kind == "all_gather" and cell.phase == "backward")
    values = {"whole": size(whole), "peak": size(peak), "part": percent(whole / peak), "again": size(again)}
    return Fact(kind, cost, values=values)


def _kept_units(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report units that stay unsharded from the forward to the backward, and are much of the peak."""
    peak = facts.record.summary.peak_memory_bytes
    kept = peak.split.get("unsharded_parameters", 0)
    strategy = STRATEGY_ROWS.get(facts.spec.get("strategy") or "")
    # sharded parameters that are gathered once: zero1 and zero2 have whole ones, and nothing to reshard
    keeps_gathered = strategy is not None and strategy.can_offload and not strategy.reshards_after_forward
    if not keeps_gathered or not facts.spec.get("job") or not peak.total:
        return None
    if kept < KEPT_UNITS * peak.total:
        return None
    values = {"kept": size(kept), "peak": size(peak.total), "part": percent(kept / peak.total)}
    return Fact(kind, 0.0, "memory", values=values)


def _full_messages(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim half of what is sent in fp32, though products are computed in a short type."""
    # a communication hook of DDP may already send a shorter type
    short = facts.observed.get("autocast")
    if not short or short == "float32" or facts.spec.get("precision") != "fp32" or facts.observed.get("has_comm_hook"):
        return None
    sent = facts.record.summary.comm.bytes_per_step
    # 2 bytes an element instead of 4
    cost = _exposed(left, lambda cell: cell.kind in (*REDUCTIONS, "all_gather"), 0.5)
    return Fact(kind, cost, values={"short": short, "sent": f" ({size(sent)} a step)" if sent else ""})


# ---- options of DDP


def _find_unused(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report a DDP that looks for unused parameters, and not by the default of transformers' Trainer."""
    is_asked = facts.observed.get("find_unused_parameters") and facts.spec.get("trainer") != "Trainer"
    if not is_asked or facts.observed.get("unused_parameters"):
        return None
    return Fact(kind, 0.0, "step")


def _sent_buffers(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim the broadcasts of a model's buffers that do not change."""
    nbytes = facts.observed.get("buffer_bytes")
    if not nbytes or not facts.observed.get("broadcast_buffers") or facts.observed.get("buffers_change", True):
        return None
    cost = _exposed(left, lambda cell: cell.kind == "broadcast")
    return Fact(kind, cost, values={"bytes": size(nbytes), "times": backwards(facts)})


# ---- the rules, a cause before its consequences


# faults that trade time for memory, or for precision, or cost little: what else is wrong comes first
CHOICES = ("needless_resharding", "kept_units", "recomputed", "full_messages", "looping_optimizer", "many_groups")

FAULTS = (
    *TRAINS_WRONGLY,
    *LOOP_FAULTS,
    *SETUP_FAULTS,
    fault_rule(
        "own_collectives",
        _own_collectives,
        "The loop calls collectives of its own in each step: {listed}, {blocked} of each step",
        "In each of them all ranks wait for the last one, so that nobody runs ahead; the longest is {which}.",
        _without_own,
        unless=["evaluation", "state_dict", "gathered_whole", "garbage_collection"],
    ),
    fault_rule(
        "reduced_apart",
        _reduced_apart,
        "Gradients are reduced one parameter after the other: {count} all_reduce of {size}, {blocked} of each step",
        "Nothing computes meanwhile, since they begin when the backward has ended, and each pays latency of its own.",
        "Let DistributedDataParallel(model) do it: it sends them in buckets while the backward goes on.",
        unless=["own_collectives"],
    ),
    fault_rule(
        "reduced_often",
        _reduced_often,
        "Gradients are reduced {times} times a step, once for each micro-batch: {saved} of {sent} sent are avoidable",
        "Backward runs {times} times before the optimizer steps, and {more} of the reductions add nothing that the"
        " last one would not.",
        "{reduce_once}",
    ),
    fault_rule(
        "frozen_reduced",
        _frozen_reduced,
        "Gradients of frozen parameters are reduced with those of trained ones: {zeros} of {sent} a step are zeros"
        " ({part})",
        "FullyShardedDataParallel holds the gradient of a unit as one tensor, and reduces it as a whole.",
        "Make units of what is trained, apart from what is frozen: an auto_wrap_policy (lambda_auto_wrap_policy) that"
        " wraps modules whose parameters require gradients; or take fully_shard, which reduces these alone.",
        unless=["not_stepped"],
    ),
    fault_rule(
        "one_unit",
        _one_unit,
        "The whole model is one unit: {moved} are gathered at once, and nothing computes meanwhile",
        "All {parameters} parameters are one unit: its all-gather has nothing to overlap with before it, its"
        " reduction nothing after it, and all of it is in memory at once.",
        lambda facts: facts.words["cut_into_blocks" if facts.spec.get("engine") == "lab" else "cut_unit"],
    ),
    fault_rule(
        "small_units",
        _small_units,
        "Units are too small: {small} of {count} collectives a step ({part}) are below {size}",
        "Latency is all of a collective that is so small, and it does not shrink with the bytes.",
        lambda facts: facts.words["blocks_as_units"],
    ),
    fault_rule(
        "small_buckets",
        _small_buckets,
        "DDP's buckets are too small: {count} all-reduces a step of {size} each, where {needed} would do",
        "bucket_cap_mb is set to {bucket}; latency is most of such a collective.",
        lambda facts: facts.words["fewer_units"],
    ),
    fault_rule(
        "one_bucket",
        _one_bucket,
        "All gradients are one bucket: the all-reduce of {size} begins when the backward has ended",
        "bucket_cap_mb is set to {bucket}; of smaller buckets the first is sent while the others are computed.",
        "DistributedDataParallel(model) with the default, bucket_cap_mb=25, whose first bucket has 1 MiB.",
    ),
    fault_rule(
        "sent_buffers",
        _sent_buffers,
        "DDP broadcasts the model's buffers in each forward, {bytes}, although they do not change",
        "The first rank sends them to all others before each forward ({times} a step).",
        "DistributedDataParallel(model, broadcast_buffers=False).",
    ),
    fault_rule(
        "needless_resharding",
        _needless_resharding,
        "Units are gathered twice a step, although all of them together are {whole} of a peak of {peak} ({part})",
        "They are dropped after the forward and gathered again for the backward: {again} a step.",
        lambda facts: f"Keep them: {facts.words['keep_gathered']}.",
    ),
    fault_rule(
        "full_messages",
        _full_messages,
        "Messages are sent in fp32{sent} although products are computed in {short}: half the bytes would do",
        "Under autocast parameters and gradients stay in fp32, and so do all-gathers and reductions.",
        lambda facts: f"Send in bf16 too: {facts.words['low_precision']}.",
    ),
    fault_rule(
        "find_unused",
        _find_unused,
        "DDP looks for unused parameters in each step (find_unused_parameters), and there are none",
        "It walks through the whole graph after each forward, and sends a map of what was used.",
        "DistributedDataParallel(model, find_unused_parameters=False), the default.",
    ),
    fault_rule(
        "kept_units",
        _kept_units,
        "Units stay unsharded from the forward to the backward: {kept} of a peak of {peak} ({part})",
        "They are gathered once a step instead of twice; their memory is needed for as long.",
        lambda facts: f"To lower the peak: {facts.words['reshard']}.",
        unless=["one_unit", "outside_units"],
    ),
    # what FSDP2 does unless it is told otherwise is no fault
    Rule(
        "not_ahead",
        _not_ahead,
        "Units are gathered when the forward needs them, and none ahead: {count} all-gathers a step take {seconds}"
        " ({share})",
        "Between CPU ranks fully_shard gathers ahead in the backward, and in the forward only where it is told to.",
        lambda facts: facts.words["gather_ahead"],
        unless=("one_unit", "small_units", "outside_units", "many_forwards", "forwards_without_graph"),
    ),
)
