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
    """Tokens of a rank from which on a block's messages take no longer than its compute, both ways.

    full_shard, one block unsharded ahead. A number has `param_bytes` in all-gathers and
    `reduce_bytes` in reductions; a second has `flops` operations and carries `bandwidth` bytes.
    """
    sent = parameters * (ranks - 1) / ranks  # numbers that a rank sends in one all-gather or reduction
    ### BEGIN SOLUTION
    forward = param_bytes * sent / bandwidth / (2 * parameters / flops)
    backward = (param_bytes + reduce_bytes) * sent / bandwidth / (4 * parameters / flops)
    return max(forward, backward)
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
