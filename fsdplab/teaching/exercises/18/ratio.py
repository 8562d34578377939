"""How much more

Write ratio(parameter_bytes, reduce_bytes, ddp_bytes, root): bytes that full sharding sends in a step over those of DDP.
Elements are unsharded in `parameter_bytes` each and reduced in `reduce_bytes` each; DDP all-reduces `ddp_bytes` each.
`root` is the part of the parameters in the root unit, which is unsharded once.

1. What does an all-reduce consist of, and so how often does an element travel under DDP?
2. Under full sharding a block is unsharded for its forward and again for its backward, and reduced once.
3. All-gathers: (2 - root) x parameter_bytes. DDP: 2 x ddp_bytes. The (n - 1)/n of every ring is on both sides.
"""


def ratio(parameter_bytes, reduce_bytes, ddp_bytes, root=0.0):
    """Bytes of full sharding over those of DDP."""
    ### BEGIN SOLUTION  what is unsharded, what is reduced, what does DDP send?
    gathered = (2 - root) * parameter_bytes
    reduced = reduce_bytes
    return (gathered + reduced) / (2 * ddp_bytes)
    ### END SOLUTION


# ---- check: pure


def cases(rank, n):
    yield "one dtype", 4, 4, 4, 0.0
    yield "bf16 all-gathers beside DDP in fp32", 2, 4, 4, 0.0
    yield "bf16 all-gathers beside DDP in bf16", 2, 4, 2, 0.0
    yield "a root of a quarter", 2, 4, 2, 0.25


SAYS = {
    "otherwise": "is each of the four used, and as it is given? Unshards have `parameter_bytes`, the reduction"
    " `reduce_bytes`, DDP `ddp_bytes`, and `root` is a part between 0 and 1"
}
