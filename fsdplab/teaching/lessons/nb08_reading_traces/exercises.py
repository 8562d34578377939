"""Notebook 08: where a rank's wait for a message went, and questions on the recorded trace."""

from __future__ import annotations

from pathlib import Path

from fsdplab.records import RunRecord
from fsdplab.teaching.core.exercise import Case, Choice, Exercise, Question, Slip, Trial, Wrong, edited
from fsdplab.teaching.core.verdicts import Difference

from . import on_ranks
from .reading import MS, WAITS, breakdown, gaps, worst

_RANKS = 2
_STUB = '''\
def waited(issued, peer_issued, taken, delivered, needed):
    """Where the wait from `needed` to `delivered` went, in ms: for the peer, in the queue, on the link."""
    ...  # before `needed` the rank computes, so nothing of that counts
    return {"peer": ..., "queue": ..., "link": ...}
'''
_REFERENCE = '''\
def waited(issued, peer_issued, taken, delivered, needed):
    """Where the wait from `needed` to `delivered` went, in ms: for the peer, in the queue, on the link."""
    complete = max(issued, peer_issued)  # from now on the link may take it
    spans = {"peer": (issued, complete), "queue": (complete, taken), "link": (taken, delivered)}
    return {name: max(0, end - max(start, needed)) for name, (start, end) in spans.items()}
'''
# name -> (issued, peer_issued, taken, delivered, needed), (peer, queue, link)
_CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "needed when issued, on a free link": ((10, 10, 10, 15, 10), (0, 0, 5)),
    "the peer came late": ((10, 14, 14, 19, 10), (4, 0, 5)),
    "the link carried something else": ((10, 10, 14, 19, 10), (0, 4, 5)),
    "a late peer, then a busy link": ((10, 12, 15, 20, 10), (2, 3, 5)),
    "the peer was there before": ((10, 7, 10, 15, 10), (0, 0, 5)),
    "issued ahead, needed while it travels": ((10, 10, 10, 15, 13), (0, 0, 2)),
    "issued ahead, needed while it queues": ((10, 10, 14, 19, 12), (0, 2, 5)),
    "issued ahead, needed before the peer came": ((10, 16, 16, 21, 12), (4, 0, 5)),
    "issued early enough: hidden": ((10, 10, 10, 15, 18), (0, 0, 0)),
}


def _cases() -> list[Case]:
    return [
        Case(f"{name}: {times}", (times,) * _RANKS, (dict(zip(WAITS, right, strict=True)),) * _RANKS)
        for name, (times, right) in _CASES.items()
    ]


def _explain(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    issued, peer, taken, delivered, needed = case.arguments[trial.rank]
    got, right = trial.returned, case.expected[0]
    if not isinstance(got, dict) or set(got) != set(WAITS):
        return None, f"return a dict with the names {', '.join(WAITS)}, a number of ms each"
    if not all(isinstance(got[name], (int, float)) for name in WAITS):
        return None, "a number of ms is expected for each of the three"
    where = f"issued {issued}, peer {peer}, taken {taken}, delivered {delivered}, needed {needed}"
    return where, _wrong(case.arguments[trial.rank], got, right)


def _wrong(times: tuple[int, ...], got: dict[str, float], right: dict[str, float]) -> str:
    issued, peer, taken, delivered, needed = times
    if min(got.values()) < 0:
        return "a part is below zero: where a span ends before the wait begins, none of it counts (max(0, ...))"
    if peer > issued and got["queue"] == right["queue"] + right["peer"]:
        return "the queue begins when the last rank has issued: until then the link was not asked by all"
    if needed > issued and sum(got.values()) > max(0, delivered - needed):
        return "before `needed` the rank computed: cut every span at `needed`"
    if sum(got.values()) != (whole := max(0, delivered - needed)):
        return f"the parts sum to {sum(got.values())}, and the rank waited for {whole}: from needed to delivered"
    return "the sum is right, but a part has another's time: peer until both have issued, queue until taken, then link"


waited = Exercise(
    id="08.waited",
    title="Where the wait went",
    statement="Write waited(...): how many ms a rank waited for its peer, in the link's queue, and on the link.",
    stub=_STUB,
    reference=_REFERENCE,
    hints=(
        "A message has four instants in a row: issued, issued by the last rank, taken, delivered. Three spans.",
        "The second instant is max(issued, peer_issued). Of each span only what lies behind `needed` counts.",
        "For a span from start to end: max(0, end - max(start, needed)).",
    ),
    cases=_cases,
    explain=_explain,
    world_size=_RANKS,
    driver=(str(Path(on_ranks.__file__)), "drive_waited"),
    wrong=(
        Wrong("not cut", edited(_REFERENCE, ("max(start, needed)", "start")), "cut every span at `needed`"),
        Wrong("negative", edited(_REFERENCE, ("max(0, end - max(start, needed))", "end - max(start, needed)")),
              "below zero"),
        Wrong("queue from the issue", edited(_REFERENCE, ("(complete, taken)", "(issued, taken)")),
              "the last rank has issued"),
        Wrong("peer forgotten", edited(_REFERENCE, ("(issued, complete)", "(issued, issued)")), "the parts sum to"),
        Wrong("all on the link", edited(_REFERENCE, ('"queue": (complete, taken), "link": (taken, delivered)',
              '"queue": (taken, taken), "link": (complete, delivered)')), "another's time"),
        Wrong("a sum", edited(_REFERENCE, ("return {name: max", "return sum({name: max"),
              ("in spans.items()}", "in spans.items()}.values())")), "a dict with the names"),
    ),
)  # fmt: skip

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
        "Four parts sum to the step: compute only, overlapped, exposed, and this one.",
        "The step minus everything in which the rank computes or communicates.",
        "The step minus the three parts in the table.",
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
            " could have travelled meanwhile, before the reduce-scatter was there at all."
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

ITEMS = (waited, other, where, largest, cause, unavoidable, tools)
