"""Notebook 11: bytes before measurements, and a choice of strategy and settings for a given card and link."""

from __future__ import annotations

from pathlib import Path

from fsdplab.records import known
from fsdplab.teaching.core.exercise import Case, Choice, Exercise, Question, Slip, Trial, Wrong, edited
from fsdplab.teaching.core.verdicts import Difference

from . import on_ranks
from .reading_choices import MB, of, on_the_link, peak

_RANKS = 2
_STUB = '''\
def choose():
    """Strategy and settings for this card and this link."""
    return {
        "strategy": "full_shard",  # "no_shard", "zero1", "zero2", "shard_grad_op", "full_shard"
        "prefetch": 0,  # units gathered ahead
        "link_queues": 1,  # 2: reductions have a communicator of their own
        "units": "auto",  # "auto" (a block), "linear", "model"
    }
'''
_REFERENCE = edited(_STUB, ('"full_shard",', '"shard_grad_op",'), ('"prefetch": 0', '"prefetch": 1'))


def _cases() -> list[Case]:
    right = {"choices": "", "bytes over the card": 0, "ms on the link too many": 0, "gathers are hidden": True}
    name = f"a few steps of gpt-20m on a card of {on_ranks.CARD / MB:g} MB behind {on_ranks.JOB['link']}"
    return [Case(name, ((),) * _RANKS, (right,) * _RANKS)]


def _explain(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    got, seen = trial.returned, (trial.printed.strip().splitlines() or [""])[-1]
    where = f"on this rank: {seen}" if seen else None
    if got["choices"]:
        return None, got["choices"]
    if got["bytes over the card"]:
        return (
            where,
            (
                f"{got['bytes over the card'] / MB:.0f} MB beyond the card: a run that does not fit is no choice,"
                " however fast. Shard more"
            ),
        )
    if got["ms on the link too many"]:
        return (
            where,
            (
                f"it fits, but the link is busy for {got['ms on the link too many']} ms a step more than need be:"
                " parameters are sent twice, because they are dropped in between. The card has room to keep something"
            ),
        )
    return (
        where,
        (
            "it fits and sends little, but no gather is hidden under computing: each is issued when its unit is needed"
            " (prefetch)"
        ),
    )


def _set(**choices: str) -> str:
    start = _REFERENCE
    for name, value in choices.items():
        old = {"strategy": '"shard_grad_op",', "prefetch": "1,", "link_queues": "1,", "units": '"auto",'}[name]
        start = edited(start, (f'"{name}": {old}', f'"{name}": {value},'))
    return start


choose = Exercise(
    id="11.choose",
    title="Defend a choice",
    statement=(
        f"Write choose(): a strategy and settings that fit a card of {on_ranks.CARD / MB:g} MB and expose as little as"
        " this link allows."
    ),
    stub=_STUB,
    reference=_REFERENCE,
    hints=(
        "Begin with the card: which strategies lie left of its line? Then ask which of those sends least.",
        (
            "full_shard fits with room to spare, and keeps the link busy for half as long again. Others fit as well:"
            " look at the Pareto figure. Then let gathers set out ahead."
        ),
        '"strategy": "shard_grad_op" with "prefetch": 1, or "zero1" or "zero2".',
    ),
    cases=_cases,
    explain=_explain,
    hung="the ranks make different calls: return the same settings on every rank",
    world_size=_RANKS,
    time_limit=120.0,
    driver=(str(Path(on_ranks.__file__)), "drive_choose"),
    wrong=(
        Wrong("shards everything", _set(strategy='"full_shard"'), "The card has room"),
        Wrong("shards nothing", _set(strategy='"no_shard"'), "beyond the card"),
        Wrong("nothing ahead", _set(prefetch="0"), "no gather is hidden under computing"),
        Wrong("one big unit", _set(units='"model"'), "beyond the card"),
        Wrong(
            "a card of its own", edited(_REFERENCE, ('"units": "auto",', '"card": 10**12,')), "card belongs to the job"
        ),
        Wrong(
            "a faster link", edited(_REFERENCE, ('"units": "auto",', '"link": "nvlink4",')), "link belongs to the job"
        ),
        Wrong("a word that is none", _set(strategy='"zero3"'), "unknown strategy"),
        Wrong("a text", edited(_REFERENCE, ("return {", "return str({"), ("    }\n", "    })\n")), "expected a dict"),
    ),
)

order = Choice(
    id="11.order",
    statement="The strategies by the bytes that a rank sends in a step, fewest first?",
    options={
        "a": "full_shard, shard_grad_op, zero2, zero1, no_shard: who keeps less sends less",
        "b": "no_shard, zero1, zero2, shard_grad_op and full_shard all send the same",
        "c": "no_shard, zero1, zero2 and shard_grad_op send the same; full_shard sends half as much again",
        "d": "no_shard, zero1, zero2, shard_grad_op, full_shard: each sends more than the one before",
    },
    right="c",
    because={
        "a": "what is kept and what is sent are different things: a rank that drops its copy must be sent it again.",
        "b": "full_shard drops parameters after the forward, and gathers them a second time for the backward.",
        "c": (
            "an all-reduce is a reduce-scatter and an all-gather (01): once each is 2(n-1)/n of the parameters. Only"
            " full_shard gathers twice: 3(n-1)/n."
        ),
        "d": (
            "ZeRO-1 and ZeRO-2 split the all-reduce into its halves, and put the optimizer between them: not a byte"
            " more."
        ),
    },
)

busy = Question(
    id="11.busy",
    statement="For how many ms a step does the link carry a rank's messages under full_shard?",
    unit="ms",
    expected=lambda runs: 1e3 * on_the_link(of(runs, "full_shard")),
    tolerance=0.03,
    slips=(
        Slip(
            "that is what the others need: full_shard gathers twice",
            value=lambda runs: 1e3 * on_the_link(of(runs, "no_shard")),
        ),
        Slip(
            "the whole parameters three times; on two ranks half of each collective comes from oneself, (n-1)/n",
            factor=2.0,
        ),
        Slip(
            "that is the number of MB; divide by the link's 400 MB/s",
            value=lambda runs: known(of(runs, "full_shard").summary.comm.bytes_per_step) / MB,
        ),
    ),
    hints=(
        "Bytes sent, divided by the link's bandwidth.",
        "21.6 million parameters of 4 bytes; three collectives, of which a rank sends half.",
        "3 x 86.4 MB / 2 / 400 MB/s",
    ),
    explanation="Part of it is hidden under computing; the rest is exposed.",
)

defend = Choice(
    id="11.defend",
    statement="Somebody has a card of 220 MB and this link. Which sentence defends a choice from the figure?",
    options={
        "a": "`no_shard`, because it never waits for a gather",
        "b": "`full_shard`, because sharding everything is the modern way",
        "c": (
            "`full_shard`, because it is the only one whose peak fits; its price is half as many bytes again, of which"
            " most can be hidden"
        ),
        "d": "`zero2`, because no other step is shorter",
    },
    right="c",
    because={
        "a": "true, and it does not fit: its peak is far beyond 220 MB.",
        "b": "that is a fashion, and no reason: on a card of 400 MB the same sentence would cost time for nothing.",
        "c": "first what fits, then what it costs, then what can be done about the cost.",
        "d": "its step is short, and its peak is 237 MB, beyond this card. First ask what fits.",
    },
)

tight = Question(
    id="11.tight",
    statement="By how many MB does the peak of shard_grad_op exceed that of full_shard?",
    unit="MB",
    expected=lambda runs: (peak(of(runs, "shard_grad_op")) - peak(of(runs, "full_shard"))) / MB,
    tolerance=0.04,
    slips=(
        Slip("that is shard_grad_op's whole peak", value=lambda runs: peak(of(runs, "shard_grad_op")) / MB),
        Slip(
            "that is what no_shard needs more",
            value=lambda runs: (peak(of(runs, "no_shard")) - peak(of(runs, "full_shard"))) / MB,
        ),
    ),
    hints=(
        "Two peaks, one difference.",
        "The column `peak, MB`, rows shard_grad_op and full_shard.",
        "266 - 199, about.",
    ),
    explanation="The parameters that stay whole from forward to backward, less what full_shard holds at its own peak.",
)

ITEMS = (choose, order, busy, defend, tight)
