"""Notebook 08: the account of a step from two lists of intervals, and questions on the recorded trace."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from fsdplab.records import RunRecord
from fsdplab.teaching.core.exercise import Case, Choice, Exercise, Question, Slip, Trial, Wrong, edited
from fsdplab.teaching.core.verdicts import Difference

from . import on_ranks
from .reading import MS, PARTS, breakdown, gaps, reference_account, worst

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
    ("one transfer half hidden", 20, [(0, 10)], [(5, 15)]),
    ("one transfer hidden whole", 20, [(0, 16)], [(4, 9)]),
    ("two transfers at once, both exposed", 20, [(0, 4)], [(6, 12), (8, 14)]),
    ("two transfers at once under computing", 20, [(0, 15)], [(2, 8), (4, 10)]),
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

# --- questions on the recorded trace


def _part(record: RunRecord, name: str, rank: int = 0) -> float:
    return breakdown(record, rank)[f"{name}_ns"] / MS


def _carried(record: RunRecord) -> float:
    """How long the link carried the most exposed collective, in ms."""
    most = worst(record)
    rows = [
        row
        for row in record.table("ledger")
        if row["rank"] == 0 and (row["unit"], row["phase"], row["kind"]) == (most["unit"], most["phase"], most["kind"])
    ]
    return (rows[-1]["end_ns"] - rows[-1]["start_ns"]) / MS


largest = Question(
    id="08.largest",
    statement="How many ms of the most exposed collective of rank 0 are exposed?",
    unit="ms",
    expected=lambda record: worst(record)["exposed_ns"] / MS,
    tolerance=0.03,
    slips=(
        Slip(
            "that is all exposed time of the step together; the question is about one collective",
            value=lambda record: _part(record, "exposed"),
        ),
        Slip("that is the second longest", value=lambda record: gaps(record)[1]["exposed_ns"] / MS),
        Slip(
            "that is for how long the link carried it; the rank stood still from the moment it issued the gather",
            value=_carried,
        ),
    ),
    hints=(
        "One column of the table says it, for each collective.",
        "The longest red piece of rank 0 in the figure, or the largest number of the column `exposed, ms`.",
        'max(row["exposed_ns"] for row in record.table("exposed") if row["rank"] == 0) / 1e6',
    ),
    explanation="While it lasts, the rank computes nothing.",
)

other = Question(
    id="08.other",
    statement="How many ms of rank 0's step are neither computing nor communication?",
    unit="ms",
    expected=lambda record: _part(record, "other"),
    tolerance=0.03,
    slips=(
        Slip(
            "that is exposed communication; other time is what neither list covers",
            value=lambda record: _part(record, "exposed"),
        ),
        Slip(
            "that is all time without computing: exposed communication is in it",
            value=lambda record: _part(record, "exposed") + _part(record, "other"),
        ),
        Slip("that is rank 1's", value=lambda record: _part(record, "other", 1)),
    ),
    hints=(
        "It is one of the four parts of your account.",
        "The step minus everything in which the rank computes or communicates.",
        'account(*reading.sets(record))["other"] / 1e6',
    ),
    explanation=(
        "Python between operators, for the most part: the engine's hooks, the loss that is read. On a GPU this is where"
        " a host that is too slow shows."
    ),
)

where = Choice(
    id="08.where",
    statement="Which collective of rank 0 costs the step most?",
    options={
        "a": "the root's all-gather, with which the step begins",
        "b": "the all-gather of `blocks.1` in the forward",
        "c": "the all-gather of `blocks.0` in the backward",
        "d": "the root's reduce-scatter, with which the step ends",
    },
    right="c",
    because={
        "a": (
            "it is exposed, and no other schedule could hide it: nothing is computed yet. But a longer red piece is"
            " further right."
        ),
        "b": "it is exposed whole, but once only for as long as it travels. One red piece is about twice as long.",
        "c": "it takes about twice as long as any other gather of a block. Now find out why.",
        "d": "it is exposed, since nothing is computed after it. But a longer red piece is further left.",
    },
)

cause = Choice(
    id="08.cause",
    statement="Why is that piece so long? Look at its row, and at the rows before it.",
    options={
        "a": "rank 1 came late, so the link could not begin",
        "b": "it was issued only when its unit was needed, and then stood behind the reduce-scatter of `blocks.1`",
        "c": "`blocks.0` is larger than the other block, so it travels for longer",
        "d": "there is nothing it could hide behind",
    },
    right="b",
    because={
        "a": (
            "then `link takes it` would be later than `issued` with a free link in between. Here the link was carrying"
            " something else: look who was delivered at that moment."
        ),
        "b": (
            "the column `computing before` says that the backward of `blocks.1` had just been computed: the gather"
            " could have travelled beneath it, before the reduce-scatter was there at all."
        ),
        "c": "both blocks have the same size: compare `delivered` minus `link takes it` in their rows.",
        "d": "the whole backward of `blocks.1` ran just before: that is what it could have hidden behind.",
    },
)

unavoidable = Choice(
    id="08.unavoidable",
    statement="Which piece would stay exposed with any schedule, as long as the link and the units stay as they are?",
    options={
        "a": "the all-gather of `blocks.1` in the forward",
        "b": "the root's first all-gather and its last reduce-scatter",
        "c": "the all-gather of `blocks.0` in the backward",
        "d": "none: prefetching can hide everything",
    },
    right="b",
    because={
        "a": "the forward of `blocks.0` runs before it, and could cover it.",
        "b": (
            "nothing can be computed before the first weights have come, and nothing is left to compute when the last"
            " gradients are there."
        ),
        "c": "the backward of `blocks.1` runs before it, and could cover it.",
        "d": "before the first gather of a step and after its last reduction there is nothing to compute.",
    },
)

tools = Choice(
    id="08.tools",
    statement=(
        "You open this trace in Perfetto and look for the all-gather of `blocks.1` in the forward. What shows that the"
        " rank waited for the network?"
    ),
    options={
        "a": "the range `FSDP::all_gather (blocks.1)`: it lasts as long as the message travels",
        "b": "the range `FSDP::link (blocks.1)`: the main thread stands still in it",
        "c": "nothing: an emulated link leaves no mark in a trace",
    },
    right="b",
    because={
        "a": (
            "that range is the call that issues the gather; it returns at once. (On a GPU the message would be a kernel"
            " on a stream of its own.)"
        ),
        "b": (
            "a rank that needs its unit before the link has delivered sleeps in this range. With NCCL the same gap"
            " shows as a stream that waits."
        ),
        "c": "what the link does is not in the file, but the waiting of the main thread is.",
    },
)

ITEMS = (account, other, where, largest, cause, unavoidable, tools)
