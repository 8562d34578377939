"""Judges a learner's solution by what it did, beside what the reference did.

`judge` compares the facts that the exercise observed, in their order, and returns feedback on the first that differs.
The likely cause in that feedback is the first of these that applies:

    1. the function returned nothing
    2. a tensor has another dtype
    3. a collective is missing that the reference calls
    4. the exercise's sentence about the fact, and whether the value is another rank's or a multiple of the right one

A solution with right facts is refused if it changes its arguments, or sends more bytes than the reference. The
learner's source is not read.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .comm_log import bytes_sent, kinds_of, nothing_added_up, to_one_rank_only
from .errors import words_for
from .exercise import Call, Trial
from .exercise_file import Exercise
from .run_submission import Behaviour
from .verdicts import Difference, Feedback, first_difference

Facts = Mapping[str, Any]
VALUE = "the returned value"  # the fact's name where an exercise observes nothing else
OTHERWISE = "compare the two values, and what your function does on this rank with the statement, line by line"
WRONG_DTYPE = "a buffer was made with torch's default dtype: make it like the input (new_empty, empty_like)"
_ADDING = {"reduce_scatter", "all_reduce", "reduce"}
_MORE_BYTES = 1.01  # a solution may send so many times the reference's bytes, since blocks are padded in several ways
_NUMBER_BYTES = 8  # a number in float64
_DOTS = "<ellipsis>"  # as the stub's dots arrive from a rank
_OBJECT_BYTES = 64  # a number as a pickled object


def judge(exercise: Exercise, learner: Behaviour, reference: Behaviour | None) -> Feedback | None:
    """Return feedback on a solution that ran to its end, or None where it is right.

    `reference` may be None where the exercise's file has EXPECTED facts.
    """
    comparison = Comparison(exercise, learner, reference)
    if comparison.wrong_places:
        return _feedback_on_difference(comparison)
    if reference is None:
        return None
    return _feedback_on_changed_arguments(exercise, learner, reference) or _feedback_on_bytes(
        exercise, learner, reference
    )


@dataclass(frozen=True)
class Comparison:
    """Compares the facts of a solution with the right ones, at each place: a case's number and a rank."""

    exercise: Exercise
    learner: Behaviour
    reference: Behaviour | None

    def right_facts(self, case: int, rank: int) -> Facts:
        """Return the facts that are expected at a place."""
        # the file states the right facts, where running the reference would take long
        if self.exercise.expected is not None:
            return self.exercise.expected
        assert self.reference is not None, f"{self.exercise.id}: no reference was run, and its file has no EXPECTED"
        return facts_of(self.reference.trials[case][rank])

    def learner_facts(self, case: int, rank: int) -> Facts:
        """Return the facts that the learner's function led to at a place."""
        return facts_of(self.learner.trials[case][rank])

    def first_difference_at(self, case: int, rank: int) -> tuple[str, Difference] | None:
        """Return the name of the first fact that differs at a place, and its difference."""
        right, learner = self.right_facts(case, rank), self.learner_facts(case, rank)
        for fact in _compared_names(right):
            difference = self.difference_of(fact, right, learner)
            if difference is not None:
                return fact, difference
        return None

    def difference_of(self, fact: str, right: Facts, learner: Facts) -> Difference | None:
        """Return how one fact differs, or None; a fact that the learner's function did not lead to differs too."""
        if fact not in learner:
            names = ", ".join(_compared_names(learner)) or "nothing"
            return Difference(fact, "keys", f"a value named {fact!r}", names)
        return first_difference(right[fact], learner[fact], self.exercise.tolerance, fact)

    @cached_property
    def wrong_places(self) -> list[tuple[int, int]]:
        """Return every place with a difference: those of a case by the fact that differs first, then by rank.

        What is wrong on rank 1 after step 0 may reach rank 0 in step 1, so rank 1 comes first.
        """
        wrong = []
        for case in range(len(self.learner.trials)):
            for rank in range(self.ranks):
                fact_and_difference = self.first_difference_at(case, rank)
                if fact_and_difference is not None:
                    names = _compared_names(self.right_facts(case, rank))
                    wrong.append((case, names.index(fact_and_difference[0]), rank))
        return [(case, rank) for case, _, rank in sorted(wrong)]

    @cached_property
    def first(self) -> tuple[str, Difference]:
        """Return the first fact that differs at the first wrong place, and its difference."""
        fact_and_difference = self.first_difference_at(*self.wrong_places[0])
        assert fact_and_difference is not None, "a wrong place has a difference"
        return fact_and_difference

    @property
    def ranks(self) -> int:
        """Return the number of ranks whose trials are compared."""
        return len(self.learner.trials[0])

    @property
    def trial(self) -> Trial:
        """Return what the learner's function did at the first wrong place."""
        case, rank = self.wrong_places[0]
        return self.learner.trials[case][rank]


def facts_of(trial: Trial) -> Facts:
    """Return what an exercise observed by name; a plain value becomes the only fact."""
    value = trial.returned
    if isinstance(value, dict) and value and all(isinstance(name, str) for name in value):
        return value
    return {VALUE: value}


def _compared_names(facts: Facts) -> list[str]:
    """Return the names of the facts to compare: those with `_` are for the sentences in SAYS alone."""
    return [name for name in facts if not name.startswith("_")]


# ---- the likely cause


def _cause(comparison: Comparison) -> str:
    """Return the likely cause, the first that applies of those that the module's docstring lists."""
    exercise, (case, rank) = comparison.exercise, comparison.wrong_places[0]
    fact, difference = comparison.first
    if comparison.trial.nothing and exercise.returns:
        return _cause_of_nothing(comparison)
    if difference.problem == "dtype":
        return WRONG_DTYPE
    missing = _missing_collective(comparison)
    if missing:
        return missing

    right, learner = comparison.right_facts(case, rank), comparison.learner_facts(case, rank)
    number_expected = isinstance(right[fact], (int, float))
    # the exercise's sentence speaks of a wrong number, so it would not fit a text or None
    is_no_number = learner.get(fact) is None or isinstance(learner.get(fact), str)
    if isinstance(learner.get(fact), str) and learner[fact] == _DOTS:
        return words_for(_DOTS)
    if fact not in learner and VALUE in learner:
        names = ", ".join(_compared_names(right))
        return f"return a dict with the names {names}; what is returned is a value without names"
    if fact not in learner or number_expected and is_no_number:
        return f"{difference.expected} is expected, this is {difference.got}"

    said, relation = exercise.says(fact, learner, right).rstrip("."), _relation(comparison)
    if said and relation:
        return f"{said}. {relation[0].upper()}{relation[1:]}"
    return said or relation or exercise.otherwise or OTHERWISE


def _cause_of_nothing(comparison: Comparison) -> str:
    """Return why a function returns nothing: on some ranks only, or because it prints its result."""
    case, rank = comparison.wrong_places[0]
    returning_ranks = [trial.rank for trial in comparison.learner.trials[case] if not trial.nothing]
    if returning_ranks:
        return (
            f"rank {rank} returns nothing, or None, and rank {returning_ranks[0]} a value: every rank returns a value"
        )
    words = comparison.trial.printed.split()
    printed = f"; it printed {words[0]!r} ..." if words else ""
    return f"the function returns nothing, or None, in this case{printed}: end it with `return ...`"


def _missing_collective(comparison: Comparison) -> str:
    """Return the cause where the reference calls collectives, and the solution calls none that could do the same."""
    if comparison.reference is None or comparison.exercise.settings.facts_only:
        return ""  # the check itself trains, so calls are not the function's alone
    case, rank = comparison.wrong_places[0]
    # such as {"reduce_scatter"}; the calls of this case on this rank, whose facts are wrong
    expected_kinds = set(kinds_of(comparison.reference.trials[case][rank].calls))
    calls = comparison.trial.calls
    if expected_kinds and not kinds_of(calls):
        return "no collective was called, and no message was sent, so nothing came from the other ranks"
    if "all_to_all" in expected_kinds:  # each rank receives something else, so a gather to one rank may be right
        return ""
    cause = to_one_rank_only(calls)
    if not cause and expected_kinds & _ADDING:
        cause = nothing_added_up(calls)
    return cause


def _relation(comparison: Comparison) -> str:
    """Return how the wrong value follows from a right one: it is another rank's, or a multiple."""
    (case, rank), (fact, _) = comparison.wrong_places[0], comparison.first
    right, learner = comparison.right_facts(case, rank), comparison.learner_facts(case, rank)
    for other_rank in range(comparison.ranks):
        other_right = comparison.right_facts(case, other_rank)
        # only a rank whose right value is another one can be meant
        ranks_differ = fact in other_right and comparison.difference_of(fact, right, other_right)
        if ranks_differ and not comparison.difference_of(fact, other_right, learner):
            return f"this is what rank {other_rank} must give"

    factor, ranks = _common_factor(comparison), comparison.ranks
    # 364,296 in place of 364,288 would be "1 times" as much
    if not factor or f"{factor:.4g}" == "1":
        return ""
    # a factor of n or 1/n points at the mean over n ranks: a division that is missing, or made twice
    over_ranks = ranks > 1 and not comparison.exercise.pure
    if over_ranks and factor == ranks:
        return f"this is {ranks} times what is expected, as a sum over the {ranks} ranks is that was not divided"
    if over_ranks and round(factor * ranks, 3) == 1:
        return f"what is expected is {ranks} times this: it was divided by the number of ranks, {ranks}, once too often"
    return f"this is {factor:.4g} times what is expected"


def _common_factor(comparison: Comparison) -> float:
    """Return by what the fact is too large wherever it is wrong; 0 where the factors differ."""
    fact, _ = comparison.first
    factors = set()
    for case, rank in comparison.wrong_places:
        right, learner = comparison.right_facts(case, rank), comparison.learner_facts(case, rank)
        if fact in right and comparison.difference_of(fact, right, learner):
            # one factor at every wrong place is a pattern, different ones are chance
            for one, got in _parts(right[fact], learner.get(fact)):
                if first_difference(one, got, comparison.exercise.tolerance):
                    factors.add(round(_factor(one, got), 4))
    return factors.pop() if len(factors) == 1 else 0.0


def _parts(right: Any, got: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the values of two dicts of the same names in pairs, such as the gradients of a model; else the two."""
    if isinstance(right, dict) and isinstance(got, dict) and right.keys() == got.keys():
        for name in right:
            yield right[name], got[name]
    else:
        yield right, got


def _factor(right: Any, got: Any) -> float:
    """Return by what one value is too large; 0 for what cannot be divided, or has no single factor."""
    with suppress(TypeError, ValueError, ArithmeticError, RuntimeError):
        are_tensors = hasattr(got, "sum") and hasattr(right, "sum")
        if not are_tensors:
            return float(got / right)
        # the factor f that makes f * right nearest to got (least squares), if it makes them equal
        factor = float((got * right).sum() / (right * right).sum())
        if first_difference(right * factor, got, 1e-6) is None:
            return factor
    return 0.0


# ---- feedback


def _feedback_on_difference(comparison: Comparison) -> Feedback:
    """Return feedback on the first fact that differs, with the likely cause."""
    exercise, (case, rank) = comparison.exercise, comparison.wrong_places[0]
    fact, difference = comparison.first
    if comparison.trial.nothing and exercise.returns:
        does = "returns nothing"
    else:
        verb = "returns" if fact == VALUE else "leads to"
        what = f"a wrong {difference.problem}"
        if difference.problem in ("keys", "type"):
            what = "something else than expected"
        does = f"{verb} {what}"
    if exercise.world_size > 1:
        does += f" for rank {rank}" if exercise.pure else f" on rank {rank}"
    is_whole_value = difference.tensor == VALUE and difference.index is None
    return Feedback(
        headline=f"{exercise.function} {does} (case: {comparison.learner.cases[case]}).",
        expected=difference.expected,
        got=difference.got,
        cause=_cause(comparison),
        rank=None if exercise.world_size == 1 else rank,
        tensor=None if is_whole_value else difference.tensor,
        index=difference.index,
    )


def _feedback_on_changed_arguments(exercise: Exercise, learner: Behaviour, reference: Behaviour) -> Feedback | None:
    """Return feedback on a pure function with right facts that changes an argument, where its reference does not."""
    names = list(inspect.signature(getattr(exercise.module(), exercise.function)).parameters)
    for case, trial, reference_trial in _pairs(learner, reference):
        # places of arguments that the reference leaves as they are
        changed = sorted(set(trial.changed) - set(reference_trial.changed))
        if changed:
            name = names[changed[0]]
            return Feedback(
                headline=f"The values are right, but {exercise.function} changes what it was given.",
                expected=f"`{name}` stays as it is",
                got=f"the function changes `{name}` (case: {case})",
                cause=f"others go on using `{name}`: work on a copy, `list({name})` or `sorted({name})`",
                rank=None if exercise.world_size == 1 else 0,
            )
    return None


def _feedback_on_bytes(exercise: Exercise, learner: Behaviour, reference: Behaviour) -> Feedback | None:
    """Return feedback on a solution with right facts whose ranks send more bytes than the reference's."""
    if exercise.settings.facts_only:
        return None
    sent, needed, spare, kinds = 0.0, 0.0, 0.0, set[str]()
    for _, trial, reference_trial in _pairs(learner, reference):
        ranks = len(learner.trials[0])
        sent += sum(bytes_sent(call, ranks) for call in trial.calls)
        needed += sum(bytes_sent(call, ranks) for call in reference_trial.calls)
        spare += _spare_bytes(trial, reference_trial, ranks)
        # what is received was counted where it was sent
        kinds |= set(kinds_of(trial.calls)) - {"recv"}
    if sent <= _MORE_BYTES * needed + spare:
        return None
    return Feedback(
        headline="The values are right, but more is sent than need be.",
        expected=f"{needed:,.0f} bytes over all ranks",
        got=f"{sent:,.0f} bytes: {', '.join(sorted(kinds))}",
        cause="fewer bytes bring the same values: what does every rank need, and what does it have already?",
        rank=None if exercise.world_size == 1 else 0,
    )


def _pairs(learner: Behaviour, reference: Behaviour) -> Iterator[tuple[str, Trial, Trial]]:
    """Yield the case's name, the learner's trial and the reference's, for every case and rank."""
    for case, trials, reference_trials in zip(learner.cases, learner.trials, reference.trials, strict=True):
        for trial, reference_trial in zip(trials, reference_trials, strict=True):
            yield case, trial, reference_trial


def _spare_bytes(trial: Trial, reference_trial: Trial, ranks: int) -> float:
    """Return the bytes that a rank may send in a case beside the reference's.

    Its numbers may have a wider dtype, or be gathered where the reference reduces them; it may exchange one number
    beside the reference's calls, or objects where the reference calls nothing.
    """
    calls, reference_calls = trial.calls, reference_trial.calls
    if not reference_calls:
        return _OBJECT_BYTES * len(calls)

    same_kinds = [call.kind for call in calls] == [call.kind for call in reference_calls]
    small_calls = [call for call in calls if call.nbytes <= _NUMBER_BYTES * ranks]
    # an all_gather of one number of each rank, where the reference reduces one
    gathers_numbers = len(small_calls) == len(calls) == len(reference_calls)
    if same_kinds or gathers_numbers:
        return _NUMBER_BYTES * len(calls)

    if _calls_with_a_number(reference_calls):
        return 0.0
    return sum(bytes_sent(call, ranks) for call in _calls_with_a_number(calls)[:1])


def _calls_with_a_number(calls: tuple[Call, ...]) -> list[Call]:
    """Return the calls that carry one number at most."""
    return [call for call in calls if call.nbytes <= _NUMBER_BYTES]
