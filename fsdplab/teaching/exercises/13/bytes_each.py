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
    return {
        ### BEGIN SOLUTION
        ## "working copy": ...,  # bf16, what forward and backward read
        ## "gradient": ...,  # fp32, as it is reduced
        ## "master": ...,  # fp32, what the optimizer updates
        ## "moments": ...,  # fp32, Adam's two
        "working copy": 2 if "optimizer" in cut and "parameters" not in cut else 0,
        "gradient": 4 * share["gradients"],
        "master": 4 * share["optimizer"],
        "moments": 8 * share["optimizer"],
        ### END SOLUTION
    }


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
