"""Notebook 02: bytes of model states under each strategy, the batch that fits a card, and what grows with what."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.teaching.core.exercise import Case, Choice, Exercise, Question, Slip, Trial, Wrong, edited
from fsdplab.teaching.core.verdicts import Difference

_ONE = 1  # pure functions: one rank judges them
STRATEGIES = ("no_shard", "zero1", "zero2", "full_shard")  # by the number of states that they divide
_DIVIDED = {
    "no_shard": "no_shard divides nothing: every rank keeps all states whole",
    "zero1": "zero1 divides the optimizer state only; parameters and gradients stay whole",
    "zero2": "zero2 divides the optimizer state and the gradients; parameters stay whole",
    "full_shard": "full_shard divides all three: optimizer state, gradients and parameters",
}

# --- model states

_STATES_HEAD = '''\
def model_state_bytes(strategy, parameters, ranks, param_dtype):
    """Bytes of model states that one rank keeps, with Adam.

    strategy: "no_shard", "zero1", "zero2" or "full_shard".
    param_dtype: "fp32" or "bf16", of parameters and gradients. Adam's moments are fp32, and so is the master
    that it keeps of each bf16 parameter.
    """
    size = {"fp32": 4, "bf16": 2}[param_dtype]
'''
_STATES_STUB = _STATES_HEAD + "    ...\n"
_STATES = (
    _STATES_HEAD
    + """\
    master = 4 if param_dtype == "bf16" else 0
    divided = {"no_shard": 0, "zero1": 1, "zero2": 2, "full_shard": 3}[strategy]
    states = [master + 8, size, size]  # optimizer state, gradient, parameter: divided in this order
    return parameters * sum(each / ranks if place < divided else each for place, each in enumerate(states))
"""
)
_STATE_CASES = (
    ("zero1", 1_000_000, 4, "fp32"),  # first: here every slip has a number of its own
    ("no_shard", 8_000_000_000, 8, "fp32"),
    ("zero1", 8_000_000_000, 8, "bf16"),
    ("zero2", 7_500_000_000, 64, "bf16"),
    ("zero2", 1_000_000, 4, "fp32"),
    ("full_shard", 70_000_000_000, 128, "bf16"),
    ("full_shard", 21_626_112, 2, "fp32"),
    ("full_shard", 1_000_000, 1, "bf16"),
)


def reference_parts(strategy: str, parameters: float, ranks: int, param_dtype: str) -> dict[str, float]:
    """Bytes of each kind on one rank: `reference_parts("zero1", 100, 4, "fp32")["moments"] == 200`."""
    whole = {"parameters": 4.0, "gradients": 4.0, "moments": 8.0, "master": 0.0}
    if param_dtype == "bf16":
        whole |= {"parameters": 2.0, "gradients": 2.0, "master": 4.0}
    cut = STRATEGIES.index(strategy)
    share = {"master": cut > 0, "moments": cut > 0, "gradients": cut > 1, "parameters": cut > 2}
    return {name: parameters * nbytes / (ranks if share[name] else 1) for name, nbytes in whole.items()}


def _state_cases() -> list[Case]:
    return [
        Case(f"{name}, {count:,} parameters, {ranks} ranks, {dtype}", ((name, count, ranks, dtype),), (_total(*case),))
        for case in _STATE_CASES
        for name, count, ranks, dtype in [case]
    ]


def _total(*case: Any) -> float:
    return sum(reference_parts(*case).values())


def _explain_states(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    got, right = _number(trial.returned), case.expected[0]
    if got is None:
        return None, "return one number: the bytes of all model states on one rank"
    arguments = case.arguments[0]
    for wrong, words in _state_slips(*arguments):
        if math.isclose(got, wrong, rel_tol=1e-6) and not math.isclose(wrong, right, rel_tol=1e-6):
            return None, words
    return None, f"{_DIVIDED[arguments[0]]}. Write down the bytes of each state, and then divide"


def _number(value: Any) -> float | None:
    """A returned number as a float, or None for anything else."""
    if isinstance(value, (str, bool)) or not hasattr(value, "__float__"):
        return None
    return float(value)


def _state_slips(strategy: str, parameters: float, ranks: int, dtype: str) -> Iterator[tuple[float, str]]:
    """Known wrong numbers and their causes."""
    parts = reference_parts(strategy, parameters, ranks, dtype)
    whole = reference_parts("no_shard", parameters, 1, dtype)
    total = sum(parts.values())
    cut = ranks if STRATEGY_ROWS[strategy].cuts else 1
    in_fp32 = "beside bf16 parameters the optimizer keeps fp32 numbers: two moments and a master of each, 12 bytes"
    yield total - parts["master"], in_fp32
    yield total - parts["moments"] / 2 - parts["master"], in_fp32 if parts["master"] else "Adam keeps two moments"
    yield total - parts["moments"], "the optimizer state is missing: Adam's two moments, 8 bytes a parameter"
    yield total + 4 * parameters / cut, "an fp32 parameter is its own master: no second copy is kept"
    yield total - parts["master"] + whole["master"], "the master is part of the optimizer state, and is divided with it"
    yield total - parts["gradients"], "the gradients are missing"
    yield total - parts["parameters"], "the parameters themselves are missing"
    yield total / 1e9, "this is in GB; bytes are asked for"
    yield total * ranks, "this is the sum over all ranks; one rank is asked for"
    for other in STRATEGIES:
        yield _total(other, parameters, ranks, dtype), _DIVIDED[strategy]


model_state_bytes = Exercise(
    id="02.model_state_bytes",
    title="Bytes of model states",
    statement="Write model_state_bytes(strategy, parameters, ranks, param_dtype): what one rank keeps, in bytes.",
    stub=_STATES_STUB,
    reference=_STATES,
    hints=(
        "First one rank and no_shard: how many bytes does each parameter need, state by state?",
        (
            "fp32: 4 + 4 + 8. bf16: 2 + 2 + 8, and 4 of the master. Then ask of each state whether this strategy"
            " divides it by `ranks`; the master goes with the optimizer state."
        ),
        (
            "Optimizer state: 8 or 12 bytes, divided by all but no_shard. Gradient: `size` bytes, divided by zero2 and"
            " full_shard. Parameter: `size` bytes, divided by full_shard. Add them up, times `parameters`."
        ),
    ),
    cases=_state_cases,
    explain=_explain_states,
    world_size=_ONE,
    tolerance=1e-6,
    wrong=(
        Wrong("one moment", edited(_STATES, ("master + 8", "master + 4")), "two moments"),
        Wrong("no master", edited(_STATES, ("master = 4 if", "master = 0 if")), "a master of each"),
        Wrong("a master of fp32 too", edited(_STATES, ("else 0", "else 4")), "its own master"),
        Wrong("zero1 divides gradients", edited(_STATES, ('"zero1": 1', '"zero1": 2')), "the optimizer state only"),
        Wrong("zero2 like zero1", edited(_STATES, ('"zero2": 2', '"zero2": 1')), "parameters stay whole"),
        Wrong("full_shard like zero2", edited(_STATES, ('"full_shard": 3', '"full_shard": 2')), "divides all three"),
        Wrong("no_shard divides", edited(_STATES, ('"no_shard": 0', '"no_shard": 3')), "divides nothing"),
        Wrong(
            "a master that is never divided",
            edited(
                _STATES,
                ("[master + 8, size, size]", "[8, size, size]"),
                ("return parameters * sum(", "return parameters * master + parameters * sum("),
            ),
            "divided with it",
        ),
        Wrong("no gradients", edited(_STATES, ("[master + 8, size, size]", "[master + 8, 0, size]")), "gradients are"),
        Wrong("moments of bf16", edited(_STATES, ("master + 8", "2 * size")), "keeps fp32 numbers"),
        Wrong("GB", edited(_STATES, ("return parameters", "return 1e-9 * parameters")), "bytes are asked for"),
        Wrong("a text", edited(_STATES, ("return parameters", "return str(parameters"), ("states))", "states)))")),
              "one number"),
        Wrong("zero-1", edited(_STATES, ('"zero1": 1', '"zero-1": 1')), "read the last line", ends="raises"),
    ),
)  # fmt: skip

# --- the batch that fits

_BATCH_HEAD = '''\
def largest_batch(card, moments):
    """The most sequences with which every instant of a step fits a card of `card` MB; 0 where none fits.

    moments: pairs (MB that do not depend on the batch, MB a sequence), one for each instant of a step.
    """
'''
_BATCH_STUB = _BATCH_HEAD + "    ...\n"
_BATCH = (
    _BATCH_HEAD
    + """\
    batch = 0
    while all(fixed + (batch + 1) * each <= card for fixed, each in moments):
        batch += 1
    return batch
"""
)
_CARDS: dict[str, tuple[float, list[tuple[float, float]], int]] = {
    "one instant": (105, [(40, 10)], 6),
    "an instant that is filled to the last MB": (100, [(40, 10)], 6),
    "three instants": (300, [(130, 20), (200, 2), (148, 21)], 7),
    "an instant without activations": (300, [(130, 20), (250, 0)], 8),
    "states alone are over the card": (300, [(130, 20), (310, 0)], 0),
    "not even one sequence": (140, [(130, 20)], 0),
    "nothing fits": (100, [(130, 20), (90, 1)], 0),
    "the run of this notebook": (320.0, [(130.8, 19.3), (147.7, 19.7), (187.8, 0.4), (186.2, 2.4)], 8),
}


def _batch_cases() -> list[Case]:
    return [Case(name, ((card, list(moments)),), (right,)) for name, (card, moments, right) in _CARDS.items()]


def _explain_batch(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    got, right = _number(trial.returned), case.expected[0]
    if got is None:
        return None, "return one whole number: sequences"
    card, moments = case.arguments[0]
    slips = (each for each in _batch_slips(card, moments, right) if each[0] == got != right)
    found = next(slips, None)
    if found is not None:
        return None, found[1]
    if got > right:
        over = max(moments, key=lambda each: each[0] + got * each[1])
        held = over[0] + got * over[1]
        return None, f"with {got:g} sequences an instant needs {over[0]:g} + {got:g} x {over[1]:g} = {held:g} MB"
    return None, f"one sequence more still fits at every instant of {moments}"


def _down(value: float) -> float:
    """Rounded down to a whole number."""
    return float(value // 1)


def _batch_slips(card: float, moments: Sequence[tuple[float, float]], right: float) -> Iterator[tuple[float, str]]:
    growing = [(fixed, each) for fixed, each in moments if each]
    spaces = [(card - fixed) / each for fixed, each in growing]
    yield (
        _down(min(spaces)),
        (
            "a batch cannot be negative, and 0 is the answer wherever an instant is over the card with no sequence at"
            " all, also one without activations"
        ),
    )
    yield max(_down(each) for each in spaces), "all instants must fit: that with the least space decides"
    yield _down((card - moments[0][0]) / moments[0][1]), "all instants must fit, not only the first"
    together = sum(fixed for fixed, _ in moments), sum(each for _, each in moments)
    yield (
        max(0.0, _down((card - together[0]) / together[1])),
        ("the instants follow each other: they do not hold their bytes at the same time, so they are not added up"),
    )
    yield float(math.ceil(min(spaces))), "rounded up: the last sequence does not fit whole"
    yield float(round(min(spaces))), "rounded to the nearest: a part of a sequence does not fit, so round down"
    yield min(spaces), "a whole number of sequences is asked for: round down"
    yield _down(card / max(each for _, each in growing)), "MB that do not depend on the batch come first"
    yield right - 1.0, "an instant that needs exactly the card still fits"


_BY_DIVISION = """\
    return max(0, int(min((card - fixed) // each for fixed, each in moments if each)))
"""

largest_batch = Exercise(
    id="02.largest_batch",
    title="The batch that fits",
    statement="Write largest_batch(card, moments): the most sequences with which every instant of a step fits.",
    stub=_BATCH_STUB,
    reference=_BATCH,
    hints=(
        "With how many sequences is one single instant full?",
        "(card - fixed) / each, rounded down. Several instants: which of them decides? And if each is 0?",
        "Count up from 0 while `all(fixed + (batch + 1) * each <= card for fixed, each in moments)`.",
    ),
    cases=_batch_cases,
    explain=_explain_batch,
    world_size=_ONE,
    wrong=(
        Wrong("less than the card", edited(_BATCH, ("<= card", "< card")), "exactly the card still fits"),
        Wrong("one too many", edited(_BATCH, ("return batch", "return batch + 1")), "rounded up"),
        Wrong("not below zero", _BATCH_HEAD + _BY_DIVISION, "also one without activations"),
        Wrong(
            "negative",
            _BATCH_HEAD + edited(_BY_DIVISION, ("max(0, int(min(", "int(min("), ("if each)))", "if each))")),
            "cannot be negative",
        ),
        Wrong("the instant with most space", _BATCH_HEAD + edited(_BY_DIVISION, ("min(", "max(")), "least space"),
        Wrong(
            "a part of a sequence",
            _BATCH_HEAD + edited(_BY_DIVISION, ("int(", "("), (" // ", " / ")),
            "round down",
        ),
        Wrong("the first instant", edited(_BATCH, ("in moments)", "in moments[:1])")), "not only the first"),
        Wrong(
            "added up",
            edited(
                _BATCH,
                (
                    "all(fixed + (batch + 1) * each <= card for fixed, each in moments)",
                    "sum(fixed + (batch + 1) * each for fixed, each in moments) <= card",
                ),
            ),
            "not added up",
        ),
        Wrong("no fixed part", edited(_BATCH, ("fixed + (batch", "0 * fixed + (batch")), "come first"),
        Wrong(
            "an instant without activations",
            _BATCH_HEAD + "    return max(0, int(min((card - fixed) // each for fixed, each in moments)))\n",
            "read the last line",
            ends="raises",
        ),
    ),
)  # fmt: skip

# --- questions

equal = Question(
    id="02.equal",
    statement=(
        "From your counts: with how many rows in the batch do the activations of this model take as many bytes as its"
        " model states?"
    ),
    unit="",
    expected=lambda counted: counted["states"] / counted["a row"],
    tolerance=0.02,
    slips=(
        Slip("that is the number of parameters alone; model states are all three", factor=0.25),
        Slip("that counts the optimizer state alone", factor=0.5),
        Slip("that is how many batches of 64; rows are asked for", factor=1 / 64),
        Slip("that is model states over all activations the other way round", value=lambda c: c["a row"] / c["states"]),
    ),
    hints=(
        "Activations grow with the batch, model states do not.",
        "How many bytes of activations does one row have? `saved_bytes(64) / 64`.",
        "`sum(held.values()) / (saved_bytes(64) / 64)`.",
    ),
    explanation="Below it the model decides what fits, above it the batch does.",
)

cards = Question(
    id="02.cards",
    statement=(
        "70 billion parameters in bf16, Adam, full_shard. How many cards of 80 GB (80e9 bytes) are needed at least, for"
        " the model states alone?"
    ),
    unit="",
    expected=14.0,
    tolerance=0.001,
    slips=(
        Slip("that holds the bf16 parameters only: 140 GB", value=2.0),
        Slip("without the masters: 12 bytes a parameter; bf16 parameters have an fp32 master each", value=11.0),
        Slip("without the optimizer state: 4 bytes a parameter", value=4.0),
        Slip(
            "that counts 4 bytes for the parameter and 4 for its gradient beside the master; they are bf16", value=18.0
        ),
    ),
    hints=(
        "How many bytes a parameter, over all ranks together?",
        "16 bytes x 70e9 parameters, cut into slices of at most 80e9 bytes.",
        "1120 / 80.",
    ),
    explanation="And nothing is left on them for activations: a real job needs more (notebook 19).",
)

remedy = Choice(
    id="02.remedy",
    statement=(
        "A job under full_shard on 64 ranks is over its card by a few GB. In its stack, activations are by far the"
        " largest part. What helps most?"
    ),
    options={
        "a": "128 ranks with the same batch on each",
        "b": "an optimizer with one moment instead of two",
        "c": "half the sequences a rank, or to recompute activations in the backward",
    },
    right="c",
    because={
        "a": "more ranks make the slices of model states smaller. A rank still has all activations of its batch.",
        "b": "on 64 ranks the moments are 8/64 of a byte a parameter: not what fills this card.",
        "c": "activations are a rank's own: no strategy of this notebook divides them. They fall with the batch.",
    },
)

ITEMS: Sequence[Exercise | Question | Choice] = (model_state_bytes, equal, cards, remedy, largest_batch)
