"""Notebook 08: the account of a step from two lists of intervals, and questions on the recorded trace."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from fsdplab.teaching.core.exercise import Case, Exercise, Trial, Wrong, edited
from fsdplab.teaching.core.findings import Difference

from . import on_ranks
from .questions import QUESTIONS
from .reading import PARTS, reference_account

_RANKS = 2
_STUB = '''\
def account(step, computing, communicating):
    """The parts of a step, in ns; both lists hold (start, end) pairs from 0 to `step`, in any order."""
    ...  # pairs of one list may overlap: an instant counts once
    return {"compute_only": ..., "overlapped": ..., "exposed": ..., "other": ...}
'''

_REFERENCE = '''\
def merged(pairs):
    """The same instants as disjoint pairs, in order."""
    joined = []
    for start, end in sorted(pairs):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def length(pairs):
    """How many ns the pairs hold, each instant once."""
    return sum(end - start for start, end in merged(pairs))


def account(step, computing, communicating):
    """The parts of a step, in ns; both lists hold (start, end) pairs from 0 to `step`, in any order."""
    work, talk = length(computing), length(communicating)
    either = length([*computing, *communicating])
    return {"compute_only": either - talk, "overlapped": work + talk - either,
            "exposed": either - work, "other": step - either}
'''

Pairs = list[tuple[int, int]]
_SMALL: tuple[tuple[str, int, Pairs, Pairs], ...] = (
    ("nothing overlaps: computes 0 to 10, talks 12 to 15, of 20", 20, [(0, 10)], [(12, 15)]),
    ("one passage half hidden", 20, [(0, 10)], [(5, 15)]),
    ("one passage hidden whole", 20, [(0, 16)], [(4, 9)]),
    ("two passages at once, both exposed", 20, [(0, 4)], [(6, 12), (8, 14)]),
    ("two passages at once under computing", 20, [(0, 15)], [(2, 8), (4, 10)]),
    ("two threads compute at once, in any order", 30, [(12, 20), (0, 8), (6, 10)], [(18, 26), (9, 13)]),
    ("computing within computing", 20, [(0, 12), (2, 5)], [(10, 14)]),
    ("no communication", 10, [(1, 9)], []),
    ("no computing", 10, [], [(1, 9)]),
)


def _long() -> tuple[str, int, Pairs, Pairs]:
    """A step of a hundred intervals each, at times of a real trace."""
    stream = random.Random(8)

    def pairs(width: int) -> Pairs:
        starts = [stream.randrange(490_000_000) for _ in range(100)]
        return [(start, start + stream.randrange(1, width)) for start in starts]

    return "a hundred intervals of each, as in a trace", 500_000_000, pairs(4_000_000), pairs(3_000_000)


def _cases() -> list[Case]:
    return [
        Case(name, ((step, work, talk),) * _RANKS, (reference_account(step, work, talk),) * _RANKS)
        for name, step, work, talk in (*_SMALL, _long())
    ]


def _explain(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    step, work, talk = case.arguments[0]
    got, right = trial.returned, case.expected[0]
    if not isinstance(got, dict) or set(got) != set(PARTS):
        return None, f"return a dict with the four names {', '.join(PARTS)}, a number of ns each"
    if not all(isinstance(got[name], (int, float)) for name in PARTS):
        return None, "a number of ns is expected for each of the four"
    where = f"computing {_short(work)}, communicating {_short(talk)}, a step of {step:,}"
    return where, _wrong(step, work, talk, got, right)


def _short(pairs: Pairs) -> str:
    return str(pairs) if len(pairs) <= 4 else f"{len(pairs)} intervals"


def _wrong(step: int, work: Pairs, talk: Pairs, got: dict[str, Any], right: dict[str, int]) -> str:
    raw = [sum(end - start for start, end in pairs) for pairs in (work, talk)]
    busy = [reference_account(step, pairs, [])["compute_only"] for pairs in (work, talk)]
    twice = [name for name, plain, once in zip(("computing", "communication"), raw, busy) if plain != once]
    if min(got[name] for name in PARTS) < 0:
        return (
            "a part is below zero: an interval inside of another must not shorten it. When you merge, keep the"
            " later end"
        )
    if right["overlapped"] and not got["overlapped"] and sum(got[name] for name in PARTS) == step:
        return (
            "nothing is overlapped, though the two lists meet: in both together an instant counts once, so merge before"
            " you add up lengths"
        )
    if got["compute_only"] == right["compute_only"] + right["overlapped"] and right["overlapped"]:
        return (
            "that is all computing; compute_only is computing while nothing is under way, without the overlapped part"
        )
    if got["exposed"] == busy[1] and right["overlapped"]:
        return "that is all communication; exposed is what of it no computing hides: subtract the overlapped part"
    if twice and sum(got[name] for name in PARTS) != step:
        return (
            f"pairs of {' and of '.join(twice)} overlap here, and an instant counts once: merge a list before you add"
            " up lengths"
        )
    if sum(got[name] for name in PARTS) != step:
        return (
            f"the four parts sum to {sum(got[name] for name in PARTS):,}, the step has {step:,}: every instant belongs"
            " to exactly one part"
        )
    if twice:
        return (
            f"pairs of {' and of '.join(twice)} overlap here, and an instant counts once: merge a list before you add"
            " up lengths"
        )
    return (
        "the parts sum to the step, but instants are in the wrong part: overlapped is where both lists have an"
        " interval, at the same time"
    )


account = Exercise(
    id="08.account",
    title="The account of a step",
    statement=(
        "Write account(step, computing, communicating): how many ns of a step were compute only, overlapped, exposed"
        " and other."
    ),
    stub=_STUB,
    reference=_REFERENCE,
    hints=(
        (
            "If you can measure the length of a set of intervals, each instant once, you have three lengths: of the"
            " first list, of the second, and of both together."
        ),
        (
            "Overlapped is what is counted twice when the first two lengths are added: work + talk - either. To measure"
            " a length, sort the pairs and merge those that touch."
        ),
        (
            "compute_only = either - talk, overlapped = work + talk - either, exposed = either - work, other = step -"
            " either; `either` is the merged length of [*computing, *communicating]."
        ),
    ),
    cases=_cases,
    explain=_explain,
    world_size=_RANKS,
    driver=(str(Path(on_ranks.__file__)), "drive_account"),
    wrong=(
        Wrong("not merged", edited(_REFERENCE, ("in merged(pairs))", "in pairs)")), "an instant counts once"),
        Wrong(
            "merged without sorting", edited(_REFERENCE, ("in sorted(pairs):", "in pairs:")), "an instant counts once"
        ),
        Wrong("the last end wins", edited(_REFERENCE, ("max(end, joined[-1][1])", "end")), "keep the later end"),
        Wrong(
            "all computing",
            edited(_REFERENCE, ('"compute_only": either - talk', '"compute_only": work')),
            "that is all computing",
        ),
        Wrong(
            "all communication",
            edited(_REFERENCE, ('"exposed": either - work', '"exposed": talk')),
            "that is all communication",
        ),
        Wrong(
            "exchanged",
            edited(
                _REFERENCE, ("either - talk", "EITHER"), ("either - work", "either - talk"), ("EITHER", "either - work")
            ),
            "in the wrong part",
        ),
        Wrong(
            "other left out",
            edited(_REFERENCE, ('"other": step - either', '"other": 0')),
            "every instant belongs to exactly one part",
        ),
        Wrong(
            "pair by pair",
            edited(
                _REFERENCE,
                (
                    "work + talk - either",
                    "sum(max(0, min(b, d) - max(a, c)) for a, b in computing for c, d in communicating)",
                ),
            ),
            "an instant counts once",
        ),
        Wrong(
            "a tuple",
            edited(_REFERENCE, ("return {", "return tuple({"), ("step - either}", "step - either}.values())")),
            "a dict with the four names",
        ),
    ),
)

ITEMS = (account, *QUESTIONS)
