"""Bytes within and across

Write traffic(P, s, r): the bytes that a rank sends in a step within its shard group, and across the groups.

1. Two rings. How many ranks are in each, and what is the payload that goes round it?
2. Within: s ranks, payload P, three times. Across: r ranks, and the payload is what a rank has after the
   reduce-scatter.
3. 3 P (s-1)/s within; across an all-reduce of P/s over r ranks: 2 (P/s) (r-1)/r.
"""


def traffic(P, s, r):
    """Bytes that a rank sends in one step; P bytes of parameters, shard groups of s ranks, r such groups."""
    return {
        ### BEGIN SOLUTION
        ## "within": ...,  # its shard group: two all-gathers and a reduce-scatter
        ## "across": ...,  # the groups: an all-reduce over r ranks
        "within": 3 * P * (s - 1) / s,  # its shard group: two all-gathers and a reduce-scatter
        #! "within": 2 * P * (s - 1) / s,
        #: two of the three: forward unshards, backward unshards again, then the gradient is reduced
        #! "within": 3 * P * (s * r - 1) / (s * r),
        #: the ring has the s ranks of one group, not all of them: (s-1)/s
        #! "within": 3 * P / s,
        #: P/s is a rank's shard; in a ring it sends s-1 of them, its own and those that it passes on
        #! "within": 3 * (P / s) * (s - 1) / s,
        #: the payload of an all-gather is all of P, not the shard that a rank has
        #! "within": 6 * P * (s - 1) / s,
        #: an all-gather and a reduce-scatter count once each; only an all-reduce counts twice
        #! "within": 3 * P * (s - 1),
        #: a rank sends (s-1)/s of the payload in a collective: s - 1 of s parts, not s - 1 times all of it
        #! "within": 3 * P,
        #: a rank need not send what its neighbours have: (s-1)/s of P
        #! "within": 3 * P * (r - 1) / r,
        #: the ring within a group has s ranks; r counts the groups
        "across": 2 * (P / s) * (r - 1) / r,  # the groups: an all-reduce over r ranks
        #! "across": 2 * P * (r - 1) / r,
        #: after the reduce-scatter a rank has 1/s of the gradient, and only that shard is all-reduced
        #! "across": 3 * P * (r - 1) / r,
        #: only gradients travel across, in an all-reduce, and of them only the shard P/s
        #! "across": (P / s) * (r - 1) / r,
        #: an all-reduce is a reduce-scatter and an all-gather: it counts twice
        #! "across": P * (r - 1) / r,
        #: an all-reduce counts twice, and only the shard P/s is all-reduced
        #! "across": 2 * (P / s) * (s - 1) / s,
        #: the ring across has r ranks, one of each group
        #! "across": 2 * (P / s) * (s * r - 1) / (s * r),
        #: the ring across has r ranks, one of each group, not all n
        #! "across": 2 * (P / s) * (r - 1),
        #: a rank sends (r-1)/r of the payload once around the ring, not r-1 times all of it
        #! "across": 2 * P / s,
        #: a ring of r ranks sends (r-1)/r of its payload; with one group nothing travels
        #! "across": 3 * (P / s) * (r - 1) / r,
        #: parameters never travel across: each group unshards its own. Only gradients do, in an all-reduce
        #! "across": ...,
        #: a number of bytes is expected in place of the dots
        ### END SOLUTION
    }


#! def traffic(P, s, r):
#!     return {"within": 2 * (P / s) * (r - 1) / r, "across": 3 * P * (s - 1) / s}
#: the two are exchanged: within a shard group are the all-gathers, across is the all-reduce

#! def traffic(P, s, r):
#!     return 3 * P * (s - 1) / s + 2 * (P / s) * (r - 1) / r
#: return the dict with `within` and `across`, a number of bytes each

# ---- check: pure, within 1e-9

RULE = (
    "payload x (members of the ring - 1) / members, once for each all-gather or reduce-scatter, twice for an all-reduce"
)
SAYS = {"within": RULE, "across": RULE}


def cases(rank, n):
    yield "five groups of eight", 9600, 8, 5  # here every slip has a number of its own
    yield "two groups of two", 1200, 2, 2
    yield "eight groups of four", 4800, 4, 8
    yield "one group of four: full_shard", 1200, 4, 1
    yield "four groups of one: no_shard", 1200, 1, 4
