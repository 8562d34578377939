"""Who is late beyond the spread

Write late(arrivals): the ranks that are late in more than half of the steps, as a list (often an empty one).
`arrivals[step][rank]` is when a rank came to the first collective of a step, in ms. A rank is late in a step where it
comes last, and after the last but one by more than all the others lie apart.

1. Some rank is last in every step, also where nothing is wrong. What has to be compared with what?
2. In a step: `*others, last = sorted(times)`. The others lie `others[-1] - others[0]` apart.
3. Count by rank: `times.index(last)` where `last - others[-1] > others[-1] - others[0]`. Then the ranks whose count is
   above `len(arrivals) / 2`.
"""


def late(arrivals):
    """The ranks that are late in more than half of the steps; three ranks or more."""
    counts = [0] * len(arrivals[0])
    ### BEGIN SOLUTION  in which steps is which rank late?
    for times in arrivals:
        *others, last = sorted(times)
        if last - others[-1] > others[-1] - others[0]:
            counts[times.index(last)] += 1
    return [rank for rank, count in enumerate(counts) if count > len(arrivals) / 2]
    ### END SOLUTION


# ---- check: pure


def cases(rank, n):
    yield "rank 2 of 3, every step", [[0.0, 1.0, 90.0], [0.0, 0.5, 80.0], [0.0, 0.4, 95.0], [0.0, 0.2, 70.0]]
    yield "nobody: each is last in turn", [[0.0, 0.1, 5.0], [5.0, 0.0, 0.1], [0.1, 5.0, 0.0], [0.0, 0.1, 5.0]]
    yield (
        "nobody: the ranks lie apart evenly",
        [[0.0, 40.0, 80.0, 120.0], [0.0, 30.0, 70.0, 90.0], [1.0, 4.0, 6.0, 9.0]],
    )
    yield "nobody: two of the others are near each other", [[0.0, 80.0, 90.0, 150.0], [5.0, 80.0, 79.0, 140.0]]
    yield "nobody: as much as the others lie apart", [[0.0, 40.0, 80.0], [20.0, 0.0, 40.0], [0.0, 30.0, 60.0]]
    yield "rank 0 of 4, but for one step", [[9.0, 0, 1, 2], [12.0, 1, 2, 0], [0.0, 1, 2, 3], [8.0, 0, 2, 1]]
    yield (
        "nobody: one long delay",
        [[0.0, 0.2, 0.1], [0.1, 0.0, 900.0], [0.2, 0.0, 0.1], [0.0, 0.1, 0.2], [0.1, 0.2, 0.0]],
    )
    yield "nobody: half of the steps", [[0.0, 1.0, 9.0], [0.0, 1.0, 9.0], [1.0, 0.0, 0.6], [0.0, 0.6, 1.0]]
    yield "rank 1 of 3, by little", [[0.0, 0.5, 0.2], [0.2, 0.5, 0.0], [0.0, 0.4, 0.15]]
    yield "nobody: twice of eight", [[0.0, 0.1, 9.0]] * 2 + [[0.0, 0.5, 1.0], [1.0, 0.5, 0.0]] * 3


def observe(late, arrivals):
    found = late([list(times) for times in arrivals])
    return {"late ranks": sorted(found) if isinstance(found, (list, tuple, set)) else found, "_arrivals": arrivals}


def said(got, right):
    found, wanted, arrivals = got["late ranks"], right["late ranks"], got["_arrivals"]
    if not isinstance(found, list):
        return "return a list of ranks, with nothing in it where nobody is late"
    if any(type(each) is not int for each in found):
        return "return the numbers of the ranks that are late, counted from 0"
    if len(set(found)) < len(found):
        return "a rank stands in the list once, in however many steps it is late"
    if not set(found) <= set(range(len(arrivals[0]))):
        return "another rank is late: a rank's number is its place in `arrivals[step]`, from 0 on"
    rank = next(iter([each for each in found if each not in wanted] or wanted))
    last = [(step, *lead(times)) for step, times in enumerate(arrivals) if times.index(max(times)) == rank]
    steps = sum(gap > spread for _, gap, spread in last)
    in_all = f"rank {rank} is late in {steps} of {len(arrivals)} steps"
    if rank in found and steps:
        return f"{in_all}, and more than half are needed"
    if not last:
        return f"rank {rank} comes last in no step"
    step, gap, spread = last[0]
    return (
        f"{in_all}: in step {step} it comes {gap:.3g} ms after the last but one, and the others lie {spread:.3g} apart"
    )


def lead(times):
    """By how much the last comes after the last but one, and how far the others lie apart."""
    *others, last = sorted(times)
    return last - others[-1], others[-1] - others[0]


SAYS = {"late ranks": said}
