"""Reduce and scatter the gradient

Write reduce(gradient): this rank's rows of the mean over all ranks.

1. It is the mirror of unshard: there n shards become a whole, here n wholes become a shard, and they are added on the
   way.
2. Zero rows up to n * c first. `dist.reduce_scatter(mine, pieces)` adds up piece r of all ranks and leaves the sum with
   rank r; then divide.
3. `padded = gradient.new_zeros(n * c, *gradient.shape[1:])`, copy the gradient into its first rows, `mine =
   gradient.new_empty(c, *gradient.shape[1:])`, `dist.reduce_scatter(mine, list(padded.chunk(n)))`, and return
   `mine / n`.
"""

import torch
import torch.distributed as dist


def reduce(gradient):
    """This rank's rows, padded as in `shard`, of the ranks' mean `gradient` [rows, ...]: [c, ...]."""
    n = dist.get_world_size()
    c = -(-len(gradient) // n)
    ### BEGIN SOLUTION  pad to n * c rows, reduce-scatter, and make the sum a mean
    padded = gradient.new_zeros(n * c, *gradient.shape[1:])
    #! padded = 99 + gradient.new_zeros(n * c, *gradient.shape[1:])
    #: what does the padding hold? It must be zeros, for they are added up too
    padded[: len(gradient)] = gradient
    #! padded[n * c - len(gradient) :] = gradient
    #: does the padding stand after the rows?
    #! padded = gradient
    #: raises: all blocks of a collective have one shape: pad the short ones, and leave the padding out afterwards
    mine = gradient.new_empty(c, *gradient.shape[1:])
    dist.reduce_scatter(mine, list(padded.chunk(n)))
    #! dist.reduce_scatter(mine, list(padded.chunk(n))[::-1])
    #: this is the shard of another rank: rank r gets piece r
    #! mine = padded.chunk(n)[dist.get_rank()] * n
    #: this is a shard of the rank's own gradient: nothing came from the other ranks
    #! mine = padded.chunk(n)[dist.get_rank()]
    #: as above
    #! dist.reduce_scatter(mine, list(padded.chunk(n)), op=dist.ReduceOp.MAX)
    #: this is the largest of the ranks' values, not their sum: leave `op` out
    #! mine = sum(padded.chunk(n))
    #: no collective was called, so nothing came from the other ranks: a reduce_scatter adds up over ranks
    #! dist.all_reduce(padded)
    #! mine = padded.chunk(n)[dist.get_rank()]
    #: all_reduce brings every rank the unsharded gradient, at twice the bytes, and most is thrown away: use
    #: reduce_scatter
    #! dist.all_reduce(padded)
    #! mine = padded[:c]
    #: these are rank 0's rows on every rank: rank r keeps piece r
    #! dist.reduce(padded, dst=0)
    #! mine = padded.chunk(n)[dist.get_rank()]
    #: `dist.reduce` leaves its result on one rank only (`dst`); here every rank needs its rows: reduce_scatter
    #! every = [torch.empty_like(padded) for _ in range(n)]
    #! dist.all_gather(every, padded)
    #! mine = sum(every).chunk(n)[dist.get_rank()]
    #: all_gather brings every rank the unsharded gradient, at n times the memory: use reduce_scatter
    return mine / n
    #! return mine
    #: this is the sum over the ranks; data parallel training averages: divide by the number of ranks
    #! return mine // n
    #: a mean has fractions: `//` rounds it down, `/` does not
    #! return mine / c
    #: the sum must be divided by the number of ranks, not of rows
    #! return mine / len(gradient)
    #: as above
    #! return mine / n / n
    #: the sum was divided twice: once is enough, and ReduceOp.AVG divides already
    #! dist.reduce_scatter(mine, list(padded.chunk(n)), op=dist.ReduceOp.MAX)
    #! return mine
    #: this is the largest of the ranks' values, not their mean
    #! dist.all_reduce(gradient)
    #! return gradient / n
    #: this rank gets its own c = ceil(rows / n) rows, as `shard` cuts them
    #! return (mine / n).float()
    #: a buffer was made with torch's default dtype: make it like the input
    #! mine / n
    #: raises: the function returns nothing
    ### END SOLUTION


# ---- check: on 3 ranks, also on 2, within 1e-6, in 30 s


def cases(rank, n):
    for name, shape, dtype in (
        ("floats [7, 2]: 3, 3 and 1 rows", (7, 2), torch.float32),
        ("floats [4]: 2, 2 and no rows", (4,), torch.float32),
        ("doubles [6, 1]: 2 rows each", (6, 1), torch.float64),
    ):  # multiples of n / 2, so that the mean is exact in whatever order it is taken, and has halves
        whole = 1.5 + torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)
        yield name, n * whole * (1 + 10 * rank)


def observe(reduce, gradient):
    mine, c = reduce(gradient.clone()), -(-len(gradient) // dist.get_world_size())
    own = len(gradient[dist.get_rank() * c : (dist.get_rank() + 1) * c])
    return {"shape": mine.shape, "rows": mine[:own], "padding": mine[own:]}


SAYS = {
    "shape": "this rank gets its own c = ceil(rows / n) rows, as `shard` cuts them",
    "padding": "what does the padding hold? Begin with zeros, `new_zeros`, and write the gradient into the first rows",
    "otherwise": "these are other rows, or another mean: rank r gets rows r * c to (r + 1) * c, as `shard` cuts them,"
    " of the sum over all ranks, divided by n",
    "hung": "some rank does not take part: every rank calls reduce_scatter, also one that gets only padding",
}
