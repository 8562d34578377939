"""One copy less

Write slim(): settings with which the peak holds one unsharded block less than with prefetch=2, without giving up
prefetching.

1. At the peak the block that computes must be there, and the root is. Every other one is there because of a setting.
2. `prefetch` says how many units are unsharded ahead, and so how many copies are there beside the one in use.
3. "prefetch": 1, and the rest as it was. Or smaller units: with "units": "linear" two that are unsharded ahead are less
   than a block.
"""


def slim():
    """Settings that keep one unsharded copy fewer at the peak."""
    return {
        "strategy": "full_shard",  # "full_shard", "shard_grad_op", "zero2"
        ### BEGIN SOLUTION
        ## "prefetch": 2,  # units unsharded ahead: 0, 1, 2, ...
        "prefetch": 1,  # units unsharded ahead: 0, 1, 2, ...
        ### END SOLUTION
        "units": "block",  # what travels together: "block", "linear", "model"
    }


# ---- check: on 2 ranks, in 90 s, facts only

from fsdplab.sessions import RunSpec
from fsdplab.teaching.core.training_on_ranks import Training, complaint

JOB = {"model": "gpt-20m", "batch_size": 2, "sequence_length": 64, "steps": 1, "device": "cpu"}
CHOICES = ("strategy", "prefetch", "units")
BLOCK_BYTES, ROOT_BYTES = 7_097_856, 1_182_720  # of gpt-20m in fp32: one block, and what no block holds
GATHERED_LIMIT = 2 * BLOCK_BYTES + ROOT_BYTES  # one copy less than with prefetch=2
PEAK_LIMIT = 206_000_000  # and no more in all than prefetch=2 holds


def cases(rank, n):
    yield ("two steps of gpt-20m",)


def observe(slim):
    choices = slim()
    if refused := complaint(choices, JOB, CHOICES):
        return {"choices": refused}
    spec = RunSpec(**{**JOB, **choices})
    peak = Training(spec).measured()
    held = [f"{name.replace('_', ' ')} {size / 1e6:.1f} MB" for name, size in peak.peak.items() if size > 1e5]
    return {
        "choices": "",
        "bytes over the limit of the whole peak": max(0, peak.peak_total - PEAK_LIMIT),
        "unsharded bytes too many": max(0, peak.peak["unsharded_parameters"] - GATHERED_LIMIT),
        "all-gathers set out ahead": spec.prefetch > 0 and spec.units != "model",
        "_peak": f"The peak on this rank, {peak.peak_total / 1e6:.1f} MB: {', '.join(held)}.",
    }


EXPECTED = {
    "choices": "",
    "bytes over the limit of the whole peak": 0,
    "unsharded bytes too many": 0,
    "all-gathers set out ahead": True,
}


def too_much(got, right):
    over = got["unsharded bytes too many"]
    if 0 < over <= 4 * BLOCK_BYTES:
        return (
            f"{over / 1e6:.1f} MB of unsharded parameters too many: which of the units at the peak is there only"
            f" because it was unsharded ahead? {got['_peak']}"
        )
    return (
        "there is more at the peak than before. Where parameters stay whole (zero2), are kept from forward to backward"
        f" (shard_grad_op), or travel as one unit, every block is there at once. {got['_peak']}"
    )


SAYS = {
    "choices": lambda got, right: got["choices"],
    "bytes over the limit of the whole peak": too_much,
    "unsharded bytes too many": too_much,
    "all-gathers set out ahead": "few copies, but no all-gather sets out before its unit is needed, so nothing hides it"
    " (07). Keep prefetching, and several units",
    "hung": "the ranks make different calls: return the same settings on every rank",
}
