"""Shards to their owners

Write to_owners(parts, owners): every rank sends its rows of each matrix to the matrix's owner; this rank's own matrices
come back whole, in their order.

1. What does a rank receive from each of the others? As many elements as of itself: its rows of the matrices that this
   rank owns.
2. `dist.all_to_all_single(received, sent, comes, goes)`: `goes[r]` elements of `sent` go to rank r, and `comes[r]` come
   from it, in rank order. What came is [n, elements]: line r has rank r's rows of *all* your matrices.
3. `received = mine.new_empty(n, len(mine))`, `dist.all_to_all_single(received.view(-1), torch.cat(send), [len(mine)] *
   n, [len(each) for each in send])`, then `received.split(sizes, dim=1)` with the elements of each of your parts, and
   each piece `.reshape(-1, columns)`.
"""

import torch
import torch.distributed as dist


def packed(parts, owners, owner):
    """This rank's parts of one owner's matrices, in their order, as one flat tensor."""
    its = [part.flatten() for part, of in zip(parts, owners) if of == owner]
    return torch.cat([parts[0].new_empty(0), *its])


def to_owners(parts, owners):
    """The matrices that this rank owns, whole; parts: its rows of each matrix, as many on all ranks."""
    n, rank = dist.get_world_size(), dist.get_rank()
    send = [packed(parts, owners, other) for other in range(n)]  # what goes to each rank
    ### BEGIN SOLUTION  one all_to_all_single; then each matrix from the rows of all ranks
    mine, own = send[rank], [part for part, of in zip(parts, owners) if of == rank]
    received = mine.new_empty(n, len(mine))
    dist.all_to_all_single(received.view(-1), torch.cat(send), [len(mine)] * n, [len(each) for each in send])
    pieces = received.split([part.numel() for part in own], dim=1)
    return [piece.reshape(-1, part.shape[1]) for piece, part in zip(pieces, own)]
    ### END SOLUTION


# ---- check: on 3 ranks, also on 2, in 30 s

SETS = {  # (rows of each rank, columns) of every matrix, and its owner
    "one matrix a rank": ([(2, 2), (1, 4), (3, 1)], [0, 1, 2], torch.float32),
    "rank 1 owns none": ([(1, 5), (2, 2), (1, 2), (3, 3)], [2, 0, 0, 2], torch.float32),
    "five matrices of doubles": ([(1, 2), (2, 3), (3, 2), (1, 3), (4, 1)], [1, 1, 0, 2, 1], torch.float64),
}


def cases(rank, n):
    for name, (shapes, owners, dtype) in SETS.items():
        elements = [torch.arange(n * rows * columns, dtype=dtype) for rows, columns in shapes]
        wholes = [1000 * (m + 1) + each.reshape(-1, shapes[m][1]) for m, each in enumerate(elements)]
        owners = [owner % n for owner in owners]
        yield name, [whole.chunk(n)[rank].clone() for whole in wholes], owners


def observe(to_owners, parts, owners):
    got = to_owners([part.clone() for part in parts], list(owners))
    if not isinstance(got, (list, tuple)):
        return {"matrices": got}
    own = [number for number, owner in enumerate(owners) if owner == dist.get_rank()]
    facts = {"matrices": len(got), "shapes": [tuple(getattr(each, "shape", ())) for each in got]}
    return facts | {f"matrix {number}": whole for number, whole in zip(own, got)}


SAYS = {
    "matrices": lambda got, right: f"return a list of the matrices that this rank owns, here {right['matrices']}",
    "shapes": "a whole matrix has n times the rows of this rank's part, and its columns",
    **{
        f"matrix {number}": "a whole matrix is rank 0's rows, then rank 1's, and so on: line r of what came has rank"
        " r's rows of all your matrices"
        for number in range(5)
    },
    "hung": "the ranks wait for each other: all must call the same collectives, also a rank that owns no matrix, and"
    " what one sends must be as long as what the other expects",
}
