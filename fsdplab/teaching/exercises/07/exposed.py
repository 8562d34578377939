"""Exposed time

Write exposed(communication, compute): how many ms a message is on its way while nothing is computed, |M without C|.
Times are in ms, with fractions.

1. Between two neighbouring edges (starts and ends of any interval, which need not be whole ms) nothing changes. What
   must hold of such a piece, so that it counts?
2. Sort all edges. A piece between two of them counts if it lies in some interval of communication and in none of
   compute.
3. `for start, end in zip(edges, edges[1:])`: add end - start if any(a <= start and end <= b for a, b in communication)
   and not the same for compute.
"""


def exposed(communication, compute):
    """Ms in which a message is on its way and nothing is computed; lists of (start, end), any order."""
    ### BEGIN SOLUTION
    edges = sorted({edge for interval in [*communication, *compute] for edge in interval})
    total = 0
    for start, end in zip(edges, edges[1:]):  # between two edges nothing begins and nothing ends
        moving = any(a <= start and end <= b for a, b in communication)
        computing = any(a <= start and end <= b for a, b in compute)
        total += (end - start) * (moving and not computing)
    return total
    ### END SOLUTION


# ---- check: within 1e-9, pure

SCALE = 1.375  # whoever counts whole milliseconds must learn it here, before a step's nanoseconds fill the memory


def cases(rank, n):
    for name, moved, computed in (
        ("a message, partly under compute", [(0, 10)], [(4, 25)]),
        ("compute in two pieces under one message", [(0, 20)], [(2, 6), (10, 13)]),
        ("compute that came before the message", [(50, 60)], [(0, 40)]),
        ("two messages at once", [(0, 10), (5, 15)], [(13, 30)]),
        ("two streams that compute at once, unsorted", [(30, 40), (0, 10)], [(5, 9), (2, 7), (35, 60)]),
        ("short intervals inside long ones", [(0, 30), (5, 10)], [(12, 28), (14, 16)]),
        ("no compute", [(3, 5), (9, 10)], []),
        ("no communication", [], [(3, 5)]),
    ):
        yield name, *([(a * SCALE, b * SCALE) for a, b in spans] for spans in (moved, computed))


def observe(exposed, communication, compute):
    at_once = any(a < d and c < b for (a, b), (c, d) in zip(communication, communication[1:]))
    return {"ms": exposed(communication, compute), "_pieces": len(compute), "_at_once": at_once}


def said(got, right):
    if not isinstance(got["ms"], (int, float)):
        return "one number is expected: a duration"
    if isinstance(got["ms"], int) and got["ms"]:
        return "intervals begin and end at fractions of a ms: whole ms cannot be counted, add up the pieces' lengths"
    if got["ms"] < right["ms"]:
        return (
            "too little: pieces are missing, or taken away twice. Intervals come in any order, each piece between two"
            " edges counts, to the last edge"
        )
    if got["_at_once"]:
        return "two messages are on their way at once here: an instant counts once, however many there are"
    if got["_pieces"] > 1:
        return "several intervals of compute lie under the messages, in any order: is each of them looked at?"
    return "draw both lists on one axis: exposed is where only a message is drawn"


SAYS = {"ms": said}
