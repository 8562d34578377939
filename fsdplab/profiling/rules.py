"""A rule of the findings as a row: what it claims of a profiled step, and the words for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdplab.common.sizes import percent, seconds
from fsdplab.profiling.step_facts import Claim, StepFacts, Unclaimed
from fsdplab.profiling.step_summary import ExposedCell

WORTH_SAYING = 0.02  # part of a step below which a cause is not mentioned
FEWER_RANKS = "Run fewer ranks than cores, and nothing beside them."


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
        """Put a fact into the rule's words."""
        # the fact's own values win over the words that every finding has
        words: dict[str, Any] = {
            **facts.words,
            "seconds": seconds(fact.seconds),
            "rank": fact.rank,
            "share": percent(fact.seconds / facts.step_s),
            "step_s": seconds(facts.step_s),
            **fact.values,
        }
        title = self.title.format(**words).strip()
        text = self.text.format(**words).strip()
        # a remedy that depends on the run is made by a function, and has no braces
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
    """Make a rule whose finding is a fault of the job."""
    return Rule(kind, claims, title, text, remedy, tuple(unless), is_fault=True)


# ---- words that several rules share


def of_claim(kind: str, claim: Claim, **values: Any) -> Fact | None:
    """Make the fact of what was claimed of some collectives, and name the one of which it is most; None for no claim.

    Its values are `where` ("all_gather of a in forward alone 3.00 ms", or "most at ...") and `at`, the name alone.
    """
    cell = claim.cell
    if cell is None:
        return None
    whole = cell.exposed_ns / 1e9
    name = _collective(cell)
    # "alone" with the cell's own exposed time, where this claim took all of it
    is_all_of_it = claim.of_cell > 0.99 * whole
    where = f"{name} alone {seconds(whole)}" if is_all_of_it else f"most at {name}"
    return Fact(kind, claim.seconds, unit=cell.unit, phase=cell.phase, values={"where": where, "at": name, **values})


def _collective(cell: ExposedCell) -> str:
    """The collective's name; without its unit where it has none."""
    of_unit = f" of {named_unit(cell.unit)}" if cell.unit else ""
    return f"{cell.kind}{of_unit} in {cell.phase or 'the step'}"


def named_unit(unit: str) -> str:
    """A unit's name in a sentence."""
    return "the root" if unit == "root" else unit
