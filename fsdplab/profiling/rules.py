"""A rule of the findings as a row: what it claims of a profiled step, and the words for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdplab.common.sizes import percent, seconds
from fsdplab.profiling.step_facts import StepFacts, Unclaimed


@dataclass(frozen=True)
class Fact:
    """One cause: `seconds` of a step that it costs, as a part of the step's `exposed` time, the rest of the `step`, or
    (0 seconds) of `memory` or the `machine`; the rank, unit and phase that it names, and what its words say.
    """

    kind: str
    seconds: float
    of: str = "exposed"
    rank: int | None = None
    unit: str = ""
    phase: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding(Fact):
    """A fact as sentences: what was seen, what it means, what to do. `is_fault`: something is wrong with the job that
    its owner can mend, and not only a part of the step that could be shorter.
    """

    title: str = ""
    text: str = ""
    remedy: str = ""
    is_fault: bool = False


@dataclass(frozen=True)
class Rule:
    """One row: what is claimed, and the words for it, whose names in braces are the fact's own; a remedy may depend on
    the run. It is not tried where a finding of a kind in `unless` stands already. `is_fault`: as of its finding.
    """

    kind: str
    claims: Callable[[str, StepFacts, Unclaimed], Fact | None]
    title: str
    text: str
    remedy: str | Callable[[StepFacts], str]
    unless: tuple[str, ...] = ()
    is_fault: bool = False

    def in_words(self, fact: Fact, facts: StepFacts) -> Finding:
        """The rule's words for a fact."""
        words: dict[str, Any] = {**facts.words, "seconds": seconds(fact.seconds), "rank": fact.rank}
        words |= {"share": percent(fact.seconds / facts.step_s), "step_s": seconds(facts.step_s), **fact.values}
        title, text = self.title.format(**words).strip(), self.text.format(**words).strip()
        remedy = self.remedy(facts) if callable(self.remedy) else self.remedy.format(**words)
        return Finding(**vars(fact), title=title, text=text, remedy=remedy, is_fault=self.is_fault)


def fault_rule(
    kind: str,
    claims: Callable[[str, StepFacts, Unclaimed], Fact | None],
    title: str,
    text: str,
    remedy: str | Callable[[StepFacts], str],
    unless: Sequence[str] = (),
) -> Rule:
    """A rule whose finding is a fault of the job."""
    return Rule(kind, claims, title, text, remedy, tuple(unless), is_fault=True)
