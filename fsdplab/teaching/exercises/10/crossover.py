"""The crossover batch

Write crossover(parameters, ranks, flops, bandwidth, param_bytes, reduce_bytes): the tokens of a rank from which on all
messages of a block hide.

1. With how many tokens does the compute of a forward take as long as one all-gather? And a backward: what is sent?
2. Forward: param_bytes * sent / bandwidth seconds of messages, 2 * parameters / flops seconds of compute a token.
   Backward: an all-gather and a reduction, and 4 * parameters / flops.
3. max(param_bytes * sent / bandwidth / (2 * parameters / flops), (param_bytes + reduce_bytes) * sent / bandwidth / (4 *
   parameters / flops)).
"""


def crossover(parameters, ranks, flops, bandwidth, param_bytes, reduce_bytes):
    """Tokens of a rank from which on the messages of a block take no longer than its compute, in both phases.

    full_shard, one block unsharded ahead. A number has `param_bytes` in all-gathers and `reduce_bytes` in
    reductions; a second has `flops` operations and carries `bandwidth` bytes.
    """
    sent = parameters * (ranks - 1) / ranks  # numbers that a rank sends in one all-gather or reduction
    #! sent = parameters
    #: a rank sends (ranks - 1)/ranks of the block; it has its own shard already
    #! sent = parameters / ranks
    #: a rank's shard is 1/ranks of the block, but around the ring it sends ranks - 1 shards
    ### BEGIN SOLUTION
    forward = param_bytes * sent / bandwidth / (2 * parameters / flops)
    #! forward = param_bytes * sent / bandwidth / (2 * parameters / flop)
    #: raises: did you mean `flops`
    #! return param_bytes * sent / bandwidth / (parameters / flops)
    #: this hides the forward only, and a forward computes 2 operations a parameter and token: a multiplication and an
    #: addition
    backward = (param_bytes + reduce_bytes) * sent / bandwidth / (4 * parameters / flops)
    #! backward = (param_bytes + reduce_bytes) * sent / bandwidth / (2 * parameters / flops)
    #: a backward computes twice as much as a forward: 4 operations a parameter and token
    #! backward = (param_bytes + reduce_bytes) * sent / bandwidth / (6 * parameters / flops)
    #: a backward has 4 operations a parameter and token, twice as many as a forward: 6 are both together
    #! backward = reduce_bytes * sent / bandwidth / (4 * parameters / flops)
    #: the backward unshards the block again before it can compute: those bytes come on top of the reduction's
    #! backward = (param_bytes + 2 * reduce_bytes) * sent / bandwidth / (4 * parameters / flops)
    #: a reduce-scatter sends every number once, as an all-gather does; twice as much is an all-reduce
    return max(forward, backward)
    #! return forward
    #: this hides the forward only. A backward computes twice as much, but it unshards the block again and reduces its
    #: gradient, in numbers of `reduce_bytes`: does that fit as well?
    #! return min(forward, backward)
    #: this is the sooner of the two phases: the later one counts, so that both hide
    #! return backward
    #: this hides the backward only: the later of the two phases counts, and here that is the forward
    #! return (2 * param_bytes + reduce_bytes) * sent / bandwidth / (6 * parameters / flops)
    #: this is the step as a whole: compute that one phase has to spare does not hide the messages of the other
    #! return (param_bytes + reduce_bytes) * sent / bandwidth / (6 * parameters / flops)
    #: this is the step as a whole, with one all-gather only: look at each phase alone; the backward unshards again
    #! return forward + backward
    #: the phases come one after the other: take the later crossover, not their sum
    #! return 2 * max(forward, backward)
    #: a multiplication and an addition: 2 operations a parameter and token in the forward
    #! return 8 * max(forward, backward)
    #: bytes, not bits: bandwidth is in bytes a second
    #! return max(forward, backward) * (bandwidth / flops) ** 2
    #: interchanged: bytes over `bandwidth` are the seconds of a message, operations over `flops` those of compute
    #! return max(forward, backward) * (parameters / flops) ** 2
    #: Python reads `a / 2 * b / c` from left to right: put what is divided by, `(2 * b / c)`, in brackets
    #! return max(forward, backward) / flops**2
    #: as above
    #! return ranks * max(forward, backward)
    #: these are the tokens of all ranks together: a rank's own compute hides its own messages
    #! return max(1 / forward, 1 / backward)
    #: upside down: messages over compute
    #! return forward, backward
    #: return one number: tokens
    ### END SOLUTION


# ---- check: within 2e-3, pure


def cases(rank, n):
    yield "a block of Llama 3.1 8B on 8 H100", 218_103_808, 8, 733e12, 380e9, 2, 4
    yield "a block four times as large, in fp32 on 4", 872_415_232, 4, 733e12, 380e9, 4, 4
    yield "reductions in bf16, on 16", 218_103_808, 16, 733e12, 380e9, 2, 2
    yield "all-gathers in fp32, reductions in bf16", 218_103_808, 8, 733e12, 380e9, 4, 2
    yield "all-gathers in fp8, reductions in fp32", 218_103_808, 8, 733e12, 380e9, 1, 4
    yield "two cards on a slow bus", 218_103_808, 2, 100e12, 26e9, 2, 4
    yield "64 ranks, in fp8", 855_638_016, 64, 400e12, 100e9, 1, 1


def said(got, right):
    if not isinstance(got.get("the returned value"), (int, float)):
        return "return one number: tokens"
    return (
        "for each phase, with `param_bytes` and `reduce_bytes` as they are given: seconds of its messages, over seconds"
        " that one token computes. Then the later of both"
    )


SAYS = {"the returned value": said}
