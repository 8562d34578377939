"""Bytes within and across

Write traffic(P, s, r): the bytes that a rank sends in a step within its shard group, and across the groups.

1. Two rings. How many ranks are in each, and what is the payload that goes round it?
2. Within: s ranks, payload P, three times. Across: r ranks, and the payload is what a rank has after the
   reduce-scatter.
3. 3 P (s-1)/s within; across an all-reduce of P/s over r ranks: 2 (P/s) (r-1)/r.
"""


def traffic(P, s, r):
    """Bytes that a rank sends in a step; P bytes of parameters, r shard groups of s ranks each."""
    return {
        ### BEGIN SOLUTION
        ## "within": ...,  # its shard group: two all-gathers and a reduce-scatter
        ## "across": ...,  # the groups: an all-reduce over r ranks
        "within": 3 * P * (s - 1) / s,  # its shard group: two all-gathers and a reduce-scatter
        "across": 2 * (P / s) * (r - 1) / r,  # the groups: an all-reduce over r ranks
        ### END SOLUTION
    }


# ---- check: pure, within 1e-9

from itertools import product
from math import isclose

RULE = (
    "payload x (members of the ring - 1) / members, once for each all-gather or reduce-scatter, twice for an all-reduce"
)
SENT = {"within": (3, "P", "s", "(s-1)/s"), "across": (2, "P/s", "r", "(r-1)/r")}  # times, payload, ring, share
WHY = {
    "within": (
        "three collectives go round, two all-gathers and a reduce-scatter, and each counts once",
        "the payload of each is all of P",
        "the ring has the s ranks of one group",
        "a rank sends (s-1)/s of the payload, s - 1 of s parts",
    ),
    "across": (
        "an all-reduce goes round, which counts twice",
        "it carries what a rank has after the reduce-scatter, P/s",
        "the ring has r ranks, one of each group",
        "a rank sends (r-1)/r of the payload, and nothing where r is 1",
    ),
}


def observe(traffic, P, s, r):
    sent = traffic(P, s, r)
    return sent | {"_given": (P, s, r)} if isinstance(sent, dict) else sent


def readings(sent, P, s, r):
    """(times, payload, ring, share) of all formulas of one ring that give this number."""
    payloads, rings = {"P": P, "P/s": P / s, "P/r": P / r, "P/(s r)": P / (s * r)}, {"s": s, "r": r, "s r": s * r}
    for (payload, size), (ring, k) in product(payloads.items(), rings.items()):
        k_ = ring if ring in "sr" else f"({ring})"
        shares = {f"({ring}-1)/{k_}": (k - 1) / k, f"({ring}-1)": k - 1, f"/{k_}": 1 / k, "": 1}
        for share, part in shares.items():
            times = round(sent / (size * part)) if part else 0
            if times and isclose(sent, times * size * part):
                yield times, payload, ring, share


def differing(fact, reading):
    """Which of times, payload, ring and share are not the right ones; the share of another ring is no further slip."""
    wrong = [i for i, (ours, right) in enumerate(zip(reading, SENT[fact])) if ours != right]
    right_share = SENT[fact][3].replace(SENT[fact][2], reading[2])
    return [i for i in wrong if i != 3 or reading[3].replace("(s r)", "s r") != right_share]


def as_read(fact):
    def said(got, right):
        if fact not in got:
            return "return the dict with `within` and `across`, spelt so, and a number of bytes each"
        if isclose(got[fact], right["within"] + right["across"]):
            return "these are the bytes of both rings together: each stands alone"
        found = sorted(readings(got[fact], *right["_given"]), key=lambda each: (len(differing(fact, each)), each))
        if not found:
            return RULE
        times, payload, _, share = found[0]
        formula = f"{times} x {payload} {share}".rstrip()
        return f"this is {formula}: {'; '.join(WHY[fact][i] for i in differing(fact, found[0]))}"

    return said


SAYS = {"within": as_read("within"), "across": as_read("across")}


def cases(rank, n):
    yield "five groups of seven", 9450, 7, 5  # here every slip has a number of its own
    yield "two groups of two", 1200, 2, 2
    yield "eight groups of four", 4800, 4, 8
    yield "one group of four: full_shard", 1200, 4, 1
    yield "four groups of one: no_shard", 1200, 1, 4
