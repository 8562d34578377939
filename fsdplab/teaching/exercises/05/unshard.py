"""Unshard the whole

Write unshard(mine, whole): give `whole` its memory back and fill it from the shards of all ranks.

1. The ranks hold the rows in order, rank 0 the first ones. Which rows of the joined shards are padding?
2. All-gather into a tensor of n * c rows: `dist.all_gather(pieces, mine)` fills a list of n tensors, and
   `list(padded.chunk(n))` is such a list, of views. Then copy its first `len(whole)` rows into `whole`, in place.
3. `padded = mine.new_empty(n * len(mine), *mine.shape[1:])`, `dist.all_gather(list(padded.chunk(n)), mine)`, and at
   the end `whole.copy_(padded[: len(whole)])`.
"""

import torch
import torch.distributed as dist


def unshard(mine, whole):
    """Fill `whole` [rows, ...], which has a shape and no memory, from every rank's `mine` [c, ...]."""
    n = dist.get_world_size()
    ### BEGIN SOLUTION  all-gather n shards of c rows: n * c rows, which may be more than `whole` has
    padded = mine.new_empty(n * len(mine), *mine.shape[1:])
    dist.all_gather(list(padded.chunk(n)), mine)
    ### END SOLUTION
    whole.untyped_storage().resize_(whole.nbytes)  # memory again, with nothing useful in it
    ### BEGIN SOLUTION
    whole.copy_(padded[: len(whole)])
    ### END SOLUTION


# ---- check: on 3 ranks, also on 2, in 30 s


def cases(rank, n):
    for name, whole in (
        ("floats [7, 2]: 3, 3 and 1 rows", 1 + torch.arange(14.0).reshape(7, 2)),
        ("whole numbers [4]: 2, 2 and no rows", 10 + torch.arange(4)),
        ("doubles [6, 1]: 2 rows each", 0.5 + torch.arange(6.0, dtype=torch.float64).reshape(6, 1)),
    ):
        c = -(-len(whole) // n)
        padded = torch.cat([whole, whole.new_zeros(n * c - len(whole), *whole.shape[1:])])
        yield name, padded[rank * c : (rank + 1) * c].clone(), len(whole)


def observe(unshard, mine, rows):
    whole = mine.new_zeros(rows, *mine.shape[1:])
    kept, needed = whole[1:], whole.nbytes  # autograd keeps such views
    whole.untyped_storage().resize_(0)
    unshard(mine, whole)
    seen = {}
    for name, tensor in {"whole": whole, "what autograd kept": kept}.items():
        there = tensor.untyped_storage().nbytes() >= needed  # else nobody may read it
        seen |= {f"memory behind {name}": there, f"rows of {name}": tensor if there else None}
    return seen


SAYS = {
    "memory behind whole": "`whole` itself is still empty: fill the tensor that was handed in (`whole.copy_(...)`)",
    "rows of whole": "rows are missing or misplaced: join n shards of c rows in rank order, then take the first"
    " `len(whole)` rows, which leaves the padding out",
    "memory behind what autograd kept": "`whole` looks at new memory now, while what autograd kept looks at the old,"
    " empty storage: resize that storage and copy into it",
    "rows of what autograd kept": "`whole` looks at new memory now: copy into the storage that was there",
    "hung": "some rank does not take part: every rank calls all_gather, also one whose shard is all padding",
}
