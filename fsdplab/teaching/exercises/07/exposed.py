"""Exposed time

Write exposed(communication, compute): how many ms a message is on its way while nothing is computed, |M without C|.
Times are in ms, with fractions.

1. Between two neighbouring edges (starts and ends of any interval) nothing changes. What must hold of such a piece, so
   that it counts?
2. Sort all edges. A piece between two of them counts if it lies in some interval of communication and in none of
   compute.
3. `for start, end in zip(edges, edges[1:])`: add end - start if any(a <= start and end <= b for a, b in communication)
   and not the same for compute.
"""


def exposed(communication, compute):
    """Ms in which a message is on its way and nothing is computed; lists of (start, end), in any order."""
    ### BEGIN SOLUTION
    edges = sorted({edge for interval in [*communication, *compute] for edge in interval})
    #! edges = [edge for interval in [*communication, *compute] for edge in interval]
    #: sort the edges of both lists together: a piece reaches from one edge to the next one in time
    #! edges = sorted({min(edge for interval in compute for edge in interval)})
    #: raises: there is nothing to choose from in this case
    #! length = lambda spans: sum(b - a for a, b in spans)
    #! return length(communication) - length(compute)
    #: durations were subtracted; what counts is when: compute hides only the message that is on its way at that
    #: instant
    #! length = lambda spans: sum(b - a for a, b in spans)
    #! return max(0, length(communication) - length(compute))
    #: durations were subtracted; what counts is when: compute hides only the message that is on its way at that
    #: instant
    #! hidden = lambda a, b, spans: sum(max(0, min(b, d) - max(a, c)) for c, d in spans)
    #! return sum(b - a - hidden(a, b, compute) for a, b in communication)
    #: an instant was counted twice: intervals of one list may overlap each other (two messages, two streams); take
    #: their union first
    #! return sum(b - a for a, b in communication if not any(c < b and a < d for c, d in compute))
    #: a message that is partly under compute is partly exposed, and here it counts not at all
    #! hidden = lambda a, b, spans: sum(max(0, min(b, d) - max(a, c)) for c, d in spans)
    #! return sum(b - a - hidden(a, b, compute[:1]) for a, b in communication)
    #: several intervals of compute lie under the messages, in any order: is each of them looked at?
    #! held = lambda spans: {t for a, b in spans for t in range(int(a), int(b))}
    #! return len(held(communication) - held(compute))
    #: times are not whole numbers, so instants cannot be counted one by one: go from edge to edge
    #! held = lambda spans: {t for a, b in spans for t in range(round(a), round(b))}
    #! return len(held(communication) - held(compute))
    #: as above
    #! held = lambda spans: {t for a, b in spans for t in range(a, b)}
    #! return len(held(communication) - held(compute))
    #: raises: a whole number is needed here
    total = 0
    #! hidden = lambda a, b, spans: sum(max(0, min(b, d) - max(a, c)) for c, d in spans)
    #! moving = [(a, b) for a, b in zip(edges, edges[1:]) if any(c <= a and b <= d for c, d in communication)]
    #! return sum(b - a for a, b in moving) - sum(hidden(a, b, compute) for a, b in communication)
    #: an instant of compute was taken away twice: intervals of one list may overlap each other; take their union first
    #! pieces = list(zip(edges, edges[1:]))
    #! moving, computing = ({(a, b) for a, b in pieces if any(c <= a and b <= d for c, d in spans)}
    #!                      for spans in (communication, compute))
    #! return sum(b - a for a, b in communication) - sum(b - a for a, b in moving & computing)
    #: an instant was counted twice where two messages travel at once: take the union of the messages first
    #! def joined(spans):
    #!     found = []
    #!     for a, b in sorted(spans):
    #!         if found and a <= found[-1][1]:
    #!             found[-1] = (found[-1][0], b)
    #!         else:
    #!             found.append((a, b))
    #!     return found
    #!
    #! shared = lambda a, b: sum(max(0, min(b, d) - max(a, c)) for c, d in joined(compute))
    #! return sum(b - a - shared(a, b) for a, b in joined(communication))
    #: where a short interval lies inside a long one, what they cover together ends with the long one: when you join
    #: intervals, keep the later of the two ends
    for start, end in zip(edges, edges[1:]):  # between two edges nothing begins and nothing ends
        moving = any(a <= start and end <= b for a, b in communication)
        computing = any(a <= start and end <= b for a, b in compute)
        total += (end - start) * (moving and not computing)
        #! moving = any(a <= end and start <= b for a, b in communication)
        #! computing = any(a <= end and start <= b for a, b in compute)
        #! total += (end - start) * (moving and not computing)
        #: a piece that only touches an interval was taken for one that lies in it: compare the piece's start with the
        #: interval's start, and its end with the interval's end
        #! total += (end - start) * (moving and computing)
        #: this is the hidden part (M and C); exposed is M without C
        #! total += (end - start) * (computing and not moving)
        #: this is compute without communication; exposed is the other way round: M without C
        #! total += (end - start) * moving
        #: this is all communication: take out the instants in which something is computed
    return total
    #! return [total]
    #: one number is expected: a duration
    ### END SOLUTION


# ---- check: within 1e-9, pure

SCALE = 1.375  # whoever counts whole milliseconds must learn it here, before a step's nanoseconds fill the memory


def cases(rank, n):
    for name, moved, computed in (
        ("a message, half under compute", [(0, 10)], [(4, 25)]),
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
    return {"ms": exposed(communication, compute), "_pieces": len(compute)}


def said(got, right):
    if not isinstance(got["ms"], (int, float)):
        return "one number is expected: a duration"
    if got["ms"] < right["ms"]:
        return (
            "too little: pieces are missing, or taken away twice. Intervals come in any order, each piece between two"
            " edges counts, to the last edge"
        )
    if got["_pieces"] > 1:
        return "several intervals of compute lie under the messages, in any order: is each of them looked at?"
    return "draw both lists on one axis: exposed is where only a message is drawn"


SAYS = {"ms": said}
