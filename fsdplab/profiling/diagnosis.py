"""The first sentence on a profiled run: what is wrong with it, and which part of its step that costs."""

from __future__ import annotations

from collections.abc import Sequence

from fsdplab.common.sizes import percent, seconds
from fsdplab.profiling.findings import Finding, findings
from fsdplab.profiling.step_facts import StepFacts, step_facts
from fsdplab.records import RunRecord

_MUCH = 0.1  # part of a step from which on what could be shorter is the answer
_WORTH_LISTING = 0.01  # part of a step


def diagnosis(record: RunRecord) -> str:
    """One sentence, or two where nothing is wrong; "" for a run that was not profiled.

    The first fault; else the costliest part of the step that could be shorter, after what the step consists of:
    `No fault is found in a step of 88.1 ms: computing takes 61 % of it, exposed communication 30 %. ...`
    """
    if not record.table("breakdown"):
        return ""
    facts, found = step_facts(record), findings(record)
    named = named_finding(facts, found)
    if named is not None and (named.is_fault or not record.spec.get("job")):
        return f"{_with_share(named, facts)}."
    if record.summary.short_of_cores:
        return ""  # which is said anyway, and nothing else can be
    most = f" Most could be shorter here: {named.title}." if named is not None else ""
    return f"No fault is found in a step of {seconds(facts.step_s)}: {_breakdown(facts)}.{most}"


def named_finding(facts: StepFacts, listed: Sequence[Finding]) -> Finding | None:
    """What the diagnosis names: the first fault, else the first finding that costs a tenth of the step; None for none,
    and where ranks lacked cores.
    """
    fault = next((finding for finding in listed if finding.is_fault), None)
    if fault is not None or facts.record.summary.short_of_cores:
        return fault
    return next((finding for finding in listed if finding.seconds >= _MUCH * facts.step_s), None)


def _with_share(finding: Finding, facts: StepFacts) -> str:
    """The finding's title, with the part of the step that it costs where the title does not say it."""
    if not finding.seconds or "%" in finding.title:
        return finding.title
    cost, step = seconds(finding.seconds), seconds(facts.step_s)
    return f"{finding.title} ({cost} of a step of {step}, {percent(finding.seconds / facts.step_s)})"


def _breakdown(facts: StepFacts) -> str:
    """What the step consists of, the parts that are a hundredth of it."""
    worst = facts.worst
    parts = [
        ("computing takes", worst.compute_ns),
        ("exposed communication", worst.exposed_ns),
        ("neither", worst.other_ns),
    ]
    listed = []
    for name, part_ns in parts:
        if part_ns >= _WORTH_LISTING * worst.step_ns:
            listed.append(f"{name} {percent(part_ns / worst.step_ns)}")
    # only the first part says of what it is a part
    first, *others = listed or ["computing takes all"]
    return ", ".join([f"{first} of it", *others])
