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
    #! gathered = parameter_bytes
    #: one all-gather an element: blocks are unsharded again for the backward
    #! gathered = 2 * parameter_bytes
    #: the root is unsharded twice here; it stays unsharded between forward and backward
    #! gathered = 3 * parameter_bytes
    #: three all-gathers; the third collective of a block is the reduction, in its own dtype
    #! gathered = 2 * (1 - root) * parameter_bytes
    #: the root is unsharded too: once, for the whole step
    #! gathered = (1 + root) * parameter_bytes
    #: it is the root that is unsharded once, not the blocks
    #! gathered = (2 - root) * reduce_bytes
    #: parameters are unsharded in `parameter_bytes`
    reduced = reduce_bytes
    #! reduced = 2 * reduce_bytes
    #: a reduce_scatter is half of an all-reduce: gradients are reduced once
    #! reduced = 0
    #: gradients are reduced too: one reduce_scatter
    #! reduced = parameter_bytes
    #: gradients are reduced in `reduce_bytes`
    #! reduced = (1 - root) * reduce_bytes
    #: the root's gradients are reduced like all others
    #! gathered, reduced = (2 - root) * reduce_bytes, parameter_bytes
    #: the other way round: unshards have `parameter_bytes`, the reduction `reduce_bytes`
    return (gathered + reduced) / (2 * ddp_bytes)
    #! return (gathered + reduced) / ddp_bytes
    #: DDP's all-reduce is a reduce-scatter and an all-gather: an element travels twice
    #! return (2 * ddp_bytes) / (gathered + reduced)
    #: the other way round: full sharding over DDP
    #! return (gathered + reduced) / (2 * parameter_bytes)
    #: DDP reduces in its own dtype, `ddp_bytes`
    #! return gathered + reduced
    #: these are the bytes of full sharding; divide them by DDP's
    #! return gathered + reduced / (2 * ddp_bytes)
    #: brackets: the reduction alone is divided by DDP's bytes, not the sum
    #! return (gathered + reduced) / 2 * ddp_bytes
    #: brackets: this divides by 2 and multiplies by `ddp_bytes`
    #! return (gathered + reduced) / (2 * ddp_bytes) - 1
    #: that is how much more is sent; how many times as many is asked for
    #! return gathered + reduced - 2 * ddp_bytes
    #: a difference; how many times as many is asked for
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
