"""Notebook 10: the crossover batch as a function, one number read from the roofline, and what accumulation changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from fsdplab.planning.overlap import overlap_of
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.teaching.core.exercise import Case, Choice, Exercise, Question, Slip, Trial, Wrong, edited
from fsdplab.teaching.core.verdicts import Difference

_ONE = 1  # a pure function: one rank judges it
_READ_AT = 1024  # tokens at which 10.read asks for the ratio

# --- the crossover

_HEAD = '''\
def crossover(parameters, ranks, flops, bandwidth, param_bytes, reduce_bytes):
    """Tokens of a rank from which on the messages of a block take no longer than its compute, in both phases.

    full_shard, one block gathered ahead. A number has `param_bytes` in gathers, `reduce_bytes` in reductions;
    a second has `flops` operations and carries `bandwidth` bytes.
    """
    sent = parameters * (ranks - 1) / ranks  # numbers that a rank sends in one gather, or in one reduction
'''
_STUB = _HEAD + "    ...\n"
_CROSSOVER = (
    _HEAD
    + """\
    forward = param_bytes * sent / bandwidth / (2 * parameters / flops)
    backward = (param_bytes + reduce_bytes) * sent / bandwidth / (4 * parameters / flops)
    return max(forward, backward)
"""
)
_CASES = {
    "a block of Llama 3.1 8B on 8 H100": (218_103_808, 8, 480e12, 380e9, 2, 4),
    "a block four times as large": (872_415_232, 8, 480e12, 380e9, 2, 4),
    "reductions in bf16": (218_103_808, 8, 480e12, 380e9, 2, 2),
    "gathers in fp32, reductions in bf16": (218_103_808, 8, 480e12, 380e9, 4, 2),
    "two cards on a slow bus": (218_103_808, 2, 100e12, 26e9, 2, 4),
    "64 ranks": (855_638_016, 64, 400e12, 100e9, 2, 4),
}


def phases(
    parameters: float, ranks: int, flops: float, bandwidth: float, param_bytes: float, reduce_bytes: float
) -> tuple[float, float]:
    """Tokens at which each phase hides its messages; parameters cancel: `phases(1, 2, 8.0, 1.0, 2, 2) == (4, 4)`."""
    rate = (ranks - 1) / ranks * flops / bandwidth
    return param_bytes * rate / 2, (param_bytes + reduce_bytes) * rate / 4


def _cases() -> list[Case]:
    return [Case(name, (case,), (max(phases(*case)),)) for name, case in _CASES.items()]


def _explain(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    got, right = trial.returned, case.expected[0]
    if isinstance(got, (str, bool)) or not hasattr(got, "__float__"):
        return None, "return one number: tokens"
    for wrong, words in _slips(*case.arguments[0]):
        if math.isclose(float(got), wrong, rel_tol=2e-3) and not math.isclose(wrong, right, rel_tol=2e-3):
            return None, words
    return None, "for each phase: seconds of its messages, over seconds that one token computes. Then the later of both"


def _slips(*case: Any) -> Iterator[tuple[float, str]]:
    """Known wrong numbers and their causes."""
    (forward, backward), (_, ranks, _, _, param_bytes, reduce_bytes) = phases(*case), case
    right = max(forward, backward)
    gathers, every = param_bytes + 0.0, param_bytes + reduce_bytes
    yield (
        forward,
        (
            "this hides the forward only. A backward computes twice as much, but it gathers the block again and reduces"
            " its gradient: does that fit as well?"
        ),
    )
    yield backward, "this hides the backward only: the later of the two phases counts, and here that is the forward"
    yield (
        forward * (gathers + every) / (3 * gathers),
        ("this is the step as a whole: compute that one phase has to spare does not hide the messages of the other"),
    )
    yield forward + backward, "the phases come one after the other: take the later crossover, not their sum"
    yield (
        max(forward, 2 * backward),
        "a backward computes twice as much as a forward: 4 operations a parameter and token",
    )
    yield right * ranks / (ranks - 1), "a rank sends (ranks - 1)/ranks of the block; it has its own slice already"
    yield right / (ranks - 1), "a rank's slice is 1/ranks of the block, but around the ring it sends ranks - 1 slices"
    yield right * 2, "a multiplication and an addition: 2 operations a parameter and token in the forward"
    yield right * 8, "bytes, not bits: bandwidth is in bytes a second"
    yield 1 / right, "upside down: messages over compute"
    yield max(forward, backward * reduce_bytes / every), "the backward gathers the block again before it can compute"


crossover = Exercise(
    id="10.crossover",
    title="The crossover batch",
    statement=(
        "Write crossover(parameters, ranks, flops, bandwidth, param_bytes, reduce_bytes): the tokens of a rank from"
        " which on all messages of a block hide."
    ),
    stub=_STUB,
    reference=_CROSSOVER,
    hints=(
        "With how many tokens does the compute of a forward take as long as one gather? And a backward: what is sent?",
        (
            "Forward: param_bytes * sent / bandwidth seconds of messages, 2 * parameters / flops seconds of compute a"
            " token. Backward: a gather and a reduction, and 4 * parameters / flops."
        ),
        (
            "max(param_bytes * sent / bandwidth / (2 * parameters / flops), (param_bytes + reduce_bytes) * sent /"
            " bandwidth / (4 * parameters / flops))."
        ),
    ),
    cases=_cases,
    explain=_explain,
    world_size=_ONE,
    tolerance=2e-3,
    wrong=(
        Wrong("forward", edited(_CROSSOVER, ("max(forward, backward)", "forward")), "the forward only"),
        Wrong("backward", edited(_CROSSOVER, ("max(forward, backward)", "backward")), "the backward only"),
        Wrong("the sooner", edited(_CROSSOVER, ("max(forward, backward)", "min(forward, backward)")), "forward only"),
        Wrong("a sum", edited(_CROSSOVER, ("max(forward, backward)", "forward + backward")), "not their sum"),
        Wrong(
            "the step as a whole",
            edited(
                _CROSSOVER,
                (
                    "max(forward, backward)",
                    "(2 * param_bytes + reduce_bytes) * sent / bandwidth / (6 * parameters / flops)",
                ),
            ),
            "the step as a whole",
        ),
        Wrong("a backward like a forward", edited(_CROSSOVER, ("(4 * ", "(2 * ")), "twice as much as a forward"),
        Wrong("all of the block", edited(_CROSSOVER, ("* (ranks - 1) / ranks", "* 1")), "its own slice already"),
        Wrong("one slice", edited(_CROSSOVER, ("* (ranks - 1) / ranks", "/ ranks")), "sends ranks - 1 slices"),
        Wrong(
            "no second gather",
            edited(_CROSSOVER, ("(param_bytes + reduce_bytes) * sent", "reduce_bytes * sent")),
            "gathers the block again",
        ),
        Wrong("bits", edited(_CROSSOVER, ("return max", "return 8 * max")), "not bits"),
        Wrong("upside down", edited(_CROSSOVER, ("return max", "return 1 / max")), "upside down"),
        Wrong("a pair", edited(_CROSSOVER, ("max(forward, backward)", "forward, backward")), "one number"),
        Wrong("no flops", edited(_CROSSOVER, ("(2 * parameters / flops)", "(2 * parameters / flop)")),
              "its own imports", ends="raises"),
    ),
)  # fmt: skip

# --- questions


def _at(machines: Mapping[str, PlanSpec]) -> float:
    """The ratio that 10.read asks for."""
    return overlap_of(machines["8 x RTX 4090"]).ratio("backward", _READ_AT)


read = Question(
    id="10.read",
    statement=(
        f"From the figure: 8 RTX 4090, and a rank reads {_READ_AT:,} tokens. How many times as long as the compute of a"
        " block do its messages take?"
    ),
    unit="x",
    expected=_at,
    tolerance=0.15,
    slips=(
        Slip("that is compute over messages; the axis has messages over compute", value=lambda found: 1 / _at(found)),
        Slip(
            "that is the line of 8 x H100: look at the colours of the legend",
            value=lambda found: overlap_of(found["8 x H100"]).ratio("backward", _READ_AT),
        ),
        Slip("that is the tokens of its crossover; the ratio at 1,024 tokens is asked for",
             value=lambda found: _READ_AT * _at(found)),
    ),
    hints=(
        "Go up from 1,024 tokens to the line of that machine, and read the axis on the left.",
        "The line falls as 1 / tokens, and crosses 1 at its diamond. The legend says where that is.",
        "Tokens of its crossover (in the legend), divided by 1,024.",
    ),
    explanation="A line of slope -1: half the tokens, twice the ratio. So one point of it is enough.",
)  # fmt: skip

accumulate = Choice(
    id="10.accumulate",
    statement=(
        "full_shard on 8 H100 with a micro-batch of 512 tokens: messages show. A colleague accumulates gradients over 4"
        " micro-batches, so a step has 2,048 tokens a rank. What becomes of the messages of a micro-batch?"
    ),
    options={
        "a": "they hide now: 2,048 tokens are beyond the crossover",
        "b": "they show as before",
        "c": "three of four micro-batches send nothing, so a quarter of the exposed time is left",
    },
    right="b",
    because={
        "a": "the block is dropped after each micro-batch and gathered again: 512 tokens must hide each gather.",
        "b": "each micro-batch gathers every block twice. What counts are the tokens that are computed at once.",
        "c": "that is DDP, which may send gradients once a step. full_shard has no whole parameters to start from.",
    },
)

ITEMS = (crossover, read, accumulate)
