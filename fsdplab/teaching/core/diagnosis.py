"""One diagnosis for all exercises: what a solution did beside what the reference did, and the likely cause.

`judge` returns the feedback on a solution, or None for a right one. The first fact that differs decides, and the cause
is the first of these that holds: the function returned nothing; it has a loop that ends in its first round; it changes
what it was given; its source has a slip that in_source.py knows; another dtype; a known mistake does the same there (of
several, the one that does the same at most places); a text stands for a number; a collective does not add up; no
collective was called, or none that adds up; all wrong numbers have another unit, or digits cut off; what the exercise
says of this fact, and which arguments are never read; another rank's value, a constant factor (of all parts, or of
some), or a constant difference. Right values of a function that changes what it was given, or that cost more bytes, are
told last.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

from .comm_log import bytes_sent, kinds_of, nothing_added_up, to_one_rank_only
from .exercise import Call, Trial
from .exercise_file import Exercise
from .in_source import (
    ONE_ROUND,
    kept_from_the_result,
    minus_a_fraction,
    never_read,
    one_round,
    other_division,
    other_operation,
    other_order,
    other_text,
    overwritten,
    returns_a_value,
    slip,
)
from .on_ranks import portable
from .raised import DOTS
from .run_submission import Behaviour
from .verdicts import Difference, Feedback, first_difference

VALUE = "the returned value"
OTHERWISE = "compare the two values, and what your function does on this rank with the statement, line by line"
_IN_PLACE = (
    "`sort`, `pop`, `remove`, `del` and `x[...] = ...` change the object itself, which others go on using: take"
    " `sorted(x)` or a copy, `list(x)`"
)
_WHOLE = "these are whole numbers, and what is expected has fractions: no `//`, no `int` and no `round`"
_ALIKE = 0.5  # of the places where one of two solutions is wrong: as many are wrong in the same way
_SLACK = 1.01  # of bytes: for padding
_FEW = 8  # bytes more a call, for one number in float64: where the calls are of the same kinds, or carry numbers alone
_TINY = 64  # bytes a call, a number as an object, where the reference sends nothing at all
_ADDING = {"reduce_scatter", "all_reduce", "reduce"}


@dataclass(frozen=True)
class Known:
    """A known mistake, as it behaves."""

    behaviour: Behaviour
    cause: str


_Facts = Mapping[str, Any]
_Right = Sequence[Sequence[_Facts]]  # [case][rank]


@dataclass(frozen=True)
class _Wrong:
    """A wrong solution: what it did, the right facts, and the first place where it differs: the case and rank by
    number, the fact, and how.
    """

    exercise: Exercise
    learner: Behaviour
    right: _Right
    case: int
    rank: int
    fact: str
    difference: Difference

    @property
    def trial(self) -> Trial:
        """What it did at the place."""
        return self.learner.trials[self.case][self.rank]

    @property
    def facts(self) -> _Facts:
        """Its facts at the place."""
        return _facts(self.trial.returned)

    @property
    def expected(self) -> _Facts:
        """The right facts at the place."""
        return self.right[self.case][self.rank]

    @property
    def got(self) -> Any:
        """Its value of the fact that differs; None where it has none."""
        return self.facts.get(self.fact)

    def parts(self, case: int, rank: int, behaviour: Behaviour | None = None) -> dict[str, tuple[Any, Any]]:
        """(right, got) of the parts of the fact that differ in a case on a rank, by their names; of this solution, or
        of another behaviour.
        """
        ours = _parts(_facts((behaviour or self.learner).trials[case][rank].returned).get(self.fact))
        pairs = {name: (value, ours.get(name)) for name, value in _parts(self.right[case][rank].get(self.fact)).items()}
        return {name: pair for name, pair in pairs.items() if first_difference(*pair, self.exercise.tolerance)}

    def pairs(self) -> list[tuple[Any, Any]]:
        """(right, got) of the fact, wherever it is wrong."""
        return [
            pair
            for case, ranks in enumerate(self.right)
            for rank, expected in enumerate(ranks)
            if self.fact in expected
            for pair in self.parts(case, rank).values()
        ]


def judge(
    exercise: Exercise, learner: Behaviour, reference: Behaviour | None, mistakes: Callable[[], Sequence[Known]]
) -> Feedback | None:
    """The feedback on a solution that returned, or None where it is right; `mistakes` are asked for if it is wrong.

    `reference` may be None where the exercise says what is EXPECTED.
    """
    if wrong := _first_wrong(exercise, learner, _expected(exercise, learner, reference)):
        return _feedback(wrong, _cause(wrong, reference, mistakes) + _how_many(wrong))
    if changed := _changed(exercise, learner, reference):
        headline = f"The values are right, but {exercise.function} changes what it was given."
        return Feedback(headline, *changed, _IN_PLACE, None if exercise.world_size == 1 else 0)
    return None if exercise.settings.facts_only else _feedback_on_bytes(exercise, learner, reference, mistakes)


def _expected(exercise: Exercise, learner: Behaviour, reference: Behaviour | None) -> _Right:
    """The right facts at every place."""
    if exercise.expected is not None:
        return [[exercise.expected] * len(ranks) for ranks in learner.trials]
    assert reference is not None, f"{exercise.id}: the reference was not run, and no EXPECTED stands in its file"
    return [[_facts(trial.returned) for trial in ranks] for ranks in reference.trials]


def _facts(value: Any) -> _Facts:
    """The facts that an exercise observed, without those for its own sentences; or the value as the only fact."""
    return (
        value if isinstance(value, dict) and value and all(isinstance(name, str) for name in value) else {VALUE: value}
    )


def _compared(facts: _Facts) -> Iterator[str]:
    return (name for name in facts if not name.startswith("_"))


def _differs(right: _Facts, got: _Facts, fact: str, tolerance: float) -> Difference | None:
    return first_difference(right.get(fact), got.get(fact), tolerance, fact)


def _first_wrong(exercise: Exercise, learner: Behaviour, right: _Right) -> _Wrong | None:
    """The first place where a solution, or a known mistake, differs; None where it differs nowhere."""
    for case, ranks in enumerate(right):
        for rank, expected in enumerate(ranks):
            got = _facts(learner.trials[case][rank].returned)
            for fact in _compared(expected):
                found = _differs(expected, got, fact, exercise.tolerance)
                if fact not in got:
                    returned = learner.trials[case][rank].returned
                    shown = {name: got[name] for name in _compared(got)} if isinstance(returned, dict) else returned
                    named = {name: expected[name] for name in _compared(expected)}
                    whole = first_difference(named, shown, exercise.tolerance, VALUE)
                    found = whole or Difference(fact, "keys", fact, "nothing of this name")
                if found:
                    return _Wrong(exercise, learner, right, case, rank, fact, found)
    return None


def _cause(wrong: _Wrong, reference: Behaviour | None, mistakes: Callable[[], Sequence[Known]]) -> str:
    exercise, learner, trial = wrong.exercise, wrong.learner, wrong.trial
    if trial.nothing and exercise.returns:
        others = [rank for rank, each in enumerate(learner.trials[wrong.case]) if not each.nothing]
        if others:
            some = f"rank {wrong.rank} returns nothing, or None, and rank {others[0]} a value: every rank returns one"
            return slip(learner.source, exercise.reference, not exercise.pure) or some
        if returns_a_value(learner.source) and not all(each.nothing for ranks in learner.trials for each in ranks):
            return f"in this case it returns nothing, or None: {wrong.difference.expected} is expected"
        printed = f"; it printed {trial.printed.split()[0]!r} ..." if trial.printed.split() else ""
        return f"the function returns nothing{printed}: end it with `return ...`"
    if order := other_order(learner.source, exercise.reference, exercise.function):
        return f"the arguments come in the order of the stub: `{order}`"
    if loop := one_round(learner.source):
        return ONE_ROUND.format(loop)
    if said := other_text(learner.source, exercise.text):
        return said
    if line := overwritten(learner.source):
        last = f"every round of the loop sets `{line}` anew, so only the last one counts: `+=` adds to what is there"
        return "; ".join(filter(None, (last, exercise.says(wrong.fact, wrong.facts, wrong.expected))))
    if changed := _changed(exercise, learner, reference):
        return f"{changed[1]}: {_IN_PLACE}"
    if written := slip(learner.source, exercise.reference, not exercise.pure):
        return written
    if exercise.returns and (kept := kept_from_the_result(learner.source)):
        return f"the collective's result stands in `{kept}`, which nothing reads afterwards: return what is made of it"
    if part := minus_a_fraction(learner.source, exercise.reference):
        return f"`{part}` divides before it subtracts: parentheses around the difference, as in `(n - 1) / n`"
    if wrong.difference.problem == "dtype":
        return "a buffer was made with torch's default dtype: make it like the input (new_empty, empty_like)"
    sender = None if exercise.settings.facts_only else reference  # what trains sends more than the function itself
    return (
        _alike(wrong, mistakes())
        or _of_a_text(wrong.facts.get(wrong.fact, 0), wrong.expected.get(wrong.fact))
        or other_operation(learner.source, exercise.reference)
        or _other_names(wrong)
        or _calls_missing(trial.calls, sender.trials[wrong.case][wrong.rank].calls if sender else ())
        or _of_all_numbers(wrong)
        or _divided(wrong)
        or _unread(wrong, _said(wrong))
        or _relation(wrong)
    )


def _other_names(wrong: _Wrong) -> str:
    """The name that lacks in a dict that was returned, and those that are not expected."""
    got = wrong.trial.returned
    if not isinstance(got, dict) or wrong.fact in got or hasattr(wrong.exercise.module(), "observe"):
        return ""
    other = [f"`{name}`" for name in got if name not in wrong.expected]
    instead = f", and {', '.join(other)} stands there" if other else ""
    return f"the names of the dict are the statement's, letter by letter: `{wrong.fact}` is not there{instead}"


def _alike(wrong: _Wrong, mistakes: Sequence[Known]) -> str:
    """The cause of the known mistake that does the same here, in this fact's wrong parts and the facts before it, and
    of a pure function at half of the wrong places; of several, at most places, then in most facts.
    """
    exercise, right = wrong.exercise, wrong.right
    here = wrong.case, wrong.rank
    places = [(case, rank) for case, ranks in enumerate(right) for rank in range(len(ranks))]
    facts = list(_compared(wrong.expected))

    def both_or_none_return(known: Known, case: int, rank: int) -> bool:
        theirs, ours = (of.trials[case][rank] for of in (known.behaviour, wrong.learner))
        return theirs.nothing == ours.nothing or not exercise.returns

    def same(known: Known, case: int, rank: int, fact: str) -> bool:
        theirs, ours = (_facts(of.trials[case][rank].returned) for of in (known.behaviour, wrong.learner))
        return both_or_none_return(known, case, rank) and _differs(theirs, ours, fact, exercise.tolerance) is None

    def alike_at(known: Known, case: int, rank: int) -> bool:
        parts, theirs = (
            wrong.parts(case, rank),
            _parts(_facts(known.behaviour.trials[case][rank].returned).get(wrong.fact)),
        )
        unlike = (first_difference(theirs.get(name), got, exercise.tolerance) for name, (_, got) in parts.items())
        return bool(parts) and both_or_none_return(known, case, rank) and not any(unlike)

    def elsewhere_too(known: Known) -> bool:
        either = [at for at in places if wrong.parts(*at) or wrong.parts(*at, known.behaviour)]
        return sum(alike_at(known, *at) for at in either) >= _ALIKE * len(either)

    def score(known: Known) -> tuple[int, int]:
        at_places = sum(same(known, *at, wrong.fact) for at in places)
        return at_places, sum(same(known, *at, fact) for at in places for fact in facts)

    alike = [
        known
        for known in mistakes
        if alike_at(known, *here)
        and all(same(known, *here, fact) for fact in facts[: facts.index(wrong.fact)])
        and (not exercise.pure or elsewhere_too(known))
    ]
    return max(alike, key=score).cause if alike else ""


def _changed(exercise: Exercise, learner: Behaviour, reference: Behaviour | None) -> tuple[str, str] | None:
    """What was expected of an argument that a pure function changes and its reference does not, and what was got."""
    if reference is None:
        return None
    names = list(inspect.signature(getattr(exercise.module(), exercise.function)).parameters)
    for case, ours, theirs in zip(learner.cases, learner.trials, reference.trials):
        for mine, other in zip(ours, theirs):
            for place in sorted(set(mine.changed) - set(other.changed)):
                return f"`{names[place]}` stays as it is", f"the function changes `{names[place]}` (case: {case})"
    return None


def _calls_missing(calls: Sequence[Call], right: Sequence[Call]) -> str:
    """The cause where the reference calls collectives, and this solution none, or none that does what is needed."""
    wanted = set(kinds_of(right))
    if not wanted:
        return ""
    if not kinds_of(calls):
        missing = "no message was sent" if wanted <= {"send", "recv"} else "no collective was called"
        return f"{missing}, so nothing came from the other ranks"
    if "all_to_all" in wanted:  # each rank gets something of its own, so a gather to it may be right
        return ""
    return to_one_rank_only(calls) or (nothing_added_up(calls) if wanted & _ADDING else "")


def _of_all_numbers(wrong: _Wrong) -> str:
    """What holds of all wrong numbers of this fact, or of all facts: digits cut off, or (of three different ones)
    another unit.
    """
    others = [replace(wrong, fact=fact).pairs() for fact in wrong.expected if fact != wrong.fact]
    pairs, tolerance = wrong.pairs(), wrong.exercise.tolerance
    return _cut_off(pairs, tolerance) or _cut_off([*pairs, *(pair for each in others for pair in each)], tolerance)


def _cut_off(pairs: Sequence[tuple[Any, Any]], tolerance: float) -> str:
    if pairs and all(map(_is_cut_off, pairs)):
        return _WHOLE
    if not pairs or not all(map(_is_number, (each for pair in pairs for each in pair))):
        return ""
    with contextlib.suppress(OverflowError, ValueError):  # of infinity and NaN
        if any(all(got == round(float(expected), digits) for expected, got in pairs) for digits in (1, 2, 3)):
            return "the numbers are rounded: give them as they are"
        if len(pairs) > 1 and all(got in (math.floor(expected), math.ceil(expected)) for expected, got in pairs):
            return _WHOLE
    if len({expected for expected, _ in pairs}) < 3 or not (factor := _constant_factor(pairs, tolerance)):
        return ""
    times = max(factor, 1 / factor)
    if not any(abs(times / unit - 1) < 1e-6 for unit in (100, 1e3, 1e6, 1e9, 2**10, 2**20, 2**30)):
        return ""
    return (
        f"all of it is {times:,.0f} times too {'large' if factor > 1 else 'small'}: another unit or prefix than is"
        " asked for (s or ms, GB or MB, percent or a part)"
    )


def _of_a_text(got: Any, right: Any) -> str:
    """What a text or a value shows that is left of the stub, of an f-string without its f, or no number."""
    if got == portable(...) or isinstance(got, str) and str(...) in got:
        return DOTS
    if got == "<generator>":
        return (
            "`yield` makes a generator of the function, which gives back nothing yet: `return` ends it with its value"
        )
    if isinstance(got, str) and "<function " in got:
        return "a function stands in this text and is not called: `name()` calls it"
    if isinstance(got, str) and "{" in got and "{" not in str(right):
        return 'what stands in braces is replaced in an f-string only: an `f` before the quotes, `f"..."`'
    return f"a number is expected, this is {got!r}" if _is_number(right) and isinstance(got, (str, NoneType)) else ""


def _is_cut_off(pair: tuple[Any, Any]) -> bool:
    """Whether a tensor holds the whole numbers below what is expected, and several of them."""
    right, got = pair
    if not (hasattr(right, "floor") and hasattr(got, "unique")) or right.shape != got.shape:
        return False
    return bool(right.is_floating_point()) and bool((got == right.floor()).all()) and len(got.unique()) > 1


def _divided(wrong: _Wrong) -> str:
    """The cause where the wrong one of `/` and `//` made a fraction of a whole number, or the other way round."""
    expected, got = (text.lstrip("-") for text in (wrong.difference.expected, wrong.difference.got))
    written = not wrong.exercise.settings.facts_only  # what a training shows is no quotient that stands in the source
    operator = other_division(wrong.learner.source, wrong.exercise.reference) if written else ""
    if operator == "/" and expected.isdigit() and not got.isdigit():
        return f"`/` makes a fraction, here {got}, where a whole number is expected: `//` divides whole numbers"
    if operator == "//" and got.isdigit() and not expected.isdigit():
        return "`//` drops all that is behind the point, and gives 0 where the divisor is larger: `/` keeps it"
    return ""


def _unread(wrong: _Wrong, said: str) -> str:
    """What the exercise says, after the arguments that the function ignores and its reference needs."""
    exercise, problem = wrong.exercise, wrong.difference.problem
    names = never_read(wrong.learner.source, exercise.reference, exercise.function)
    all_of_them = len(names) == len(
        inspect.signature(getattr(exercise.written_as.module(), exercise.function)).parameters
    )
    if not names or problem in ("type", "keys") or (exercise.settings.facts_only and not all_of_them):
        return said
    unread = f"your function never reads {' and '.join(f'`{name}`' for name in names)}"
    return f"{unread}; {said}" if said else f"{unread}, on which the result depends"


def _said(wrong: _Wrong) -> str:
    """What the exercise says of this fact, with the factor by which all of several wrong numbers are too large."""
    said, pairs = wrong.exercise.says(wrong.fact, wrong.facts, wrong.expected), wrong.pairs()
    several = len({expected for expected, _ in pairs if _is_number(expected)}) > 2
    factor = _constant_factor(pairs, wrong.exercise.tolerance) if said and several else 0.0
    return f"{said.rstrip('.')}. Everywhere this is {factor:.4g} times what is expected" if factor else said


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _relation(wrong: _Wrong) -> str:
    """What any wrong value may be to the right one: of another type, another rank's, a multiple; else what to do."""
    exercise, ranks, tolerance = wrong.exercise, wrong.right[wrong.case], wrong.exercise.tolerance
    if wrong.difference.problem in ("type", "keys", "length"):
        return f"{wrong.difference.expected} is expected, this is {wrong.difference.got}"
    if _is_number(wrong.expected.get(wrong.fact)) and not (_is_number(wrong.got) or hasattr(wrong.got, "sum")):
        return f"a number is expected, this is {wrong.got!r}"
    own = {wrong.fact: wrong.got}
    for rank, theirs in enumerate(ranks):
        unlike = _differs(wrong.expected, theirs, wrong.fact, tolerance)
        if unlike and _differs(theirs, own, wrong.fact, tolerance) is None:
            return f"this is what rank {rank} must give"
    pairs = wrong.pairs()
    if factor := _constant_factor(pairs, tolerance):
        return _factor_in_words(factor, 1 if exercise.pure else len(ranks))
    here = list(wrong.parts(wrong.case, wrong.rank).values())
    alike = [pair for pair in here if abs(_factor(*pair) - _factor(*here[0])) < 1e-4 * abs(_factor(*here[0]))]
    if 1 < len(alike) < len(here) and (factor := _constant_factor(alike, tolerance)):
        return f"{_factor_in_words(factor, len(ranks))}; this holds for {len(alike)} of those that differ, not for all"
    if len(pairs) > 2 and all(map(_is_number, (each for pair in pairs for each in pair))):
        more, *others = {round(got - expected, 9) for expected, got in pairs}
        if not others:
            return f"this is {abs(more):.4g} too {'much' if more > 0 else 'little'}, in every case"
    return exercise.otherwise or OTHERWISE


def _parts(value: Any) -> Mapping[str, Any]:
    """The parts of a fact that is a dict; else the value as the only part."""
    return value if isinstance(value, dict) else {"": value}


def _constant_factor(pairs: Sequence[tuple[Any, Any]], tolerance: float) -> float:
    """By what all wrong values are too large; 0 where the factor is not one."""
    factor, tolerance = _factor(*pairs[0]), max(tolerance, 1e-6)
    constant = factor and len(pairs) > 1 and not any(first_difference(v * factor, got, tolerance) for v, got in pairs)
    return factor if constant else 0.0


def _factor(right: Any, got: Any) -> float:
    """By what a value is too large; 0 for what cannot be divided."""
    with contextlib.suppress(TypeError, ValueError, ZeroDivisionError, RuntimeError):
        return float((got * right).sum() / (right * right).sum()) if hasattr(got, "sum") else float(got / right)
    return 0.0


def _factor_in_words(factor: float, ranks: int) -> str:
    if ranks > 1 and abs(factor - ranks) < 1e-4 * ranks:
        return f"this is {ranks} times what is expected, as a sum over the {ranks} ranks is that was not divided"
    if ranks > 1 and abs(factor - ranks**2) < 1e-4 * ranks:
        return (
            f"this is {factor:.4g} times what is expected, {ranks} times {ranks}: multiplied where it is to be divided"
        )
    if ranks > 1 and abs(factor * ranks - 1) < 1e-4:
        return f"what is expected is {ranks} times this: it was divided by the number of ranks, {ranks}, once too often"
    divisor = f"{ranks / factor:.4g}"
    divided = f", as a sum over the {ranks} ranks is that was divided by {divisor}" if divisor.isdigit() else ""
    return f"this is {factor:.4g} times what is expected{divided if ranks > 1 else ''}"


def _how_many(wrong: _Wrong) -> str:
    """How many parts of a fact differ, where it has several: ` (22 of 35 differ, all of them 1-D)`."""
    expected = _parts(wrong.expected.get(wrong.fact))
    if len(expected) == 1 or not isinstance(wrong.got, dict):
        return ""
    parts = wrong.parts(wrong.case, wrong.rank)
    dimensions = {value.dim() for value, _ in parts.values() if hasattr(value, "dim")}
    alike = f", all of them {dimensions.pop()}-D" if len(dimensions) == 1 else ""
    return f" ({len(parts)} of {len(expected)} differ{alike})"


def _feedback(wrong: _Wrong, cause: str) -> Feedback:
    exercise, difference, case = wrong.exercise, wrong.difference, wrong.learner.cases[wrong.case]
    if wrong.trial.nothing and exercise.returns:
        headline = f"{exercise.function} returns nothing (case: {case})."
    else:
        verb = "returns" if wrong.fact == VALUE else "leads to"
        what = {"keys": "a dict with other keys", "type": "something of another type"}.get(
            difference.problem, f"a wrong {difference.problem}"
        )
        where = "" if exercise.world_size == 1 else f" {'for' if exercise.pure else 'on'} rank {wrong.rank}"
        headline = f"{exercise.function} {verb} {what}{where} (case: {case})."
    named = difference.index is not None or wrong.fact != VALUE or "[" in difference.tensor
    rank, tensor = None if exercise.world_size == 1 else wrong.rank, difference.tensor if named else None
    return Feedback(headline, difference.expected, difference.got, cause, rank, None, tensor, difference.index)


# ---- right values at more bytes


def _feedback_on_bytes(
    exercise: Exercise, learner: Behaviour, reference: Behaviour | None, mistakes: Callable[[], Sequence[Known]]
) -> Feedback | None:
    if reference is None:
        return None
    alike = _calls(learner, kind_only=True) == _calls(reference, kind_only=True) or _numbers_alone(learner, reference)
    few = _FEW if alike else _TINY if not sent(reference) else 0
    few *= sum(len(trial.calls) for ranks in learner.trials for trial in ranks)
    if sent(learner) <= _SLACK * sent(reference) + few + _counting(learner, reference):
        return None
    right = _expected(exercise, learner, reference)
    known = (
        known.cause
        for known in mistakes()
        if _calls(known.behaviour) == _calls(learner) and _first_wrong(exercise, known.behaviour, right) is None
    )
    otherwise = "fewer bytes bring the same values: what does every rank need, and what does it have already?"
    if alike and abs(sent(learner) / sent(reference) - 2) < 0.01:
        otherwise = "the same messages with twice the bytes: send tensors in their own dtype, not in float64"
    return Feedback(
        "The values are right, but more is sent than need be.",
        f"{sent(reference):,.0f} bytes over all ranks",
        f"{sent(learner):,.0f} bytes: {', '.join(_in_words(learner))}",
        next(known, otherwise),
        None if exercise.world_size == 1 else 0,
    )


def _counting(learner: Behaviour, reference: Behaviour) -> float:
    """Bytes of a number that the ranks add up once a case, as a solution does that counts them so; none where the
    reference adds up a number, too.
    """
    total = 0.0
    for ours, theirs in zip(learner.trials, reference.trials):
        for mine, other in zip(ours, theirs):
            ones, few = ([call for call in each.calls if _is_sum_of_a_number(call)] for each in (mine, other))
            total += bytes_sent(ones[0], len(ours)) if ones and not few else 0
    return total


def _is_sum_of_a_number(call: Call) -> bool:
    return call.kind == "all_reduce" and call.nbytes <= _FEW


def _numbers_alone(learner: Behaviour, reference: Behaviour) -> bool:
    """Whether both make as many calls, and none of the learner's carries more than a number of each rank."""
    as_many = [[len(each.calls) for each in ranks] for ranks in learner.trials]
    return as_many == [[len(each.calls) for each in ranks] for ranks in reference.trials] and all(
        call.nbytes <= _FEW * len(ranks) for ranks in learner.trials for each in ranks for call in each.calls
    )


def _calls(behaviour: Behaviour, kind_only: bool = False) -> list[list[list[Any]]]:
    """What was called at every place, with or without bytes and peers."""
    return [[[c.kind if kind_only else c for c in trial.calls] for trial in ranks] for ranks in behaviour.trials]


def _in_words(behaviour: Behaviour) -> list[str]:
    kinds = kinds_of(call for ranks in behaviour.trials for trial in ranks for call in trial.calls)
    return [kind for kind in kinds if kind != "recv"]


def sent(behaviour: Behaviour) -> float:
    """Bytes that all ranks send in all cases."""
    return sum(bytes_sent(call, len(ranks)) for ranks in behaviour.trials for trial in ranks for call in trial.calls)
