"""Where the wait went

Write waited(...): how many ms, with fractions, a rank waited for its peer, in the link's queue, and on the link.

1. A message has four instants in a row: issued, issued by the last rank, taken, delivered. Three spans.
2. The second instant is max(issued, peer_issued). Of each span only what lies behind `needed` counts.
3. For a span from start to end: max(0, end - max(start, needed)).
"""


def waited(issued, peer_issued, taken, delivered, needed):
    """Where the wait from `needed` to `delivered` went, in ms: for peer, in queue, on the link."""
    ### BEGIN SOLUTION
    ## ...  # before `needed` the rank computes, so nothing of that counts
    ## return {"peer": ..., "queue": ..., "link": ...}
    complete = max(issued, peer_issued)  # from now on the link may take it
    spans = {"peer": (issued, complete), "queue": (complete, taken), "link": (taken, delivered)}
    return {name: max(0, end - max(start, needed)) for name, (start, end) in spans.items()}
    ### END SOLUTION


# ---- check: pure


def cases(rank, n):
    for name, times in (
        ("needed when issued, on a free link", (10, 10, 10, 15, 10)),
        ("the peer came late", (10, 14.5, 14.5, 19.25, 10)),
        ("the link carried something else", (10, 10, 14.25, 19, 10)),
        ("a late peer, then a busy link", (10, 12.5, 15, 20, 10)),
        ("the peer was there before", (10, 7, 10, 15, 10)),
        ("issued ahead, needed while it travels", (10, 10, 10, 15, 13)),
        ("issued ahead, needed while it queues", (10, 10, 14, 19, 12)),
        ("issued ahead, needed before the peer came", (10, 16, 16, 21, 12)),
        ("issued early enough: hidden", (10, 10, 10, 15, 18)),
    ):
        named = zip(("issued", "peer", "taken", "delivered", "needed"), times, strict=True)
        yield f"{name}: {', '.join(f'{instant} {time}' for instant, time in named)}", *times


SPANS = {
    "peer": "from `issued` until both have issued",
    "queue": "from when both have issued until `taken`",
    "link": "from `taken` to `delivered`",
}


def said(got, right):
    """What is wrong with a part, by the sum of all."""
    parts = [got.get(name) for name in right]
    if not all(isinstance(part, (int, float)) for part in parts):
        return "return a dict with the names peer, queue, link, a number of ms each"
    if min(parts) < 0:
        return "a part is below zero: where a span ends before the wait begins, none of it counts (max(0, ...))"
    if sum(parts) != sum(right.values()):
        name = next(name for name in right if got[name] != right[name])
        return (
            f"the parts sum to {sum(parts)}, and the rank waited for {sum(right.values())}, from needed to delivered:"
            f" `{name}` is too {'large' if got[name] > right[name] else 'small'}. It lasts {SPANS[name]}, and of that"
            " what lies behind `needed` counts"
        )
    return "the sum is right, but a part has another's time: peer until both have issued, queue until taken, then link"


SAYS = dict.fromkeys(("peer", "queue", "link"), said)
