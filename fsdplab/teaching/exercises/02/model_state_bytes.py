"""Bytes of model states

Write model_state_bytes(strategy, parameters, ranks, param_dtype): what one rank keeps, in bytes.

1. First one rank and no_shard: how many bytes does each parameter need, state by state?
2. fp32: 4 + 4 + 8. bf16: 2 + 2 + 8, and 4 of the master. Then ask of each state whether this strategy divides it by
   `ranks`; the master goes with the optimizer state.
3. Optimizer state: 8 or 12 bytes, divided by all but no_shard. Gradient: `size` bytes, divided by zero2 and full_shard.
   Parameter: `size` bytes, divided by full_shard. Add them up, times `parameters`.
"""


def model_state_bytes(strategy, parameters, ranks, param_dtype):
    """Bytes of model states that one rank keeps, with Adam.

    strategy: "no_shard", "zero1", "zero2" or "full_shard".
    param_dtype: "fp32" or "bf16", of parameters and gradients. Adam's moments are fp32, and so is
    the master that it keeps of each bf16 parameter.
    """
    size = {"fp32": 4, "bf16": 2}[param_dtype]
    ### BEGIN SOLUTION
    master = 4 if param_dtype == "bf16" else 0
    divided = {"no_shard": 0, "zero1": 1, "zero2": 2, "full_shard": 3}[strategy]
    states = [master + 8, size, size]  # optimizer state, gradient, parameter: divided in this order
    return parameters * sum(each / ranks if place < divided else each for place, each in enumerate(states))
    ### END SOLUTION


# ---- check: on 1 rank, within 1e-6, pure

from itertools import product
from math import isclose


def cases(rank, n):
    for strategy, count, ranks, dtype in (
        ("zero1", 3_000_000, 4, "fp32"),  # first: here every slip has a number of its own
        ("no_shard", 8_000_000_000, 8, "fp32"),
        ("zero1", 8_000_000_000, 8, "bf16"),
        ("zero2", 7_500_000_000, 64, "bf16"),
        ("zero2", 1_000_000, 4, "fp32"),
        ("full_shard", 70_000_000_000, 128, "bf16"),
        ("full_shard", 21_626_112, 2, "fp32"),
        ("full_shard", 1_000_000, 1, "bf16"),
    ):
        yield f"{strategy}, {count:,} parameters, {ranks} ranks, {dtype}", strategy, count, ranks, dtype


DIVIDED = {
    "no_shard": "no_shard divides nothing: every rank keeps all states whole",
    "zero1": "zero1 divides the optimizer state only; parameters and gradients stay whole",
    "zero2": "zero2 divides the optimizer state and the gradients; parameters stay whole",
    "full_shard": "full_shard divides all three: optimizer state, gradients and parameters",
}


def observe(model_state_bytes, *given):
    return {"the returned value": model_state_bytes(*given), "_given": given}


def say(got, right):
    """The rule of the strategy, and how the states were counted where few changes lead to this number."""
    if not isinstance(got["the returned value"], (int, float)):
        return "return one number: the bytes of all model states on one rank"
    strategy, count, ranks, dtype = right["_given"]
    stage, size = list(DIVIDED).index(strategy), 4 if dtype == "fp32" else 2
    due = [(size, stage > 2), (size, stage > 1), (8, stage > 0), (8 - 2 * size, stage > 0)]
    sizes = (2, 4), (2, 4), (4, 8), (2, 4)
    ways = [[(0, cut), *product(each, (False, True))] for each, (_, cut) in zip(sizes, due)]
    found = {}
    for each in product(*ways):
        total = count * sum(nbytes / (ranks if cut else 1) for nbytes, cut in each)
        if isclose(total, got["the returned value"], rel_tol=1e-9):
            other = [now for now in zip(STATES, due, each) if now[1] != now[2]]
            cut = {"optimizer" if name[0] == "m" else name for name, was, now in other if was[1] != now[1]}
            cost = sum(was[0] != now[0] for _, was, now in other) + len(cut) / 2
            found.setdefault(cost, []).append(" and ".join(_as(*now) for now in other))
    if got["the returned value"] > 16 * count * (1 + 1e-6):
        return (
            f"{DIVIDED[strategy]}. This is more than all states of all parameters, 16 bytes each: divide by the ranks"
        )
    if not found or min(found) > 1.5:
        return f"{DIVIDED[strategy]}. Write down the bytes of each state, and then divide"
    return f"{DIVIDED[strategy]}. This number comes out where {', or where '.join(found[min(found)][:2])}"


STATES = "parameters", "gradients", "moments", "masters"


def _as(name, due, counted):
    nbytes, cut = counted
    if not due[0]:
        return "a master is counted, which fp32 parameters do not have"
    size = f"are {nbytes} bytes" if nbytes != due[0] else "are"
    where = "" if cut == due[1] else " divided" if cut else " kept whole"
    return f"the {name} {size}{where}" if nbytes else f"the {name} are not counted"


SAYS = {"the returned value": say}
