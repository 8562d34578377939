"""Waiting for a peer: a rank whose loader is slow, one long step, a late rank, or no rank in particular."""

from __future__ import annotations

import statistics

from fsdplab.common.sizes import seconds
from fsdplab.profiling.late_rank import LateRank, too_few_steps
from fsdplab.profiling.rules import FEWER_RANKS, WORTH_SAYING, Fact, Rule, fault_rule, of_claim
from fsdplab.profiling.step_facts import StepFacts, Unclaimed, ahead, beside, by_rank, of_ranks

SLOW_RANK = 0.15  # by how much longer than the others a late rank computes from which on it is a slow one
LONG_STEP = 1.5  # a step without its exposed time over the rank's other steps, from which on it is a long one
MUCH_LONGER = 1.5  # what one rank waits for its data over what the others wait, where it alone is slow
MOST_OF_IT = 0.5


def _one_loader(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim what one rank's waiting for its data costs the others, which wait for this rank."""
    means = by_rank(facts.loading)
    if len(means) < 2:
        return None
    rank = max(means, key=means.__getitem__)
    own, others = beside(facts.loading, rank)
    if own < MUCH_LONGER * others:  # a loader that is slow on every rank is another fault
        return None
    worth = WORTH_SAYING * facts.step_s
    if own - others < worth or left.waiting < worth:
        return None
    steps = {step for _, step in facts.loading}
    slow_steps = sum(ahead(facts.loading, rank, step) >= worth for step in steps)
    if slow_steps <= MOST_OF_IT * len(steps):
        return None
    claim = left.claim("waiting_ns", at_most=own - others)
    return Fact(kind, claim.seconds, rank=rank, values={"own": seconds(own), "others": seconds(others)})


def _long_step(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim what one step took longer than the rank's others by work or idling, and not by communication."""
    steps = len(facts.steps)
    if steps < 3:
        return None
    # the median of a rank's own steps, so that a rank that is slow in all of them has no long one
    usual = {rank: statistics.median(of_step.values()) for rank, of_step in of_ranks(facts.own_s).items()}
    over: dict[tuple[int, int], float] = {}
    for (rank, step), own in facts.own_s.items():
        if own >= LONG_STEP * usual[rank]:
            over[rank, step] = own - usual[rank]
    if not over:
        return None
    rank, step = max(over, key=over.__getitem__)
    is_long_on_all = all((other, step) in over for other in usual)
    values = {
        "step": step,
        "who": "on every rank" if is_long_on_all and len(usual) > 1 else f"on rank {rank}",
        "steps": steps,
        "own": seconds(facts.own_s[rank, step]),
        "usual": seconds(usual[rank]),
    }
    if is_long_on_all:  # nobody waits for anybody: it is a part of the step
        shortest = min(over[other, step] for other in usual)
        return Fact(kind, shortest / steps, "step", values=values)
    claim = left.claim("waiting_ns", at_most=over[rank, step] / steps)
    return Fact(kind, claim.seconds, rank=rank, values=values)


def _slow_rank(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim the waiting for a late rank that computes longer than the others in every profiled step."""
    late = facts.late
    if late is None or _lacked_a_core(facts):
        return None
    own, others = beside(facts.compute_s, late.rank)
    # one step of several could be chance
    is_always_longer = all(ahead(facts.compute_s, late.rank, step) > 0 for step in facts.steps)
    if own - others < SLOW_RANK * others or not is_always_longer:
        return None
    return _late_rank(kind, facts, left)


def _late_rank(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim the waiting for a rank that comes last beyond chance."""
    late = facts.late
    if late is None or _lacked_a_core(facts):
        return None
    own, others = beside(facts.compute_s, late.rank)
    values = {
        "where": f" in {late.phase}" if late.phase else "",
        "last": late.last,
        "of": late.of,
        "by": _how_late(late),
        "own": seconds(own),
        "others": seconds(others),
    }
    # not all waiting is for this rank: of it no more than its lateness explains
    for_this_rank_ns = late.of_waiting(left.waiting * 1e9)
    claim = left.claim("waiting_ns", at_most=for_this_rank_ns / 1e9)
    return Fact(kind, claim.seconds, rank=late.rank, phase=late.phase, values=values)


def _lacked_a_core(facts: StepFacts) -> bool:
    """Whether the late rank waited for a core for as long as it delays a step: then the delay is the machine's."""
    waited = facts.observed.get("core_wait_s")
    if facts.late is None or not isinstance(waited, dict) or str(facts.late.rank) not in waited:
        return False
    return facts.late.a_step_ns / 1e9 <= waited[str(facts.late.rank)]


def _how_late(late: LateRank) -> str:
    """By how much at the median collective; where it is late to few of them, what that adds to a step."""
    if late.by_ns > 0:
        return f"{seconds(late.by_ns / 1e9)} after the others (median)"
    return f"which delays each step by {seconds(late.a_step_ns / 1e9)}"


def _waiting(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim the waiting that no rank in particular causes."""
    return of_claim(kind, left.claim("waiting_ns"), why=_why_nobody_is_named(facts))


def _why_nobody_is_named(facts: StepFacts) -> str:
    if facts.late is not None and _lacked_a_core(facts):
        rank = facts.late.rank
        waited = seconds(facts.observed["core_wait_s"][str(rank)])
        return f"Rank {rank} comes last, and waited for a core for {waited} of each step: the machine's delay."
    if few := too_few_steps(facts.record):
        return f"At each collective the ranks wait for whoever comes last; whether it is always the same rank, {few}."
    return "No rank is late beyond chance: at each collective the ranks wait for whoever comes last."


def _balanced(facts: StepFacts) -> str:
    """The remedy where nobody is named: another one where a rank lacked a core."""
    if _lacked_a_core(facts):
        return FEWER_RANKS
    return "Balance the lengths of sequences over the ranks, and give each rank cores of its own."


# ---- the rules

_WAIT_FOR_IT = "The others wait for it at their next collective: {seconds} of each step."
_LATE = "comes last to {last} of {of} collectives{where}, {by}"

# whom others wait for
LATE_RANKS = (
    fault_rule(
        "slow_loading",
        _one_loader,
        "Rank {rank} waits {own} a step for its data, the others {others}",
        _WAIT_FOR_IT,
        "Look at rank {rank}'s loader. {loader}",
    ),
    Rule(
        "long_step",
        _long_step,
        "Step {step} was a long one {who}: {own} without communication, usually {usual}",
        "Spread over the {steps} profiled steps that is {seconds} a step. The other steps are as usual.",
        "Look at what else happened in this step: a checkpoint, an evaluation, garbage collection, new shapes"
        " (compilation, cudnn benchmarks). Profile more steps before you judge the rank.",
    ),
    fault_rule(
        "slow_rank",
        _slow_rank,
        "Rank {rank} is slow: it computes for {own} a step, the others for {others}",
        f"It {_LATE}. {_WAIT_FOR_IT}",
        "Look at rank {rank}'s machine (another job, a hot or throttled card, fewer cores) and at its data (longer"
        " sequences than the others').",
    ),
    fault_rule(
        "late_rank",
        _late_rank,
        f"Rank {{rank}} {_LATE}",
        "It computes for {own} a step, the others for {others}, so its device is not slow. " + _WAIT_FOR_IT,
        "Look at what rank {rank} does between its collectives besides computing: its host's other work, loading,"
        " logging, synchronisation, or more of the model's work than the others have.",
        unless=["slow_rank"],
    ),
)

# nobody in particular
WAITING = (
    Rule(
        "skew",
        _waiting,
        "Ranks wait for each other for {seconds} of each step ({share}), most at {at}",
        "{why}",
        _balanced,
        unless=("slow_rank", "late_rank"),
    ),
    Rule(
        "more_waiting",
        _waiting,
        "Ranks wait for each other for another {seconds} of each step, most at {at}",
        "It is more than the rank that is named above accounts for.",
        "Look at the straggler map: at which collectives, and for whom.",
        unless=("skew",),
    ),
)
