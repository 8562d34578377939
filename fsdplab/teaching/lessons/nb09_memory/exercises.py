"""Notebook 09: which units hold memory at an instant, what fills a peak, and a gathered copy to remove."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdplab.records import RunRecord
from fsdplab.teaching.core.exercise import Case, Choice, Exercise, Question, Slip, Trial, Wrong, edited
from fsdplab.teaching.core.verdicts import Difference

from . import on_ranks
from .reading_memory import MB, by_category, gathered, more_sequences, peak_row, total, unit_bytes

_RANKS = 2
_DRIVERS = str(Path(on_ranks.__file__))

# --- which units hold memory

_HOLDING_STUB = '''\
def holding(life, at):
    """The names of the units whose whole parameters take memory at instant `at`."""
    ...  # life: dicts with "unit", "state" and "time_ns", in order of time
'''

_HOLDING = '''\
def holding(life, at):
    """The names of the units whose whole parameters take memory at instant `at`."""
    state = {}
    for row in life:
        if row["time_ns"] <= at:
            state[row["unit"]] = row["state"]
    return [unit for unit, now in state.items() if now != "sharded"]
'''

Turns = list[tuple[int, str, str]]
_STEP: Turns = [
    (1, "root", "unsharding"), (3, "root", "unsharded"), (3, "blocks.0", "unsharding"), (6, "blocks.0", "unsharded"),
    (6, "blocks.1", "unsharding"),
    (9, "blocks.0", "sharded"), (10, "blocks.1", "unsharded"), (14, "blocks.1", "sharded"),
    (16, "blocks.1", "unsharding"), (19, "blocks.1", "unsharded"),
    (20, "blocks.0", "unsharding"), (24, "blocks.1", "sharded"), (25, "blocks.0", "unsharded"),
    (29, "blocks.0", "sharded"), (31, "root", "sharded"),
]  # fmt: skip
_INSTANTS = (
    ("one block whole, the next on its way", 8), ("before anything is gathered", 0), ("the root is on its way", 2),
    ("after the forward of the last block", 15), ("the instant of a reshard", 9), ("in the backward: both blocks", 22),
    ("the end of the step", 40),
)  # in this order a wrong solution first fails where its cause can be told  # fmt: skip


def _life() -> list[dict[str, Any]]:
    return [
        {"unit": unit, "state": state, "phase": "forward" if time < 16 else "backward", "time_ns": time}
        for time, unit, state in _STEP
    ]


def _expected(at: int) -> list[str]:
    state = {unit: now for time, unit, now in _STEP if time <= at}
    return sorted(unit for unit, now in state.items() if now != "sharded")


def _holding_cases() -> list[Case]:
    return [Case(f"{name}, at = {at}", ((_life(), at),) * _RANKS, (_expected(at),) * _RANKS) for name, at in _INSTANTS]


def _explain_holding(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    got, right, at = trial.returned, case.expected[0], case.arguments[0][1]
    where = f"at = {at}: expected {right}, got {got}"
    if not isinstance(got, list):
        return where, "return the names: a list, or a set, of texts"
    if len(set(got)) < len(got):
        return (
            where,
            "a unit is named twice: it was gathered twice so far, but it is one unit. Remember its newest state only",
        )
    state = {unit: now for time, unit, now in _STEP if time <= at}
    strictly = {unit: now for time, unit, now in _STEP if time < at}
    last = {unit: now for _, unit, now in _STEP}
    if got == sorted(unit for unit, now in state.items() if now == "unsharded"):
        return (
            where,
            "units on their way are missing: the memory that a gather fills is there from the moment it is issued",
        )
    if got == sorted(unit for unit, now in strictly.items() if now != "sharded"):
        return where, "a row at the very instant `at` counts already: compare with <="
    if got == sorted(state):
        return where, "a unit that was gathered may have been dropped again: only its newest state before `at` counts"
    if got == sorted(unit for unit, now in last.items() if now != "sharded"):
        return where, "`at` was not used: rows after the instant must not count"
    return (
        where,
        (
            "go through the rows up to `at`, and note for each unit the newest state; it holds memory unless that is"
            " sharded"
        ),
    )


holding = Exercise(
    id="09.holding",
    title="Which units are whole at an instant",
    statement="Write holding(life, at): the units whose whole parameters take memory at an instant.",
    stub=_HOLDING_STUB,
    reference=_HOLDING,
    hints=(
        "A unit's state at an instant is what its last row before that instant says.",
        (
            "Go through the rows in order, up to `at`, and keep the newest state of each unit in a dict. Two of the"
            " three states take memory."
        ),
        'state[row["unit"]] = row["state"] for rows with time_ns <= at; then all units whose state is not "sharded".',
    ),
    cases=_holding_cases,
    explain=_explain_holding,
    world_size=_RANKS,
    driver=(_DRIVERS, "drive_holding"),
    wrong=(
        Wrong(
            "only whole ones", edited(_HOLDING, ('now != "sharded"', 'now == "unsharded"')), "on their way are missing"
        ),
        Wrong("ever gathered", edited(_HOLDING, (' if now != "sharded"', "")), "may have been dropped again"),
        Wrong("before, not at", edited(_HOLDING, ("<= at", "< at")), "compare with <="),
        Wrong(
            "no instant",
            edited(_HOLDING, ('        if row["time_ns"] <= at:\n            state', "        state")),
            "was not used",
        ),
        Wrong(
            "a count",
            edited(_HOLDING, ("return [unit", "return len([unit"), ('"sharded"]', '"sharded"])')),
            "return the names",
        ),
        Wrong(
            "every gather",
            "def holding(life, at):\n    return [row['unit'] for row in life if row['time_ns'] <= at and row['state']"
            " == 'unsharding']\n",
            "newest state",
        ),
    ),
)

# --- one copy less

_SLIM_STUB = '''\
def slim():
    """Settings that keep one gathered copy fewer at the peak."""
    return {
        "strategy": "full_shard",  # "full_shard", "shard_grad_op", "zero2"
        "prefetch": 2,  # units gathered ahead: 0, 1, 2, ...
        "units": "block",  # what travels together: "block", "linear", "model"
    }
'''
_SLIM = edited(_SLIM_STUB, ('"prefetch": 2', '"prefetch": 1'))


def _slim_cases() -> list[Case]:
    right = {
        "choices": "",
        "bytes over the limit of the whole peak": 0,
        "gathered bytes too many": 0,
        "gathers set out ahead": True,
    }
    return [Case("two steps of gpt-20m", ((),) * _RANKS, (right,) * _RANKS)]


def _explain_slim(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    got, peak = trial.returned, (trial.printed.strip().splitlines() or [""])[-1]
    where = f"the peak on this rank: {peak}" if peak else None
    if got["choices"]:
        return None, got["choices"]
    over = got["gathered bytes too many"]
    if 0 < over <= 4 * on_ranks.BLOCK_BYTES:
        return (
            where,
            (
                f"{over / 1e6:.1f} MB of gathered parameters too many: which of the units at the peak is there only"
                " because it was gathered ahead?"
            ),
        )
    if over or got["bytes over the limit of the whole peak"]:
        kept = (
            "Where parameters stay whole (zero2), are kept from forward to backward (shard_grad_op), or travel as one"
            " unit"
        )
        return where, f"there is more at the peak than before. {kept}, every block is there at once"
    return (
        where,
        (
            "few copies, but no gather sets out before its unit is needed, so nothing hides it (07). Keep prefetching,"
            " and several units"
        ),
    )


def _set(**choices: str) -> str:
    start = _SLIM_STUB
    for name, value in choices.items():
        old = {"strategy": '"full_shard",', "prefetch": "2,", "units": '"block",'}[name]
        start = edited(start, (f'"{name}": {old}', f'"{name}": {value},'))
    return start


slim = Exercise(
    id="09.slim",
    title="One copy less",
    statement=(
        "Write slim(): settings with which the peak holds one gathered block less than with prefetch=2, without giving"
        " up prefetching."
    ),
    stub=_SLIM_STUB,
    reference=_SLIM,
    hints=(
        (
            "At the peak the block that computes must be there, and the root is. Every other one is there because of a"
            " setting."
        ),
        "`prefetch` says how many units are gathered ahead, and so how many copies are there beside the one in use.",
        (
            '"prefetch": 1, and the rest as it was. Or smaller units: with "units": "linear" two that are gathered'
            " ahead are less than a block."
        ),
    ),
    cases=_slim_cases,
    explain=_explain_slim,
    hung="the ranks make different calls: return the same settings on every rank",
    world_size=_RANKS,
    time_limit=90.0,
    driver=(_DRIVERS, "drive_slim"),
    wrong=(
        Wrong("deeper", _set(prefetch="3"), "only because it was gathered ahead"),
        Wrong("none ahead", _set(prefetch="0"), "sets out before its unit is needed"),
        Wrong("kept for the backward", _set(strategy='"shard_grad_op"', prefetch="1"), "every block is there at once"),
        Wrong("parameters whole", _set(strategy='"zero2"', prefetch="1"), "every block is there at once"),
        Wrong("one big unit", _set(units='"model"', prefetch="1"), "every block is there at once"),
        Wrong(
            "a smaller batch",
            edited(_SLIM, ('"units": "block",  #', '"batch_size": 1,  #')),
            "batch_size belongs to the job",
        ),
        Wrong("a word that is none", _set(units='"layer"'), "unknown units"),
        Wrong("a number", edited(_SLIM, ("return {", "return len({"), ("    }\n", "    })\n")), "expected a dict"),
    ),
)

# --- questions


def _whole_model(record: RunRecord) -> float:
    return sum(unit_bytes(record).values()) / MB


gathered_at_peak = Question(
    id="09.gathered",
    statement="How many MB of gathered parameters does the rank hold at its peak?",
    unit="MB",
    expected=gathered,
    tolerance=0.02,
    slips=(
        Slip(
            "those are the slices, which rest; gathered parameters are a category of their own",
            value=lambda record: by_category(record)["parameter_slices"] / MB,
        ),
        Slip(
            "that is the whole peak; the question is about one category",
            value=lambda record: total(peak_row(record)) / MB,
        ),
        Slip("that is the whole model in fp32; it is never there at once", value=_whole_model),
        Slip("that is one block; look how many are there", value=lambda record: max(unit_bytes(record).values()) / MB),
    ),
    hints=(
        "The table under the figure splits the peak by category.",
        "The row `gathered parameters`, the column MB.",
        "reading_memory.gathered(record) reads that cell.",
    ),
    explanation="Two blocks and the root.",
)

fills = Choice(
    id="09.fills",
    statement="Which category fills most of the peak with 2 sequences a rank, and which with 8?",
    options={
        "a": "activations both times",
        "b": "optimizer state with 2, activations with 8",
        "c": "gathered parameters with 2, optimizer state with 8",
        "d": "optimizer state both times",
    },
    right="b",
    because={
        "a": "with 2 sequences activations are small beside 8 bytes of moments for every second parameter.",
        "b": (
            "model states do not know the batch; activations grow with it. So the remedy depends on the batch: shard or"
            " offload for one, recompute for the other."
        ),
        "c": "gathered parameters are a block or two, whatever the batch: look at the bars.",
        "d": "activations grow in proportion to the batch, and moments not at all: look at the second bar.",
    },
)

crossover = Question(
    id="09.crossover",
    statement=(
        "From how many sequences a rank on would activations at the peak exceed the optimizer state, if they grow in"
        " proportion to the batch?"
    ),
    unit="",
    expected=more_sequences,
    tolerance=0.08,
    slips=(
        Slip("the optimizer state of the whole model was taken; a rank holds half of it", factor=2.0),
        Slip("that is the batch of the run", value=lambda record: float(record.spec["batch_size"])),
        Slip(
            "upside down: activations were divided by the optimizer state",
            value=lambda record: 1 / more_sequences(record),
        ),
    ),
    hints=(
        "How many MB of activations does one sequence bring? The second bar has 8.",
        "Optimizer state at the peak, divided by the activations of one sequence.",
        "In MB: optimizer_state / (activations / 8), both of the run with 8 sequences.",
    ),
    explanation="Below it sharding is what helps, above it recomputation (13).",
)

moved = Choice(
    id="09.moved",
    statement="With 8 sequences the peak is also at another instant. Why?",
    options={
        "a": "at the end of the forward all activations are there; each block's backward frees its own",
        "b": "larger batches need larger optimizer state",
        "c": "the gathers take longer, so more units are whole at once",
    },
    right="a",
    because={
        "a": (
            "gradient slices grow through the backward while activations shrink. With many activations the beginning of"
            " the backward is higher than its end."
        ),
        "b": "moments are two numbers a parameter, whatever the batch.",
        "c": "a gather moves weights; it does not depend on the batch.",
    },
)

ITEMS = (holding, slim, gathered_at_peak, fills, moved, crossover)
