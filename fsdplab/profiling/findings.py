"""Why a step was slower than its computing: findings, each a fact with its number, and a remedy.

At most five are on a step's time, and one is on memory.

Each rule is a row: what it claims, and its words (`causes/`, `faults.py`). It claims exposed seconds of a step that no
rule before it has claimed, a cause before its consequences, so the seconds of all findings add up to no more than the
exposed time, and the last rule calls unknown what is left. A late rank claims waiting for a peer, a rule of its own the
copies, and the rest was on the link: first what no schedule could hide, since the link is slower than the work, then
what a schedule, other units or a second communicator would. Idle time and memory are no exposed time, and are claimed
beside it.

Where the ranks lacked a core for a large part of their steps, times say more about the machine than about the run; then
this is the only finding on time.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdplab.common.sizes import percent, seconds
from fsdplab.profiling.causes.idle import OF_THE_STEP
from fsdplab.profiling.causes.link import OF_THE_SCHEDULE, ON_LINK
from fsdplab.profiling.causes.memory import PEAK
from fsdplab.profiling.causes.waiting import LATE_RANKS, WAITING
from fsdplab.profiling.faults import CHOICES, FAULTS
from fsdplab.profiling.rules import FEWER_RANKS, WORTH_SAYING, Fact, Finding, Rule
from fsdplab.profiling.step_facts import StepFacts, Unclaimed, step_facts
from fsdplab.profiling.training_faults import WRONG
from fsdplab.records import PARTS_OF_EXPOSED, RunRecord
from fsdplab.records.summary import core_sentence

MOST = 5
UNTOLD = 0.05  # part of the exposed time that may be left without a cause
_MUCH_LONGER = 0.1  # by how much longer profiled steps must be for that to be said


def findings(record: RunRecord) -> list[Finding]:
    """Return at most five findings on the time of a profiled run, costliest first, then that on its memory.

    ValueError when the run was not profiled.

    A link that is slower than the work comes before what a schedule could hide on it. Of a full_shard run with
    prefetch=0 on a slow link the first says "All-gathers are issued too late: 210 ms of each step are exposed, ...".
    """
    facts = step_facts(record)
    # memory is no time, so its rule claims apart from the others
    peak = _claimed((PEAK,), facts)
    if record.summary.short_of_cores:
        return [*_without_times(facts)[: MOST - 1], *_claimed((_SHORT_OF_CORES,), facts), *peak]
    claimed = _claimed((*LATE_RANKS, *FAULTS, *_RULES), facts)
    exposed_s = sum(finding.seconds for finding in claimed if finding.of == "exposed")
    assert abs(exposed_s - facts.exposed_s) <= 1e-6, (exposed_s, facts.exposed_s)  # all that there is, and no more
    return [*_worth_saying(facts, claimed), *peak]


def profiling_cost(record: RunRecord) -> str:
    """What must be said beside figures of profiled steps that were more than a tenth longer than timed ones; "" where
    they were not.
    """
    profile = record.summary.profile
    if profile is None or profile.overhead is None or profile.overhead <= _MUCH_LONGER:
        return ""
    return (
        f"Profiled steps took {percent(profile.overhead)} longer than timed ones. Exposed time in tables and figures"
        " is that of profiled steps; findings claim what the timed steps allow."
    )


def _claimed(rules: Sequence[Rule], facts: StepFacts) -> list[Finding]:
    """Let each rule claim what the rules before it have left."""
    left = Unclaimed(facts.cells)
    claimed: list[Finding] = []
    for rule in rules:
        # a cause that is found already explains this one
        if any(finding.kind in rule.unless for finding in claimed):
            continue
        fact = rule.claims(rule.kind, facts, left)
        if fact is not None:
            claimed.append(rule.in_words(fact, facts))
    return claimed


def _without_times(facts: StepFacts) -> list[Finding]:
    """The faults that hold on a machine with too few cores: what is counted, and ranks that are late by more than they
    waited for a core.
    """
    late = []
    for finding in _claimed(LATE_RANKS, facts):
        if finding.is_fault and _outlasts_waits(finding, facts):
            late.append(finding)
    return _faults_in_order([*late, *_claimed(FAULTS, facts)])


def _outlasts_waits(finding: Finding, facts: StepFacts) -> bool:
    """Whether a rank delays a step for longer than it waited for a core: then the delay is not the machine's."""
    # seconds a step that each rank waited for a core, by its number as text
    waits = facts.observed.get("core_wait_s")
    waited = waits.get(str(finding.rank)) if isinstance(waits, dict) else None
    if waited is None:
        return False
    if facts.late is not None and facts.late.rank == finding.rank:
        return facts.late.a_step_ns / 1e9 > waited
    return finding.seconds > waited


# ---- which findings are shown, and in which order


def _worth_saying(facts: StepFacts, claimed: Sequence[Finding]) -> list[Finding]:
    """The findings that are worth saying, in order; what is left out is said together where it is a twentieth of what
    is exposed.
    """
    counted = {rule.kind for rule in FAULTS}  # what is counted is told whatever it costs
    faults, hints, parts = [], [], []
    for finding in claimed:
        if finding.kind not in counted and finding.seconds < WORTH_SAYING * facts.step_s:
            continue
        if finding.is_fault:
            faults.append(finding)
        elif finding.kind in counted:
            hints.append(finding)
        else:
            parts.append(finding)
    # the last place is for what is left out, where that must be said
    shown = [*_faults_in_order(faults), *hints, *_parts_in_order(parts)][: MOST - 1]

    others = []
    for finding in claimed:
        if finding.of == "exposed" and finding.seconds > 0 and finding not in shown:
            others.append(finding)
    # what is not shown is summed up, unless it is too little to be missed
    rest = sum(finding.seconds for finding in others)
    if rest <= UNTOLD * facts.exposed_s or rest < WORTH_SAYING * facts.step_s:
        return shown
    if len(others) == 1:
        return [*shown, *others]
    listed = ", ".join(f"{finding.kind.replace('_', ' ')} {seconds(finding.seconds)}" for finding in others)
    return [*shown, _SMALLER.in_words(Fact(_SMALLER.kind, rest, values={"listed": listed}), facts)]


def _faults_in_order(faults: Sequence[Finding]) -> list[Finding]:
    """What trains the wrong thing first, then costliest first; last what is a choice between time and memory, which its
    owner may have made.
    """

    def place(finding: Finding) -> tuple[bool, bool, bool, float]:
        return not finding.is_fault, finding.kind not in WRONG, finding.kind in CHOICES, -finding.seconds

    return sorted(faults, key=place)


def _parts_in_order(parts: Sequence[Finding]) -> list[Finding]:
    """Costliest first, but a slow link before what a schedule could hide on it: with work enough, less would show."""
    by_cost = sorted(parts, key=lambda finding: -finding.seconds)
    others = [finding for finding in by_cost if finding.kind != "slow_link"]
    slow_link = [finding for finding in by_cost if finding.kind == "slow_link"]
    if not slow_link:
        return others
    # behind the costlier findings, but before the first that a schedule could mend
    place = 0
    for finding in others:
        if finding.kind in OF_THE_SCHEDULE or finding.seconds < slow_link[0].seconds:
            break
        place += 1
    return [*others[:place], *slow_link, *others[place:]]


# ---- the rules in their order, a cause before its consequences; what each claims stands beside its words in `causes/`


def _no_core(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim waiting for a core."""
    cost = left.claim("no_core_ns").seconds
    return Fact(kind, cost) if cost else None


def _unknown(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim everything that no rule has claimed."""
    cost = sum(left.claim(part).seconds for part in PARTS_OF_EXPOSED)
    return Fact(kind, cost) if cost > 0 else None


_RULES = (
    *WAITING,
    *ON_LINK,
    Rule(
        "no_core",
        _no_core,
        "Ranks wait for a core for {seconds} of each step ({share}) inside their collectives",
        "Something else used the cores meanwhile: another process, or the transport's own threads.",
        FEWER_RANKS,
    ),
    Rule(
        "unknown",
        _unknown,
        "The cause of {seconds} of exposed time in each step ({share}) is unknown",
        "The trace does not show who issued these collectives, or what they waited for.",
        "Look at the timeline, or in Perfetto, for what runs beside them.",
    ),
    *OF_THE_STEP,
)


def _short_of_cores(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report how many cores the ranks had."""
    sentence = core_sentence(facts.record.summary.cpu_share or 0.0).removesuffix(".")
    return Fact(kind, 0.0, "machine", values={"sentence": sentence})


def _nothing(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim nothing: `_worth_saying` makes this fact of what it leaves out."""
    return None


_SHORT_OF_CORES = Rule(
    "short_of_cores",
    _short_of_cores,
    "{sentence}",
    "Findings that depend on times are left out.",
    "End what else runs on this machine, or run fewer ranks, and run it again.",
)
_SMALLER = Rule(
    "smaller_causes",
    _nothing,
    "Smaller causes take {seconds} of each step together ({share})",
    "They are: {listed}.",
    "Begin with the causes above: these change with them.",
)
