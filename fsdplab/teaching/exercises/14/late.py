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
            #! if True:
            #: in every step some rank comes last; late is who comes after the others by more than they lie apart
            #! if last - others[-1] > 0:
            #: in every step some rank comes last; late is who comes after the others by more than they lie apart
            #! if last - others[0] > others[-1] - others[0]:
            #: in every step some rank comes last; late is who comes after the others by more than they lie apart
            #! if last - others[-1] > 1:
            #: a fixed number of ms is no spread: compare with how far the others lie apart in this step
            counts[times.index(last)] += 1
            #! counts[times.index(min(times))] += 1
            #: this counts the rank that came first, which waits for the others
    return [rank for rank, count in enumerate(counts) if count > len(arrivals) / 2]
    #! return [counts.index(max(counts))]
    #: where no rank is late in more than half of the steps, the list is empty: some rank always leads the counts
    #! return [rank for rank, count in enumerate(counts) if count > 1]
    #: late in a few steps is what happens to any rank on a busy machine: more than half of the steps
    #! return [rank for rank, count in enumerate(counts) if count >= len(arrivals) / 2]
    #: exactly half of the steps is not more than half
    #! return [rank for rank, count in enumerate(counts) if count == len(arrivals)]
    #: one quiet step does not clear a rank: more than half of the steps are enough
    #! return counts
    #: this is how often each rank was late; return the ranks
    ### END SOLUTION


#! def late(arrivals):
#!     means = [sum(times) / len(arrivals) for times in zip(*arrivals)]
#!     *others, last = sorted(means)
#!     return [means.index(last)] if last - others[-1] > others[-1] - others[0] else []
#: one long delay moves a mean: count the steps in which the rank is late

# ---- check: pure


def cases(rank, n):
    yield "rank 2 of 3, every step", [[0.0, 1.0, 9.0], [0.5, 0.0, 8.0], [0.0, 0.4, 9.5], [0.2, 0.0, 7.0]]
    yield "nobody: each is last in turn", [[0.0, 0.1, 5.0], [5.0, 0.0, 0.1], [0.1, 5.0, 0.0], [0.0, 0.1, 5.0]]
    yield "nobody: the ranks lie apart evenly", [[0.0, 4.0, 8.0, 12.0], [0.0, 3.0, 7.0, 9.0], [1.0, 4.0, 6.0, 9.0]]
    yield "rank 0 of 4, but for one step", [[9.0, 0, 1, 2], [12.0, 1, 2, 0], [0.0, 1, 2, 3], [8.0, 0, 2, 1]]
    yield (
        "nobody: one long delay",
        [[0.0, 0.2, 0.1], [0.1, 0.0, 900.0], [0.2, 0.0, 0.1], [0.0, 0.1, 0.2], [0.1, 0.2, 0.0]],
    )
    yield "nobody: half of the steps", [[0.0, 1.0, 9.0], [0.0, 1.0, 9.0], [1.0, 0.0, 0.5], [0.0, 0.5, 1.0]]
    yield "rank 1 of 3, by little", [[0.0, 0.5, 0.1], [0.1, 0.6, 0.0], [0.0, 0.4, 0.1]]
    yield "nobody: twice of eight", [[0.0, 0.1, 9.0]] * 2 + [[0.0, 0.5, 1.0], [1.0, 0.5, 0.0]] * 3


def observe(late, arrivals):
    found = late([list(times) for times in arrivals])
    return {"late ranks": sorted(found) if isinstance(found, (list, tuple, set)) else found}


def said(got, right):
    found = got["late ranks"]
    if not isinstance(found, list):
        return "return a list of ranks, with nothing in it where nobody is late"
    if not right["late ranks"]:
        return "nobody is late in more than half of the steps: the list is empty"
    if not found:
        return "in more than half of the steps a rank comes last by more than the others lie apart: name that rank"
    return "another rank is late: a rank's number is its place in `arrivals[step]`"


SAYS = {"late ranks": said}
