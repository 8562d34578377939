"""Notebook 00: the first ranks, one number off the figure, and the self-test of what the course takes for granted."""

from __future__ import annotations

from collections.abc import Iterable

from fsdplab.records import RunRecord, known
from fsdplab.teaching.core.exercise import Case, Choice, Exercise, Question, Slip, Trial, Wrong, edited
from fsdplab.teaching.core.verdicts import Difference

_STUB = '''\
import torch.distributed as dist


def hello_ranks():
    """Return a text such as "rank 0 of 2": who this process is, and how many there are."""
    ...  # dist knows both numbers
'''

_REFERENCE = '''\
import torch.distributed as dist


def hello_ranks():
    """Return a text such as "rank 0 of 2": who this process is, and how many there are."""
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"
'''

_RANKS = 3


def _cases() -> list[Case]:
    expected = tuple(f"rank {rank} of {_RANKS}" for rank in range(_RANKS))
    return [Case("who am I", ((),) * _RANKS, expected)]


def _explain(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    got, rank = trial.returned, trial.rank
    if not isinstance(got, str):
        return None, "return one text that holds both numbers: an f-string joins them"
    if got == f"rank {rank + 1} of {_RANKS}":
        return None, "ranks count from 0"
    if got == f"rank {_RANKS} of {rank}":
        return None, "the two numbers are swapped: `get_rank()` says who, `get_world_size()` says how many"
    if isinstance(got, str) and got.startswith(f"rank {rank} of "):
        return (
            None,
            (
                f"the number of ranks is written down as a constant; this check starts {_RANKS}: ask"
                " `dist.get_world_size()`"
            ),
        )
    if got in case.expected:
        return None, "the rank is written down as a constant, but every rank runs this same code: ask `dist.get_rank()`"
    return None, 'the text must read exactly like "rank 0 of 2": a word, a number, a word, a number'


hello_ranks = Exercise(
    id="00.hello_ranks",
    title="Who am I?",
    statement='Write hello_ranks(): on every rank it returns "rank r of n".',
    stub=_STUB,
    reference=_REFERENCE,
    hints=(
        "All ranks run the same file. What differs between them is only what they are told when they ask.",
        "torch.distributed has one function for the number of this process and one for the number of processes.",
        '`return f"rank {dist.get_rank()} of {...}"`, with `dist.get_world_size()` in place of the dots.',
    ),
    cases=_cases,
    explain=_explain,
    world_size=_RANKS,
    wrong=(
        Wrong("counts from one", edited(_REFERENCE, ("dist.get_rank()", "dist.get_rank() + 1")), "count from 0"),
        Wrong("two ranks for ever", edited(_REFERENCE, ("{dist.get_world_size()}", "2")), "constant"),
        Wrong("always rank 0", edited(_REFERENCE, ("{dist.get_rank()}", "0")), "every rank runs this same code"),
        Wrong(
            "swapped",
            edited(_REFERENCE, ("get_rank", "RANK"), ("get_world_size", "get_rank"), ("RANK", "get_world_size")),
            "swapped",
        ),
        Wrong(
            "prints",
            edited(
                _REFERENCE,
                ('return f"rank {dist.get_rank()} of {dist.get_world_size()}"', 'print("rank", dist.get_rank())'),
            ),
            "returns nothing",
        ),
        Wrong(
            "the numbers only",
            edited(
                _REFERENCE,
                ('f"rank {dist.get_rank()} of {dist.get_world_size()}"', "dist.get_rank(), dist.get_world_size()"),
            ),
            "one text",
        ),
        Wrong(
            "the cell's names",
            edited(_REFERENCE, ("{dist.get_rank()}", "{rank}")),
            "in `%%ranks` cells only",
            ends="raises",
        ),
        Wrong("other words", edited(_REFERENCE, ('f"rank ', 'f"I am ')), "exactly like"),
        Wrong("no import", edited(_REFERENCE, ("import torch.distributed as dist", "")), "imports", ends="raises"),
    ),
)


def _run(records: Iterable[RunRecord], strategy: str) -> RunRecord:
    """The record of a strategy among those that the notebook compared."""
    return next(record for record in records if record.spec["strategy"] == strategy)


def _peak(records: Iterable[RunRecord], strategy: str) -> float:
    return known(_run(records, strategy).summary.peak_memory_bytes.total) / 1e6


def _card(records: Iterable[RunRecord]) -> float:
    return _run(records, "no_shard").spec["card"] / 1e6


peak = Question(
    id="00.peak",
    statement="By how many MB does the peak of no_shard exceed the card?",
    unit="MB",
    expected=lambda records: _peak(records, "no_shard") - _card(records),
    tolerance=0.03,
    slips=(
        Slip(
            "that is the whole bar of no_shard; the question is what lies beyond the card",
            value=lambda records: _peak(records, "no_shard"),
        ),
        Slip("that is the card's capacity, the dashed line", value=_card),
        Slip(
            "that is the difference between the two bars; the question is about the card",
            value=lambda records: _peak(records, "no_shard") - _peak(records, "full_shard"),
        ),
        Slip(
            "that is what full_shard leaves free on its card; the question is about no_shard",
            value=lambda records: _card(records) - _peak(records, "full_shard"),
        ),
        Slip("that is the sum over both ranks; the figure and the card are about one rank", factor=2.0),
    ),
    hints=(
        "Two things are to be read: the length of one bar, and where the dashed line stands.",
        "The number at the end of the bar named no_shard is its peak; the axis is in MB (10**6 bytes).",
        "The number at the end of that bar, minus 330 MB.",
    ),
    explanation="A GPU of that size would have run out of memory; the emulated card lets the run go on and marks it.",
)

loop = Choice(
    id="00.loop",
    statement=(
        "A training loop calls `loss.backward()` and `optimizer.step()`, but never `optimizer.zero_grad()`. What"
        " happens?"
    ),
    options={
        "a": "nothing: `backward()` overwrites `.grad`",
        "b": "every step uses the sum of all gradients since the start",
        "c": "`backward()` raises, because `.grad` is not empty",
    },
    right="b",
    because={
        "a": "`backward()` adds to `.grad`. That is a feature: micro-batches are accumulated this way.",
        "b": "`backward()` adds to `.grad`, so the old gradients stay in the sum.",
        "c": "`backward()` adds to a `.grad` that is there; only a second `backward()` through a freed graph raises.",
    },
)

hook = Choice(
    id="00.hook",
    statement="`weight.register_post_accumulate_grad_hook(f)` on the first layer: when does `f` run?",
    options={
        "a": "in the forward pass, when the layer is called",
        "b": "after `backward()` has returned, for all weights at once",
        "c": "near the end of `backward()`, as soon as this weight's gradient is there",
    },
    right="c",
    because={
        "a": "that is a forward hook, `register_forward_hook` on the module.",
        "b": "it runs inside `backward()`, one weight at a time; that is what lets communication begin early.",
        "c": (
            "gradients become ready from the last layer to the first, and the hook runs inside `backward()`: DDP sends"
            " buckets from there."
        ),
    },
)

adam = Question(
    id="00.adam",
    statement="How many bytes does Adam keep for each parameter (fp32), beside the parameter and its gradient?",
    unit="B",
    expected=8.0,
    slips=(
        Slip("that is one of its two moments; it keeps a mean and a mean of squares", value=4.0),
        Slip("gradient included? the question is about the optimizer's own state", value=12.0),
        Slip("that is everything together: parameter, gradient and both moments", value=16.0),
        Slip("that is the number of values it keeps, not their bytes", value=2.0),
    ),
    hints=(
        "Adam remembers two averages.",
        "A running mean of the gradient and one of its square, each as large as the parameter.",
        "Two fp32 numbers of 4 bytes each.",
    ),
    explanation="Two moments of 4 bytes: of 16 bytes a parameter, half is the optimizer's.",
)

bf16 = Choice(
    id="00.bf16",
    statement="`torch.tensor(256., dtype=torch.bfloat16) + 1` gives ...",
    options={"a": "256", "b": "257", "c": "inf"},
    right="a",
    because={
        "a": "257 needs 9 significant bits, bf16 keeps 8: small updates are lost, which is why masters stay in fp32.",
        "b": "bf16 keeps 8 significant bits; 257 needs 9.",
        "c": "bf16 has the range of fp32, up to 3e38; what it lacks is precision.",
    },
)

ITEMS = (hello_ranks, peak, loop, hook, adam, bf16)
