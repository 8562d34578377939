"""The questions of notebook 08, on the recorded trace: where the time went, and whose fault it was."""

from __future__ import annotations

from fsdplab.records import RunRecord
from fsdplab.teaching.core.exercise import Choice, Question, Slip

from .reading import MS, breakdown, gaps, worst


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

QUESTIONS = (other, where, largest, cause, unavoidable, tools)
