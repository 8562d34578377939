"""Order the hardware

Write order(): cards and settings with which 100 billion tokens are trained within 21 days and $102,000, with at most
4,000,000 tokens a step.

1. First make it fit: which strategy keeps no state whole, and on how many cards? `sizing.fewest` says more.
2. Then time: days are nearly proportional to 1 / GPUs, and the bill changes little. Then the bill: with one sequence a
   rank, what is computed twice is paid for twice.
3. full_shard with selective checkpointing and micro-batches of 1; on H100, 128 of them are in time.
"""


def order():
    """Cards and settings for the job."""
    return {
        ### BEGIN SOLUTION
        ## "gpu": "h100",  # "h100" at 3.00 $ an hour, "a100" (80 GB) at 1.25 $
        ## "gpus": 16,  # whole nodes of 8
        ## "strategy": "zero2",  # no_shard, zero1, zero2, shard_grad_op, full_shard, hybrid_shard
        ## "micro_batch": 1,  # sequences of 4,096 tokens that a rank computes at once
        ## "checkpointing": "full",  # none, selective, full
        "gpu": "h100",  # "h100" at 3.00 $ an hour, "a100" (80 GB) at 1.25 $
        "gpus": 128,  # whole nodes of 8
        "strategy": "full_shard",  # no_shard, zero1, zero2, shard_grad_op, full_shard, hybrid_shard
        "micro_batch": 1,  # sequences of 4,096 tokens that a rank computes at once
        "checkpointing": "selective",  # none, selective, full
        ### END SOLUTION
    }


# ---- check: pure, in 60 s, facts only

from fsdplab.teaching.lessons.nb19_planning_at_scale.order import verdict


def cases(rank, n):
    yield ("the job",)


def observe(order):
    what, _, why = verdict(order()).partition(": ")
    return {"the order": what, "_why": why or what}


SAYS = {"the order": lambda got, right: got["_why"]}
