"""The first call that does not fit

Write first_mismatch(calls): how many calls all ranks made alike, and the ranks whose next call is another than that of
most ranks, as a list. `calls[rank]` is a list of (kind, bytes). A list may end early: a rank that waits has made fewer
calls, and that is no difference: compare as far as the shortest list goes. Where no call differs, the list of ranks is
empty.

1. Ranks make the same calls, in the same order. Go through the places: which calls stand there?
2. Compare as far as the shortest list goes: `for place, there in enumerate(zip(*calls))`.
3. Where `len(set(there)) > 1`: `usual = max(set(there), key=there.count)`, and the ranks are those whose call is
   another. Return `(place, ranks)` at once: what follows the first difference is its consequence.
"""


def first_mismatch(calls):
    """(calls made alike, [ranks that then make another call than most])."""
    ### BEGIN SOLUTION  calls[rank][place] is a pair: kind and bytes
    for place, there in enumerate(zip(*calls)):
        if len(set(there)) > 1:
            usual = max(set(there), key=there.count)
            return place, [rank for rank, call in enumerate(there) if call != usual]
    return min(map(len, calls)), []
    ### END SOLUTION


# ---- check: pure

GATHER, SMALL, REDUCE, SUM = ("all_gather", 4096), ("all_gather", 1024), ("reduce_scatter", 4096), ("all_reduce", 4)
STEP = [GATHER, SMALL, REDUCE]


def cases(rank, n):
    yield "one rank in another order", [STEP * 2, STEP * 2, [SMALL, GATHER, REDUCE, *STEP]]
    yield "nobody", [STEP * 2, STEP * 2, STEP * 2]
    yield "a call that one rank makes alone", [STEP + [SUM] + STEP, STEP * 2, STEP * 2, STEP * 2]
    yield "rank 0 differs, and all that follows", [[GATHER, REDUCE, SMALL, SUM], STEP + [SUM], STEP + [SUM]]
    yield "the same kind, other bytes", [STEP, [GATHER, ("all_gather", 2048), REDUCE], STEP]
    yield "the same bytes, another kind", [STEP, STEP, [REDUCE, SMALL, REDUCE], STEP]
    yield "a rank that waits", [STEP, STEP[:2], STEP]
    yield "two of five, and one that waits", [STEP, [SMALL], STEP, STEP, [SMALL, GATHER]]
    yield "a difference, then a rank that was ended", [STEP * 2, [SMALL, GATHER, REDUCE], STEP * 2]
    yield "rank 2 differs, and rank 0 later", [[*STEP, SUM], STEP * 2, [GATHER, REDUCE, REDUCE, GATHER], STEP * 2]
    yield "only the last call", [STEP + [GATHER], STEP + [SMALL], STEP + [GATHER]]


def observe(first_mismatch, calls):
    found = first_mismatch([list(own) for own in calls])
    if not isinstance(found, (tuple, list)) or len(found) != 2 or not isinstance(found[1], (list, tuple, set)):
        return {"calls made alike": f"{found!r}, no pair", "ranks": []}
    return {"calls made alike": found[0], "ranks": sorted(found[1]), "_calls": calls}


def alike(got, right):
    if not isinstance(got["calls made alike"], int):
        return "return two values: a number of calls, and a list of ranks"
    place, counted = right["calls made alike"], got["calls made alike"]
    if not right["ranks"]:
        once = "a call of all ranks counts once" if counted > place else "the last one counts, too"
        return f"up to the end of the shortest list no call differs, and all {place} are alike: {once}"
    first = f"the first difference is at place {place}, where {differs(right, right['ranks'][0])}"
    return f"{first}: {'only calls before it count' if counted > place else 'all calls before it count'}"


def ranks(got, right):
    wanted = right["ranks"]
    if wanted and got["ranks"] == [rank + 1 for rank in wanted]:
        return "the first rank is rank 0"
    missing = [rank for rank in wanted if rank not in got["ranks"]]
    if missing:
        return f"the list lacks a rank whose call is another than that of most: {differs(right, missing[0])}"
    extra = next((rank for rank in got["ranks"] if rank not in wanted), 0)
    if not wanted:
        return f"where no call differs, the list of ranks is empty; this has rank {extra}"
    return f"at the first difference, place {right['calls made alike']}, rank {extra} calls what most call, or waits"


def differs(right, rank):
    """What a rank calls at the first difference, and what most call."""
    calls = [own[right["calls made alike"]] for own in right["_calls"]]
    ours, usual = (f"{kind} of {nbytes:,} bytes" for kind, nbytes in (calls[rank], max(calls, key=calls.count)))
    return f"rank {rank} calls {ours}, and most call {usual}"


SAYS = {"calls made alike": alike, "ranks": ranks}
