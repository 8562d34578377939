"""Balanced owners

Write owners(shapes, ranks): the owner of each matrix, so that the rank that computes most has little more than the
others. Every rank must come to the same list.

1. What makes a rank late: how many matrices it owns, how many elements they have, or their `flops`?
2. A large matrix that is given away last makes one rank late; a small one hardly does. So in which order? And who gets
   the next one?
3. `for number in sorted(range(len(shapes)), key=lambda number: -flops(shapes[number]))`: the rank with the least load,
   `min(range(ranks), key=lambda rank: load[rank])`, gets it, and its load grows by `flops(shapes[number])`.
"""

from fsdplab.engine.core.owners import newton_schulz_flops as flops


def owners(shapes, ranks):
    """The rank that owns each matrix; shapes: (rows, columns) of each."""
    owner, load = [0] * len(shapes), [0.0] * ranks
    ### BEGIN SOLUTION  who gets which matrix? flops((rows, columns)) is what one costs
    for number in sorted(range(len(shapes)), key=lambda number: -flops(shapes[number])):
        owner[number] = min(range(ranks), key=lambda rank: load[rank])
        load[owner[number]] += flops(shapes[number])
    return owner
    ### END SOLUTION


# ---- check: pure

BLOCK = [(384, 384)] * 4 + [(1536, 384), (384, 1536)]


def cases(rank, n):
    yield "six blocks of a GPT on 4 ranks", BLOCK * 6, 4
    yield "one block on 3 ranks", BLOCK, 3
    yield "wide and square ones on 2 ranks", [(64, 4096), (256, 256), (64, 2048), (256, 1024), (512, 512)], 2
    yield "small ones first, on 3 ranks", [(64, 64)] * 5 + [(128, 256)] * 3 + [(256, 512)] * 2, 3
    yield "more ranks than matrices", [(8, 8), (32, 16)], 4


def observe(owners, shapes, ranks):
    got = owners(list(shapes), ranks)
    if (refused := complaint(got, shapes, ranks)) is not None:
        return {"owners": refused}
    most = busiest([int(each) for each in got], shapes, ranks)
    allowed = 1.05 * busiest(largest_first(shapes, ranks), shapes, ranks)
    again = list(owners(list(shapes), ranks)) == list(got)
    found = {"owners": "one a matrix", "two calls agree": again, "MFLOP of the busiest rank": max(most, allowed)}
    return found | {"_elements": elements_balanced([int(each) for each in got], shapes, ranks)}


def complaint(got, shapes, ranks):
    """What is returned where it is no list of an owner a matrix, else None."""
    if not isinstance(got, (list, tuple)) or len(got) != len(shapes):
        return got
    whole = all(hasattr(each, "__index__") and 0 <= int(each) < ranks for each in got)
    return None if whole else got


def elements_balanced(owner, shapes, ranks):
    """Whether the rank with the most elements has at most a tenth more than the mean."""
    load = [sum(rows * columns for (rows, columns), of in zip(shapes, owner) if of == rank) for rank in range(ranks)]
    return max(load) <= 1.1 * sum(load) / ranks


def busiest(owner, shapes, ranks):
    """MFLOP of the rank that computes most."""
    return max(sum(flops(s) for s, of in zip(shapes, owner) if of == rank) for rank in range(ranks)) / 1e6


def largest_first(shapes, ranks):
    """The owners that are good enough: the largest first, each to the rank that has least to do."""
    owner, load = [0] * len(shapes), [0.0] * ranks
    for number in sorted(range(len(shapes)), key=lambda number: -flops(shapes[number])):
        owner[number] = load.index(min(load))
        load[owner[number]] += flops(shapes[number])
    return owner


ELEMENTS = (
    "this balances elements, that is bytes; what takes time are FLOPs, and they grow with the square of the short side"
)
SAYS = {
    "owners": lambda got, right: (
        "return a list with the owner of each matrix, a rank's number from 0 on, in the order of `shapes`"
    ),
    "two calls agree": "two calls gave different owners. Each rank computes this list for itself, and all must come to"
    " the same one",
    "MFLOP of the busiest rank": lambda got, right: (
        ELEMENTS
        if got["_elements"]
        else "the busiest rank has more than 5 % above what is possible: give the largest matrix away first, each to"
        " the rank that has the fewest FLOPs so far"
    ),
}
