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
    param_dtype: "fp32" or "bf16", of parameters and gradients. Adam's moments are fp32, and so is the master
    that it keeps of each bf16 parameter.
    """
    size = {"fp32": 4, "bf16": 2}[param_dtype]
    ### BEGIN SOLUTION
    master = 4 if param_dtype == "bf16" else 0
    #! master = 0
    #: beside bf16 parameters the optimizer keeps fp32 numbers: two moments and a master of each, 12 bytes
    #! master = 4
    #: an fp32 parameter is its own master: no second copy is kept
    divided = {"no_shard": 0, "zero1": 1, "zero2": 2, "full_shard": 3}[strategy]
    #! divided = {"no_shard": 0, "zero1": 2, "zero2": 2, "full_shard": 3}[strategy]
    #: zero1 divides the optimizer state only; parameters and gradients stay whole
    #! divided = {"no_shard": 0, "zero1": 3, "zero2": 2, "full_shard": 3}[strategy]
    #: as above
    #! divided = {"no_shard": 0, "zero1": 0, "zero2": 2, "full_shard": 3}[strategy]
    #: as above
    #! divided = {"no_shard": 0, "zero1": 1, "zero2": 1, "full_shard": 3}[strategy]
    #: zero2 divides the optimizer state and the gradients; parameters stay whole
    #! divided = {"no_shard": 0, "zero1": 1, "zero2": 3, "full_shard": 3}[strategy]
    #: as above
    #! divided = {"no_shard": 0, "zero1": 1, "zero2": 2, "full_shard": 2}[strategy]
    #: full_shard divides all three: optimizer state, gradients and parameters
    #! divided = {"no_shard": 3, "zero1": 1, "zero2": 2, "full_shard": 3}[strategy]
    #: no_shard divides nothing: every rank keeps all states whole
    #! divided = {"no_shard": 1, "zero1": 1, "zero2": 2, "full_shard": 3}[strategy]
    #: as above
    #! divided = {"no_shard": 0, "zero-1": 1, "zero2": 2, "full_shard": 3}[strategy]
    #: raises: there is no such key
    states = [master + 8, size, size]  # optimizer state, gradient, parameter: divided in this order
    #! states = [master + 4, size, size]
    #: Adam keeps two moments of every parameter, 8 bytes
    #! states = [2 * size, size, size]
    #: beside bf16 parameters the optimizer keeps fp32 numbers: two moments and a master of each, 12 bytes
    #! states = [0, size, size]
    #: the optimizer state is missing: Adam's two moments, 8 bytes a parameter
    #! states = [master + 8, 0, size]
    #: the gradients are missing
    #! states = [master + 8, size, 0]
    #: the parameters themselves are missing
    return parameters * sum(each / ranks if place < divided else each for place, each in enumerate(states))
    #! states[0] = 8
    #! rest = sum(each / ranks if place < divided else each for place, each in enumerate(states))
    #! return parameters * (master + rest)
    #: the master is part of the optimizer state, and is divided with it
    #! return 1e-9 * parameters * sum(each / ranks if place < divided else each for place, each in enumerate(states))
    #: this is in GB; bytes are asked for
    #! return 1e-6 * parameters * sum(each / ranks if place < divided else each for place, each in enumerate(states))
    #: this is in MB; bytes are asked for
    #! return ranks * parameters * sum(each / ranks if place < divided else each for place, each in enumerate(states))
    #: this is the sum over all ranks; one rank is asked for
    #! return sum(each / ranks if place < divided else each for place, each in enumerate(states))
    #: these are the bytes of one parameter: take them times their number
    #! return str(parameters * sum(each / ranks if place < divided else each for place, each in enumerate(states)))
    #: return one number: the bytes of all model states on one rank
    ### END SOLUTION


# ---- check: on 1 rank, within 1e-6, pure


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


def observe(model_state_bytes, strategy, *more):
    return {"the returned value": model_state_bytes(strategy, *more), "_divided": DIVIDED[strategy]}


SAYS = {
    "the returned value": lambda got, right: f"{right['_divided']}. Write down the bytes of each state, and then divide"
}
