"""Why a step was slower than its computing: at most five findings, each a fact with its number, and a remedy.

Each rule is a row: what it claims, and its words. It claims exposed seconds of a step that no rule before it has
claimed, a cause before its consequences, so the seconds of all findings add up to no more than the exposed time, and
the last rule calls unknown what is left. A late rank claims waiting for a peer, a rule of its own the copies, and the
rest was on the link: first what no schedule could hide, since the link is slower than the work, then what a schedule,
other units or a second communicator would. Idle time and memory are no exposed time, and are claimed beside it.

Where the ranks lacked a core for a large part of their steps, times say more about the machine than about the run; then
this is the only finding on time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsdplab.common.names import CATEGORY_ROWS, IN_GROUPS, SAVES_MOST, STRATEGY_ROWS, category_titles, strategies_that
from fsdplab.common.sizes import percent, seconds, size
from fsdplab.profiling.faults import CHOICES, FAULTS
from fsdplab.profiling.late_rank import LateRank, too_few_steps
from fsdplab.profiling.rules import Fact, Finding, Rule
from fsdplab.profiling.step_facts import Claim, StepFacts, Unclaimed, ahead, beside, by_rank, of_ranks, step_facts
from fsdplab.profiling.step_summary import ExposedCell
from fsdplab.profiling.vocabulary import words_of
from fsdplab.records import PARTS_OF_EXPOSED, RunRecord
from fsdplab.records.summary import core_sentence

MOST = 5
_REDUCED_ONCE = strategies_that(lambda row: row.reduces_once)
WORTH_SAYING = 0.02  # part of a step below which a cause is not mentioned
UNTOLD = 0.05  # part of the exposed time that may be left without a cause
BIG_UNIT = 0.6  # part of all parameters in one unit from which on it has nothing to hide behind
SLOW_RANK = 0.15  # by how much longer than the others a late rank computes from which on it is a slow one
LONG_STEP = 1.5  # a step without its exposed time over the rank's other steps, from which on it is a long one
LATENCY_BOUND = 0.4  # part of communication that is latency from which on units are too small
LOADING = 0.05  # part of a step that all ranks wait for their data from which on the loader is slow
IDLE = 0.1  # part of a step below which idle time is usual
OPTIMIZER = 0.2  # part of a step from which on the optimizer's step is worth a remedy
ALIKE = 1.5  # the largest unit over the smallest up to which units are alike
MUCH_LONGER = 1.5  # what one rank waits for its data over what the others wait, where it alone is slow
MOST_OF_IT = 0.5


def findings(record: RunRecord) -> list[Finding]:
    """At most five findings on a profiled run, costliest first; ValueError when the run was not profiled.

    A link that is slower than the work comes before what a schedule could hide on it. Of a full_shard run with
    prefetch=0 on a slow link the first says "All-gathers are issued too late: 210 ms of each step are exposed, ...".
    """
    facts = step_facts(record)
    peak = _found((_PEAK,), facts)
    if record.summary.short_of_cores:
        late = [each for each in _found(_LATE_RANKS, facts) if each.is_fault and _outlasts_waits(each, facts)]
        told = _faults_in_order([*late, *_found(FAULTS, facts)])
        return [*told[: MOST - 1], *_found((_SHORT_OF_CORES,), facts), *peak]
    found = _found((*_LATE_RANKS, *FAULTS, *_RULES), facts)
    claimed = sum(each.seconds for each in found if each.of == "exposed")
    assert abs(claimed - facts.exposed_s) <= 1e-6, (claimed, facts.exposed_s)  # all that there is, and no more
    return [*_shown(facts, found), *peak]


def _found(rules: Sequence[Rule], facts: StepFacts) -> list[Finding]:
    """What these rules claim, one after the other."""
    left = Unclaimed(facts.cells)
    found: list[Finding] = []
    for rule in rules:
        stands = any(each.kind in rule.unless for each in found)
        if not stands and (fact := rule.claims(rule.kind, facts, left)) is not None:
            found.append(rule.in_words(fact, facts))
    return found


def _faults_in_order(found: Sequence[Finding]) -> list[Finding]:
    """Costliest first; last what is a choice between time and memory, which its owner may have made."""
    return sorted(found, key=lambda each: (not each.is_fault, each.kind in CHOICES, -each.seconds))


def _outlasts_waits(found: Finding, facts: StepFacts) -> bool:
    """Whether a rank delays a step for longer than it waited for a core: then the delay is not the machine's."""
    waited = facts.observed.get("core_wait_s")
    own = waited.get(str(found.rank)) if isinstance(waited, dict) else None
    of_late = facts.late is not None and facts.late.rank == found.rank
    delay = facts.late.a_step_ns / 1e9 if facts.late is not None and of_late else found.seconds
    return own is not None and delay > own


def profiling_cost(record: RunRecord) -> str:
    """What must be said beside figures of profiled steps that were more than a tenth longer than timed ones; "" where
    they were not.
    """
    profile = record.summary.profile
    if profile is None or profile.overhead is None or profile.overhead <= 0.1:
        return ""
    return (
        f"Profiled steps took {percent(profile.overhead)} longer than timed ones. Exposed time in tables and figures"
        " is that of profiled steps; findings claim what the timed steps allow."
    )


def _shown(facts: StepFacts, found: Sequence[Finding]) -> list[Finding]:
    """The findings that are worth saying, in order; what is left out is said together where it is a twentieth of what
    is exposed.
    """
    counted = {rule.kind for rule in FAULTS}  # what is counted is told whatever it costs
    worth = [each for each in found if each.kind in counted or each.seconds >= WORTH_SAYING * facts.step_s]
    faults = [each for each in worth if each.is_fault]
    hints = [each for each in worth if not each.is_fault and each.kind in counted]
    parts = [each for each in worth if not each.is_fault and each not in hints]
    shown = [*_faults_in_order(faults), *hints, *_in_order(parts)][: MOST - 1]
    others = [each for each in found if each.of == "exposed" and each not in shown and each.seconds > 0]
    rest = sum(each.seconds for each in others)
    if rest <= UNTOLD * facts.exposed_s or rest < WORTH_SAYING * facts.step_s:
        return shown
    if len(others) == 1:
        return [*shown, *others]
    listed = ", ".join(f"{each.kind.replace('_', ' ')} {seconds(each.seconds)}" for each in others)
    return [*shown, _SMALLER.in_words(Fact(_SMALLER.kind, rest, values={"listed": listed}), facts)]


def _in_order(found: Sequence[Finding]) -> list[Finding]:
    """Costliest first, but a slow link before what a schedule could hide on it: with work enough, less would show."""
    by_cost = sorted(found, key=lambda finding: -finding.seconds)
    slow = [finding for finding in by_cost if finding.kind == "slow_link"]
    others = [finding for finding in by_cost if finding.kind != "slow_link"]
    place = next((index for index, each in enumerate(others) if each.kind in _OF_THE_SCHEDULE), len(others))
    before = sum(slow[0].seconds <= each.seconds for each in others[:place]) if slow else 0
    return [*others[:before], *slow, *others[before:]]


_OF_THE_SCHEDULE = (
    "tiny_units", "one_big_unit", "no_prefetch", "blocking", "one_communicator", "busy_link", "nothing_to_hide_behind",
)  # fmt: skip


# ---- waiting for a peer: the loader, one long step, a late rank


def _one_loader(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """One rank waits for its data, and the others for it."""
    means = by_rank(facts.loading)
    if len(means) < 2:
        return None
    rank = max(means, key=means.__getitem__)
    own, others = beside(facts.loading, rank)
    if own < MUCH_LONGER * others:  # a loader that is slow on every rank is another fault
        return None
    worth = WORTH_SAYING * facts.step_s
    so = [ahead(facts.loading, rank, step) >= worth for step in {step for _, step in facts.loading}]
    if min(own - others, left.waiting) < worth or sum(so) <= MOST_OF_IT * len(so):
        return None
    values = {"own": seconds(own), "others": seconds(others)}
    return Fact(kind, left.claim("waiting_ns", at_most=own - others).seconds, rank=rank, values=values)


def _loading_everywhere(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """All ranks wait for their data: no exposed time, but a part of every step."""
    means = by_rank(facts.loading)
    usual = min((statistics.median(each.values()) for each in of_ranks(facts.loading).values()), default=0.0)
    if usual < LOADING * facts.step_s:
        return None
    who = "Every rank" if len(means) > 1 else "The rank"
    return Fact(kind, min(means.values()), "step", values={"who": who})


def _long_step(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """One step was much longer than the others of the same rank, by work or by idling and not by communication."""
    if len(facts.steps) < 3:
        return None
    usual = {rank: statistics.median(each.values()) for rank, each in of_ranks(facts.own_s).items()}
    over = {key: own - usual[key[0]] for key, own in facts.own_s.items() if own >= LONG_STEP * usual[key[0]]}
    if not over:
        return None
    rank, step = max(over, key=over.__getitem__)
    on_all, steps = all((other, step) in over for other in usual), len(facts.steps)
    who = "on every rank" if on_all and len(usual) > 1 else f"on rank {rank}"
    values = {"step": step, "who": who, "steps": steps, "own": seconds(facts.own_s[rank, step])}
    values["usual"] = seconds(usual[rank])
    if on_all:  # nobody waits for anybody: it is a part of the step
        return Fact(kind, min(over[other, step] for other in usual) / steps, "step", values=values)
    return Fact(kind, left.claim("waiting_ns", at_most=over[rank, step] / steps).seconds, rank=rank, values=values)


def _slow_rank(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """A rank that is late, and computes longer than the others in every profiled step."""
    late = facts.late
    if late is None:
        return None
    own, others = beside(facts.compute_s, late.rank)
    longer = all(ahead(facts.compute_s, late.rank, step) > 0 for step in facts.steps)
    return _late_rank(kind, facts, left) if own - others >= SLOW_RANK * others and longer else None


def _late_rank(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    late = facts.late
    if late is None:
        return None
    own, others = beside(facts.compute_s, late.rank)
    values = {
        "where": f" in {late.phase}" if late.phase else "", "last": late.last, "of": late.of,
        "by": _how_late(late), "own": seconds(own), "others": seconds(others),
    }  # fmt: skip
    cost = left.claim("waiting_ns", at_most=late.of_waiting(left.waiting * 1e9) / 1e9).seconds
    return Fact(kind, cost, rank=late.rank, phase=late.phase, values=values)


def _how_late(late: LateRank) -> str:
    """By how much at the median collective; where it is late to few of them, what that adds to a step."""
    if late.by_ns > 0:
        return f"{seconds(late.by_ns / 1e9)} after the others (median)"
    return f"which delays each step by {seconds(late.a_step_ns / 1e9)}"


def _waiting(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Waiting that no rank in particular causes."""
    why = "No rank is late beyond chance: at each collective the ranks wait for whoever comes last."
    if few := too_few_steps(facts.record):
        why = f"At each collective the ranks wait for whoever comes last; whether it is always the same rank, {few}."
    return _of_claim(kind, left.claim("waiting_ns"), why=why)


# ---- on the link, and copies


def _slow_link(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    most = facts.excess_s - facts.latency_s
    if most <= 0 or not facts.busy_s:  # nothing was computed: no schedule would hide anything
        return None
    unseen = f" Waiting for {facts.absent}, whose traces were not given, is in it: the link may be faster than this."
    claim = left.claim("on_link_ns", at_most=most)
    values = {
        "what": "Communication takes longer than the work" if facts.absent else "The link is too slow for this work",
        "link": seconds(facts.link_s), "busy": seconds(facts.busy_s), "carrier": _link(facts.record),
        "apart": ", gathers and reductions side by side," if facts.one_queue else "",
        "unseen": unseen if facts.absent else "",
    }  # fmt: skip
    return Fact(kind, claim.seconds, values=values) if claim.cell else None


def _faster_link(facts: StepFacts) -> str:
    grown = ", or more micro-batches" if facts.spec.get("strategy") in _REDUCED_ONCE else ""
    less = _fewer_bytes(facts)
    if _can_be_grouped(facts.spec):
        less.append(facts.words["hybrid"])
    times = f"About {facts.link_s / facts.busy_s:.1f} times the tokens a rank and step would hide it"
    times += f" ({facts.words['larger_batch']}{grown})"
    traces = "Give the other ranks' traces too, which tell waiting from sending. " if facts.absent else ""
    return f"{traces}{times}" + (f"; or send less: {', '.join(less)}." if less else ".")


def _can_be_grouped(spec: Mapping[str, Any]) -> bool:
    """Whether the ranks can be cut into groups of two or more that shard, and DDP into fewer buckets."""
    if spec.get("engine") == "torch-ddp":
        return True
    ranks = spec.get("world_size") or 0
    enough = any(ranks % size == 0 for size in range(2, ranks // 2 + 1))
    return enough and _gathers_units(spec) and spec.get("strategy") not in IN_GROUPS


def _gathers_units(spec: Mapping[str, Any]) -> bool:
    """Whether a step gathers its units; where the strategy is not known, it may."""
    row = STRATEGY_ROWS.get(str(spec.get("strategy")))
    return row is None or not row.gathers_once


def _fewer_bytes(facts: StepFacts) -> list[str]:
    """Ways to send less that the run does not follow already."""
    ways = [facts.words["low_precision"]] if facts.spec.get("precision") != "bf16" else []
    return [*ways, facts.words["keep_gathered"]] if facts.spec.get("strategy") in SAVES_MOST else ways


def _tiny_units(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    latency, all_of_it = facts.latency_s, facts.communication_s
    if not all_of_it or latency < LATENCY_BOUND * all_of_it:
        return None
    rows = facts.last_step
    claim = left.claim("on_link_ns", at_most=latency * min(1.0, facts.exposed_s / all_of_it))
    mean = size(statistics.mean(row["logical_bytes"] for row in rows))
    values = {"count": len(rows), "size": mean, "latency": seconds(latency), "part": percent(latency / all_of_it)}
    return Fact(kind, claim.seconds, values=values) if claim.cell else None


def _units_are_blocks(facts: StepFacts) -> bool:
    return facts.spec.get("units", "auto") in ("auto", "block")


def _one_big_unit(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    held = facts.unit_bytes
    total = sum(held.values())
    if not total or (biggest := held.most_common(1)[0])[1] < BIG_UNIT * total:
        return None
    if not biggest[0]:  # of no unit: buckets of DDP, or what a trainer gathers besides
        return None
    parts = ("on_link_ns", "copying_ns")
    cost = sum(left.claim(part, lambda cell: cell.unit == biggest[0]).seconds for part in parts)
    values = {"unit": _named(biggest[0]), "part": percent(biggest[1] / total)}
    return Fact(kind, cost, unit=biggest[0], values=values) if cost else None


def _no_prefetch(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    claim = left.claim("on_link_ns", lambda cell: cell.cause == "late_start" and cell.kind == "all_gather")
    depth = _depth(facts)
    return _of_claim(kind, claim, depth="" if depth is None else f" (prefetch={depth})")


def _blocking(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Collectives besides gathers whose call kept the host until they had ended, though there was work left."""
    return _of_claim(kind, left.claim("on_link_ns", _caused("late_start")))


def _depth(facts: StepFacts) -> int | None:
    """How many units the run gathers ahead; None where another engine decides."""
    return facts.spec.get("prefetch") if facts.spec.get("engine") == "lab" else None


def _gather_ahead(facts: StepFacts) -> str:
    names = "set_modules_to_forward_prefetch and set_modules_to_backward_prefetch"
    if depth := _depth(facts):
        return f"The run gathers ahead already, but not these: name them with {names}, or try prefetch={depth + 1}."
    return facts.words["gather_ahead"]


def _one_communicator(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    link = facts.record.summary.link
    if link and link.queues == 2:
        return None
    # side by side, the shorter of the two kinds is all that can be saved
    saved = facts.communication_s - facts.longer_kind_s
    return _of_claim(kind, left.claim("on_link_ns", _caused("link_busy"), saved))


def _nothing_beside(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    blocks, _ = _blocks_and_root(facts)
    unlike = bool(blocks) and max(blocks) > ALIKE * min(blocks)
    more = ", and a large unit outlasts its small neighbour" if unlike else ""
    # what a collective still sends once its last rank has come has nothing beside it either
    causes = ("nothing_to_hide_behind", "waiting_for_peer")
    return _of_claim(kind, left.claim("on_link_ns", lambda cell: cell.cause in causes), more=more)


def _units_alike(facts: StepFacts) -> str:
    blocks, root = _blocks_and_root(facts)
    ways = ["make units alike in size"] if blocks and max(blocks) > ALIKE * min(blocks) else []
    if blocks and root is not None and root > ALIKE * statistics.median(blocks):
        ways.append("keep the root small (embedding and head in units of their own)")
    ways.append(f"give each step more work ({facts.words['larger_batch']})")
    ways += [] if blocks else ["if units or buckets differ in size, make them alike"]  # a trace does not say
    remedy = ", or ".join(ways)
    return f"{remedy[0].upper()}{remedy[1:]}."


def _no_core(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    cost = left.claim("no_core_ns").seconds
    return Fact(kind, cost) if cost else None


def _unknown(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Everything that no rule has claimed."""
    cost = sum(left.claim(part).seconds for part in PARTS_OF_EXPOSED)
    return Fact(kind, cost) if cost > 0 else None


def _caused(cause: str) -> Callable[[ExposedCell], bool]:
    return lambda cell: cell.cause == cause


def _of_claim(kind: str, claim: Claim, **values: Any) -> Fact | None:
    """A fact of what was claimed of some collectives, and of which most."""
    if claim.cell is None:
        return None
    whole = claim.cell.exposed_ns / 1e9
    name = _cell(claim.cell)
    where = f"{name} alone {seconds(whole)}" if claim.of_cell > 0.99 * whole else f"most at {name}"
    values = {"where": where, "at": name, **values}
    return Fact(kind, claim.seconds, unit=claim.cell.unit, phase=claim.cell.phase, values=values)


# ---- idle time

_IDLE_COLUMNS = {
    "host_bound": "host_bound_ns", "data_loading": "data_loading_ns", "synchronisation": "synchronisation_ns",
    "device_copies": "copies_ns", "copies_inside": "device_copies_ns", "kernel_gaps": "kernel_gap_ns",
    "waiting_for_a_core": "no_core_ns", "idle": "rest_ns",
}  # fmt: skip


def _idle(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Idle time of which this kind is the largest cause; for `idle` it is unknown."""
    known = facts.idle_s or {"rest_ns": facts.other_s}  # a record of before does not tell
    causes = {name: known.get(column, 0.0) for name, column in _IDLE_COLUMNS.items()}
    if kind != max(causes, key=causes.__getitem__) or facts.other_s < IDLE * facts.step_s:
        return None
    others = {name: cost for name, cost in causes.items() if name != kind and cost >= 0.001 * facts.step_s}
    listed = ", ".join(f"{name.replace('_', ' ')} {seconds(cost)}" for name, cost in others.items())
    rest = f"The rest of it: {listed}." if listed else ""
    of_it = f"for {seconds(causes[kind])} " if listed else ""
    values = {"other": seconds(facts.other_s), "whole": percent(facts.other_s / facts.step_s)}
    values |= {"rest": rest, "of_it": of_it}
    return Fact(kind, causes[kind], "step", values=values)


# ---- the optimizer's step


def _optimizer_step(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """A large part of each step is the optimizer's; what it exposes of its exchange is claimed by the rules above."""
    found = facts.optimizer
    if found is None or found.seconds < OPTIMIZER * facts.step_s:
        return None
    sends = found.exchange_s >= WORTH_SAYING * found.seconds
    exchanging = f", {percent(found.exchanging)} of it exchanging matrices" if sends else ""
    what = "Newton-Schulz's products" if facts.spec.get("optimizer") == "muon" else "one pass over parameters and state"
    return Fact(kind, found.seconds, "step", values={"exchanging": exchanging, "what": what})


def _shorter_optimizer_step(facts: StepFacts) -> str:
    spec, ways, row = facts.spec, [], STRATEGY_ROWS.get(str(facts.spec.get("strategy")))
    if spec.get("optimizer") == "muon" and spec.get("engine") != "lab":
        ways.append("let each matrix have one owner (fsdplab.engine.whole_matrices): here every rank steps all of them")
    if spec.get("optimizer") == "adamw-foreach":
        ways.append("take the fused AdamW (fused=True), one pass instead of several")
    if row and not row.cuts and spec.get("optimizer") != "muon":
        ways.append(facts.words["shard_state"])
    ways.append(f"give each step more work, of which it is a smaller part ({facts.words['larger_batch']})")
    remedy = ", or ".join(ways)
    return f"{remedy[0].upper()}{remedy[1:]}."


# ---- the machine, and memory


def _short_of_cores(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    sentence = core_sentence(facts.record.summary.cpu_share or 0.0).removesuffix(".")
    return Fact(kind, 0.0, "machine", values={"sentence": sentence})


def _peak(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """The largest category at the memory's peak."""
    known = facts.record.summary.peak_memory_bytes.split
    split = {name: nbytes for name, nbytes in known.items() if name in CATEGORY_ROWS}
    total = sum(split.values())
    if not total:
        return None
    name = max(split, key=split.__getitem__)
    values = {"total": size(total), "bytes": size(split[name]), "part": percent(split[name] / total)}
    values |= {"category": category_titles([facts.spec])[name], "smaller": _smaller(facts.spec, name)}
    kept = facts.record.summary.workspace_bytes
    values["besides"] = f" cuBLAS keeps {size(kept)} of scratch memory besides, which is not counted." if kept else ""
    return Fact(kind, 0.0, "memory", values=values)


def _smaller(spec: Mapping[str, Any], category: str) -> str:
    """Ways to make a category smaller that a run does not follow already: what is sharded can be sharded further."""
    words = words_of(spec)
    row = STRATEGY_ROWS.get(str(spec.get("strategy")))
    sharded = row.cuts if row else ()
    whole = spec.get("strategy") in SAVES_MOST
    offloads = spec.get("offload", "none") != "none"
    recomputes = spec.get("checkpoint") not in (None, "none")
    ways = {
        "activations": (
            "" if recomputes else words["recompute"],
            "" if spec.get("batch_size") == 1 else words["smaller_batch"], words["shorter"],
        ),
        "optimizer_state": (
            words["shard_further" if "optimizer" in sharded else "shard_state"],
            "" if offloads else words["offload_state"],
        ),
        "unsharded_gradients": (words["smaller_units" if "gradients" in sharded else "shard_gradients"],),
        "unsharded_parameters": (
            "" if whole else words["reshard"], words["smaller_units"],
            "gather fewer ahead" if spec.get("prefetch") else "",
        ),
        "sharded_parameters": (
            words["shard" if "parameters" in sharded else "shard_more"], "" if offloads else words["offload"],
        ),
        "sharded_gradients": (words["shard"], words["reduce_low"]),
        "communication_buffers": (words["smaller_units"], words["fewer_in_flight"]),
        "other": (words["other"],),
    }[category]  # fmt: skip
    return ", or ".join(filter(None, ways))


# ---- words


def _blocks_and_root(facts: StepFacts) -> tuple[list[int], int | None]:
    """(the bytes of the units but for the root, the root's), where the ledger tells."""
    sizes = {unit: nbytes for unit, nbytes in facts.unit_bytes.items() if nbytes}
    root = sizes.pop("root", None)
    return list(sizes.values()), root


def _cell(cell: ExposedCell) -> str:
    """The collective's name; without its unit where it has none."""
    of = f" of {_named(cell.unit)}" if cell.unit else ""
    return f"{cell.kind}{of} in {cell.phase or 'the step'}"


def _named(unit: str) -> str:
    return "the root" if unit == "root" else unit


def _link(record: RunRecord) -> str:
    link = record.summary.link
    if not link or not link.bytes_per_s:
        simulated = record.provenance.get("step_time_s") == "simulated"
        return "the data sheet's link, simulated" if simulated else "the machine's own transport, measured"
    return f"{link.name}: {link.bytes_per_s / 1e6:,.0f} MB/s, {record.provenance.get('link', 'emulated')}"


_WAIT_FOR_IT = "The others wait for it at their next collective: {seconds} of each step."
_LATE = "comes last to {last} of {of} collectives{where}, {by}"


def _idle_rule(kind: str, why: str, remedy: str | Callable[[StepFacts], str], unless: tuple[str, ...] = ()) -> Rule:
    title = f"Nothing ran for {{other}} of each step ({{whole}}): {{of_it}}{why}"
    return Rule(kind, _idle, title, "Neither computing nor communication ran. {rest}", remedy, unless)


_FEWER_RANKS = "Run fewer ranks than cores, and nothing beside them."

_SHORT_OF_CORES = Rule(
    "short_of_cores", _short_of_cores, "{sentence}", "Findings that depend on times are left out.",
    "End what else runs on this machine, or run fewer ranks, and run it again.",
)  # fmt: skip
_PEAK = Rule(
    "peak", _peak, "Peak memory is {total}, of which {bytes} ({part}) is {category}",
    "It is the worst rank's, split at the instant of the peak.{besides}", "To lower it: {smaller}.",
)  # fmt: skip
_SMALLER = Rule(
    "smaller_causes", lambda kind, facts, left: None, "Smaller causes take {seconds} of each step together ({share})",
    "They are: {listed}.", "Begin with the causes above: these change with them.",
)  # fmt: skip
# whom others wait for
_LATE_RANKS = (
    Rule("slow_loading", _one_loader, "Rank {rank} waits {own} a step for its data, the others {others}",
         _WAIT_FOR_IT, "Look at rank {rank}'s loader. {loader}", is_fault=True),
    Rule("long_step", _long_step, "Step {step} was a long one {who}: {own} without communication, usually {usual}",
         "Spread over the {steps} profiled steps that is {seconds} a step. The other steps are as usual.",
         "Look at what else happened in this step: a checkpoint, an evaluation, garbage collection, new shapes"
         " (compilation, cudnn benchmarks). Profile more steps before you judge the rank."),
    Rule("slow_rank", _slow_rank, "Rank {rank} is slow: it computes for {own} a step, the others for {others}",
         f"It {_LATE}. {_WAIT_FOR_IT}",
         "Look at rank {rank}'s machine (another job, a hot or throttled card, fewer cores) and at its data (longer"
         " sequences than the others').", is_fault=True),
    Rule("late_rank", _late_rank, f"Rank {{rank}} {_LATE}",
         "It computes for {own} a step, the others for {others}, so its device is not slow. " + _WAIT_FOR_IT,
         "Look at what rank {rank} does between its collectives besides computing: its host's other work, loading,"
         " logging, synchronisation, or more of the model's work than the others have.",
         unless=("slow_rank",), is_fault=True),
)  # fmt: skip
# waiting for nobody in particular, the link, copies, the loader, idle time; a cause before its consequences
_RULES = (
    Rule("skew", _waiting, "Ranks wait for each other for {seconds} of each step ({share}), most at {at}", "{why}",
         "Balance the lengths of sequences over the ranks, and give each rank cores of its own.",
         unless=("slow_rank", "late_rank")),
    Rule("more_waiting", _waiting, "Ranks wait for each other for another {seconds} of each step, most at {at}",
         "It is more than the rank that is named above accounts for.",
         "Look at the straggler map: at which collectives, and for whom.", unless=("skew",)),
    Rule("slow_link", _slow_link, "{what}: {link} of communication beside {busy} of computing",
         "Even a perfect schedule{apart} would leave {seconds} of each step exposed ({carrier}).{unseen}",
         _faster_link),
    Rule("tiny_units", _tiny_units,
         "Units are too small: {count} collectives a step of {size} each spend {latency} on latency",
         "Latency is {part} of all communication; it does not shrink with the bytes. {seconds} of each step are"
         " exposed.",
         lambda facts: facts.words["fewer_units" if _units_are_blocks(facts) else "blocks_as_units"]),
    Rule("one_big_unit", _one_big_unit,
         "One unit holds {part} of the parameters: {unit} costs {seconds} of each step",
         "Its all-gather has nothing to overlap with before it, its reduction nothing after it, and all of it is in"
         " memory at once.",
         lambda facts: facts.words["cut_unit" if _units_are_blocks(facts) else "cut_into_blocks"]),
    Rule("no_prefetch", _no_prefetch,
         "All-gathers are issued too late: {seconds} of each step ({share}) are exposed, {where}",
         "They are issued when their unit is needed, so nothing runs while they travel{depth}.", _gather_ahead),
    Rule("blocking", _blocking,
         "Calls wait for the collectives that they issue: {seconds} of each step ({share}) are exposed, {where}",
         "The host issued nothing else until the bytes had arrived, though there was work left.",
         "Issue them with async_op=True, and wait() where their result is needed."),
    Rule("one_communicator", _one_communicator,
         "Gathers and reductions queue behind each other: {seconds} of each step are exposed, {where}",
         "The link was carrying another unit's collective when this one was issued: one communicator runs them one"
         " after the other.",
         lambda facts: f"{facts.words['apart']}{_deeper(facts)}."),
    # what gathers and reductions side by side would not save: collectives that queue behind their own kind
    Rule("busy_link", lambda kind, facts, left: _of_claim(kind, left.claim("on_link_ns", _caused("link_busy"))),
         "Collectives queue behind others of their kind: {seconds} of each step are exposed, {where}",
         "The link was still carrying earlier ones when they were issued: for a while it cannot keep up.",
         lambda facts: f"Give the step more work beside them ({facts.words['larger_batch']}){_deeper(facts)}."),
    Rule("nothing_to_hide_behind", _nothing_beside,
         "Communication has nothing to overlap with for {seconds} of each step ({share}), {where}",
         "Too little computing is left beside it: the first gathers of a step and the last reductions have none{more}.",
         _units_alike),
    Rule("copies", lambda kind, facts, left: _of_claim(kind, left.claim("copying_ns")),
         "Packing and unpacking buffers takes {seconds} of each step ({share}), while nothing computes, {where}",
         "The rank packs gradients before a reduction and unpacks parameters after an all-gather.",
         lambda facts: f"Use {', or '.join([*_fewer_bytes(facts), 'more tokens per step'])}."),
    Rule("no_core", _no_core, "Ranks wait for a core for {seconds} of each step ({share}) inside their collectives",
         "Something else used the cores meanwhile: another process, or the transport's own threads.",
         _FEWER_RANKS),
    Rule("unknown", _unknown, "The cause of {seconds} of exposed time in each step ({share}) is unknown",
         "The trace does not show who issued these collectives, or what they waited for.",
         "Look at the timeline, or in Perfetto, for what runs beside them."),
    Rule("slow_loading", _loading_everywhere,
         "Loading data takes {seconds} of a step of {step_s} ({share})",
         "{who} waits for its data before it computes, in most of the steps.",
         "Load while the step computes. {loader}", unless=("slow_loading",)),
    Rule("optimizer_step", _optimizer_step,
         "The optimizer's step takes {share} of the step ({seconds}){exchanging}",
         "It is {what}, as long for a small batch as for a large one.", _shorter_optimizer_step),
    _idle_rule("host_bound", "the host launched its next work too late",
               "Give the device more work a launch (larger batch, torch.compile, fused operators, CUDA graphs), and"
               " keep Python out of the step."),
    _idle_rule("data_loading", "the host was waiting for its DataLoader",
               "Load ahead: more workers (num_workers), a larger prefetch_factor, pin_memory=True; or prepare the data"
               " once before training.", unless=("slow_loading",)),
    _idle_rule("synchronisation", "the host was blocked in a synchronising call, so nothing was queued",
               "Take .item(), .cpu() and print of tensors out of the step, or do them every hundredth step; copy with"
               " non_blocking=True."),
    _idle_rule("copies_inside", "data was copied inside the device, and nothing ran beside it",
               "The table of operators says of which units (--tables). Of the model's own copies (.contiguous(),"
               " .clone(), cat) torch.compile leaves fewer; others are an engine's, which packs what it sends."),
    _idle_rule("device_copies", "data was copied between the host and the device, and nothing ran beside it",
               "Copy the next batch on a stream of its own while this one computes (pin_memory=True,"
               " non_blocking=True)."),
    _idle_rule("kernel_gaps", "many short kernels followed each other, with a gap before each",
               "Fuse them: torch.compile, fused optimizers, CUDA graphs."),
    _idle_rule("waiting_for_a_core", "the rank waited for a core", _FEWER_RANKS),
    _idle_rule("idle", "the reason is unknown",
               lambda facts: _ON_A_DEVICE if facts.record.environment.get("device") == "cuda" else _ON_A_CPU),
)  # fmt: skip
_ON_A_DEVICE = (
    "Profile with ProfilerActivity.CPU and ProfilerActivity.CUDA, so that launches are in the trace; where they are,"
    " look in Perfetto for what the queued work waited for: another stream, an event, a peer."
)
_ON_A_CPU = (
    "No operator ran: Python between the operators, work outside of PyTorch, or a thread without a core. A sampling"
    " profiler (py-spy) tells which."
)


def _deeper(facts: StepFacts) -> str:
    """The remedy of gathering further ahead, where the run does not do so."""
    deep = facts.spec.get("engine") != "lab" or (facts.spec.get("prefetch") or 0) >= 2
    return "" if deep or not _gathers_units(facts.spec) else ", or gather two units ahead (prefetch=2)"
