"""Bytes a parameter in mixed precision

Write bytes_each(cut, n): how many bytes a parameter each of the four costs one rank after a backward.

1. Master, gradient and moments: how many bytes has the format, and which of the three states does each go with?
2. Who reads and writes the master? Only the optimizer, so it is cut with the optimizer. And the working copy: from what
   can a rank make it again, the next time it computes?
3. Master and moments take share["optimizer"], the gradient share["gradients"]: 4, 8 and 4 bytes. The working copy is 2
   where the optimizer is cut and the parameters are not, else 0.
"""


def bytes_each(cut, n):
    """Bytes a parameter on one of n ranks; `cut` may name "parameters", "gradients" and "optimizer"."""
    share = {state: 1 / n if state in cut else 1 for state in ("parameters", "gradients", "optimizer")}
    #! share = {state: 1 / n for state in ("parameters", "gradients", "optimizer")}
    #: everything is cut here: what is in `cut` is divided by n, what is not stays whole
    #! share = {state: n if state in cut else 1 for state in ("parameters", "gradients", "optimizer")}
    #: what is in `cut` is divided by n, not multiplied
    return {
        ### BEGIN SOLUTION
        ## "working copy": ...,  # bf16, what forward and backward read
        ## "gradient": ...,  # fp32, as it is reduced
        ## "master": ...,  # fp32, what the optimizer updates
        ## "moments": ...,  # fp32, Adam's two
        "working copy": 2 if "optimizer" in cut and "parameters" not in cut else 0,
        #! "working copy": 2 * share["parameters"],
        #: where a rank has the masters of what it keeps, it makes the bf16 copy from them when a unit computes, and
        #: frees it then: nothing of it rests
        #! "working copy": 2,
        #: as above
        #! "working copy": 0,
        #: this rank keeps whole parameters and only 1/n of the masters: the bf16 copy is all that it has of the rest
        #! "working copy": 4 if "optimizer" in cut and "parameters" not in cut else 0,
        #: the copy that forward and backward read is bf16: 2 bytes
        "gradient": 4 * share["gradients"],
        #! "gradient": 2 * share["gradients"],
        #: 2 bytes is what backward leaves in bf16; the ranks average in fp32, and that average is what is kept
        #! "gradient": 4,
        #: the gradient is whole here: what is in `cut` is divided by n, what is not stays whole
        "master": 4 * share["optimizer"],
        #! "master": 4 * share["parameters"],
        #: the master belongs to the optimizer: only the optimizer reads and writes it, so it is cut when the optimizer
        #: is, however whole the parameters are
        #! "master": 4,
        #: the master is whole here: what is in `cut` is divided by n, what is not stays whole
        #! "master": ...,
        #: a number of bytes is expected in place of the dots
        "moments": 8 * share["optimizer"],
        #! "moments": 4 * share["optimizer"],
        #: Adam keeps two moments a parameter, 4 bytes each
        ### END SOLUTION
    }


#! def bytes_each(cut, n):
#!     return 4 + 4 + 8
#: return the dict with its four names, a number of bytes each

# ---- check: pure, within 1e-9


def cases(rank, n):
    yield "no_shard on 4 ranks", [], 4
    yield "zero1 on 4 ranks", ["optimizer"], 4
    yield "zero2 on 4 ranks", ["gradients", "optimizer"], 4
    yield "full_shard on 8 ranks", ["parameters", "gradients", "optimizer"], 8


SAYS = {
    "working copy": "2 bytes where it must rest: where the rank could not make it again from the masters that it has",
    "gradient": "one fp32 number (4 bytes), times the share of the gradients that a rank keeps",
    "master": "one fp32 number (4 bytes), times the share of the optimizer's state that a rank keeps",
    "moments": "two fp32 numbers (8 bytes), times the share of the optimizer's state that a rank keeps",
}
