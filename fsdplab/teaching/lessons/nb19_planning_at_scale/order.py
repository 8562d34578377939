"""The job of lesson 19, and the judgement of an order for it: what fits, ends in time and stays within the budget.

The planner is the judge, so every order that it finds good passes, whoever thought of it. Imported by the ranks that
check an exercise, so torch and numpy are enough.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

from fsdplab.common.names import STRATEGIES
from fsdplab.common.sizes import size
from fsdplab.planning import HardwareError, PlanError
from fsdplab.planning.memory import FRAMEWORK_BYTES
from fsdplab.planning.planner import Plan, plan

MODEL, SEQUENCE = "llama-3.1-70b", 4096
TOKENS, DAYS, BUDGET = 100e9, 21, 102_000
STEP_TOKENS = 4_000_000
PRICES = {"h100": 3.0, "a100": 1.25}  # dollars an hour and GPU: this notebook's, nobody's offer
CHOICES = {
    "gpu": tuple(PRICES),
    "gpus": int,
    "strategy": STRATEGIES,
    "micro_batch": int,
    "checkpointing": ("none", "selective", "full"),
}
Changes = dict[str, dict[str, Any]]  # what to say of each change of an order, where it helps
_ROOM: Changes = {
    "full_shard, which keeps no state whole": {"strategy": "full_shard"},
    "one sequence at a time": {"micro_batch": 1},
    "selective checkpointing": {"checkpointing": "selective"},
    "full checkpointing": {"checkpointing": "full"},
    "more GPUs": {"gpus": 512},
}
_LESS_WORK: Changes = {
    "selective checkpointing": {"checkpointing": "selective"},
    "more sequences at a time": {"micro_batch": 4},
}
GOOD = "fits the cards, ends in time, within the budget"


def ordered(gpu: str, **choices: Any) -> Plan:
    """Return the plan of the job on such cards. Raises PlanError or HardwareError, one line."""
    settings = {}
    for name, value in choices.items():
        settings[name] = value if isinstance(value, str) else int(value)  # numpy's numbers are numbers
    return plan(MODEL, gpu, seq=SEQUENCE, **settings)


def reserved(planned: Plan) -> float:
    """Return the bytes that a rank is likely to take from its card.

    PyTorch's allocator keeps freed blocks, and reserves about a fifth more than is in use.
    """
    return planned.memory.reserved_bytes + FRAMEWORK_BYTES


def roomy(planned: Plan) -> bool:
    """Return whether what is reserved fits the card too."""
    return reserved(planned) <= planned.spec.gpu.memory_bytes


def days(planned: Plan, tokens: float = TOKENS) -> float:
    """Return the days that the job takes."""
    hours = planned.hours(tokens)
    assert hours is not None, "the cards of this lesson have known FLOP/s"
    return hours / 24


def dollars(planned: Plan, gpu: str, tokens: float = TOKENS) -> float:
    """Return the bill in dollars: 24 hours x days x GPUs x price."""
    return 24 * days(planned, tokens) * planned.spec.gpus * PRICES[gpu]


def verdict(order: Any) -> str:
    """Return `GOOD`, or in one line what is wrong with an order and by how much."""
    refused = _complaint(order)
    if refused:
        return refused
    try:
        planned = ordered(**order)
    except (PlanError, HardwareError) as error:
        return str(error)
    return _judged(planned, order)


def _complaint(order: Any) -> str:
    """Return why this is no order, or nothing."""
    if not isinstance(order, dict):
        return f"expected a dict, got {type(order).__name__}"
    missing = [name for name in CHOICES if name not in order]
    unknown = [str(name) for name in order if name not in CHOICES]
    if missing or unknown:
        names = ", ".join([*missing, *unknown])
        return f"missing or unknown choices: {names}; expected {', '.join(CHOICES)}"
    for name, known in CHOICES.items():
        value = order[name]
        if isinstance(known, tuple) and value not in known:
            return f"{name} is {value!r}; expected one of {', '.join(known)}"
        if known is int and not _is_whole(value):
            return f"{name} is {value!r}; expected a whole number above 0"
    return ""


def _is_whole(value: Any) -> bool:
    """Return whether a number is whole and above 0, numpy's numbers among them."""
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        return False
    number = float(value)
    return number == number // 1 > 0


def _judged(planned: Plan, order: dict[str, Any]) -> str:
    """Return the first of the job's four conditions that a plan does not meet, and what to change.

    The conditions are, in this order, the memory of a card, the tokens of a step, the days, and the budget. `GOOD`
    where all are met.
    """
    spec, peak = planned.spec, planned.memory.peak
    card = size(spec.gpu.memory_bytes)
    if not planned.fits:
        largest = max(peak.by_category, key=lambda category: peak.by_category[category])
        part = f"and the largest part of it is {largest.replace('_', ' ')}, {size(peak.by_category[largest])}"
        others = _remedy(order, _ROOM, _fits)
        return f"it does not fit: {size(peak.total)} on a card of {card}, {part}. It does with {others}"
    if not roomy(planned):
        others = _remedy(order, _ROOM, _fits)
        return (
            f"{size(peak.total)} in use would fit, but the allocator is likely to reserve {size(reserved(planned))} of"
            f" {card}: it fits with {others}"
        )
    if spec.step_tokens > STEP_TOKENS:
        return (
            f"a step reads {spec.gpus} x {spec.micro_batch} x {SEQUENCE:,} = {spec.step_tokens:,} tokens, the job"
            f" allows {STEP_TOKENS:,}: fewer GPUs, or a smaller micro-batch"
        )
    # first whether it is in time, then what it costs: fewer days often cost more
    takes = days(planned)
    if takes > DAYS:
        changes: Changes = {"more GPUs": {"gpus": 192}, **_LESS_WORK}
        others = _remedy(order, changes, _good)
        return f"it takes {takes:.1f} days, and {DAYS} are left: it is in time, and in the budget, with {others}"
    bill = dollars(planned, order["gpu"])
    if bill > BUDGET:
        changes = {**_LESS_WORK, "fewer GPUs": {"gpus": 160}}
        others = _remedy(order, changes, _good)
        return (
            f"it costs ${bill:,.0f}, and the budget is ${BUDGET:,}: {_dear(planned)}. It is in the budget with {others}"
        )
    return GOOD


def _fits(order: dict[str, Any]) -> bool:
    """Return whether an order has room on its cards."""
    return roomy(ordered(**order))


def _good(order: dict[str, Any]) -> bool:
    """Return whether an order meets all four of the job's conditions."""
    planned = ordered(**order)
    if not roomy(planned) or planned.spec.step_tokens > STEP_TOKENS:
        return False
    return days(planned) <= DAYS and dollars(planned, order["gpu"]) <= BUDGET


def _remedy(order: dict[str, Any], changes: Changes, helps: Callable[[dict[str, Any]], bool]) -> str:
    """Return the fewest changes after which an order is one that `helps`: `full checkpointing, or more GPUs`."""
    # one change if one is enough, else each pair, and so on
    for count in range(1, len(changes) + 1):
        helpful = []
        for words in combinations(changes, count):
            changed = dict(order)
            for word in words:
                changed |= changes[word]
            if helps(changed):
                # all sets of as few changes are told, as alternatives
                helpful.append(", and ".join(words))
        if helpful:
            return ", or ".join(helpful)
    return "other choices"


def _dear(planned: Plan) -> str:
    """Return what to look at in a plan that costs too much."""
    if planned.spec.checkpointing == "full":
        return "full checkpointing computes every forward twice, and all of it is paid for"
    share = 0.0
    # where the card's FLOP/s are known
    if planned.time:
        share = planned.time.exposed_s / planned.time.step_s
    return (
        f"fewer GPUs cost less. {share:.0%} of each step is exposed communication, and what is hidden takes processors"
        " and memory from the compute beside it"
    )
