"""Keep one shard

Write shard(whole, rank, n): the rows that torch.chunk would give to `rank`, padded with zero rows to c = ceil(rows /
n).

1. All shards are equally long, or the ranks could not exchange them in one call. So what does the last rank do, which
   has fewer rows?
2. Make c zero rows like `whole` (`whole.new_zeros(c, *whole.shape[1:])`) and write this rank's rows into the first of
   them. A slice that goes past the end is just shorter, or empty.
3. `rows = whole[rank * c : (rank + 1) * c]`, then `mine[: len(rows)] = rows`, and return `mine`.
"""

import torch


def shard(whole, rank, n):
    """`rank`'s rows of `whole` [rows, ...], zero rows up to c = ceil(rows / n): [c, ...], a copy."""
    c = -(-len(whole) // n)  # rounds up
    ### BEGIN SOLUTION
    mine = whole.new_zeros(c, *whole.shape[1:])
    rows = whole[rank * c : (rank + 1) * c]
    mine[: len(rows)] = rows
    return mine
    ### END SOLUTION


# ---- check: on 3 ranks, also on 2, pure


def cases(rank, n):
    yield "floats [7, 2]: 3, 3 and 1 rows", 1 + torch.arange(14.0).reshape(7, 2), rank, n
    yield "whole numbers [4]: 2, 2 and no rows", 10 + torch.arange(4), rank, n
    yield "doubles [6, 1]: 2 rows each", 0.5 + torch.arange(6.0, dtype=torch.float64).reshape(6, 1), rank, n


def observe(shard, whole, rank, n):
    mine, c = shard(whole.clone(), rank, n), -(-len(whole) // n)
    own = len(whole[rank * c : (rank + 1) * c])
    return {
        "shape of a row": mine.shape[1:],
        "rows in all": len(mine),
        "own rows": mine[:own],
        "padding": mine[own:],
        "bytes behind it": mine.untyped_storage().nbytes(),
    }


SAYS = {
    "shape of a row": "only dimension 0 is cut; the others stay as they are",
    "rows in all": "a shard has c = ceil(rows / n) rows: short ones are padded with zero rows",
    "own rows": "these are not the rows r * c to (r + 1) * c: the first ranks have c rows each, the last ones what is"
    " left",
    "padding": "this rank's rows are right, but those that pad them are not zeros: start from `new_zeros`, and write"
    " only as many rows as there are",
    "bytes behind it": "this is a view: the whole tensor stays in memory behind it; copy the rows",
}
