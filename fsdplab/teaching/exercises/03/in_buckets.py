"""Buckets

Write in_buckets(model, bucket_bytes): gradients are collected in a bucket, and a full bucket leaves in one all_reduce.

1. The send half is `finish` of the exercise before, with `bucket` in place of `small`; what is new is when it is
   called, and that matrices must be flattened.
2. In `ready`: append, add up `each.grad.nbytes`, and call `send()` when that is at least `bucket_bytes`. In `send`:
   `torch.cat` of the flattened gradients, all_reduce, divide, split, copy back, `bucket.clear()`.
3. `joined = torch.cat([each.grad.flatten() for each in bucket])`; after all_reduce and division, loop over `zip(bucket,
   joined.split([each.numel() for each in bucket]))` and `each.grad.copy_(piece.view_as(each))`; then `bucket.clear()`.
   The last bucket may be empty: begin with `if bucket:`.
"""

import torch
import torch.distributed as dist


def in_buckets(model, bucket_bytes):
    """Average gradients during backward, a bucket at a time. Returns what sends the last one."""
    bucket = []  # parameters whose gradients are ready and not sent yet

    def ready(parameter):
        ### BEGIN SOLUTION  into the bucket; send it once it holds bucket_bytes or more
        bucket.append(parameter)
        if sum(each.grad.nbytes for each in bucket) >= bucket_bytes:
            send()
        ### END SOLUTION

    def send():
        ### BEGIN SOLUTION  one all_reduce for the whole bucket, averages back into every .grad, bucket empty
        if bucket:
            joined = torch.cat([each.grad.flatten() for each in bucket])
            dist.all_reduce(joined)
            joined /= dist.get_world_size()
            for each, piece in zip(bucket, joined.split([each.numel() for each in bucket])):
                each.grad.copy_(piece.view_as(each))
            bucket.clear()
        ### END SOLUTION

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ready)
    return send


# ---- check: on 3 ranks, also on 2, within 1e-4, in 25 s


def cases(rank, n):
    for bucket_bytes in (36_000, 1):  # with the first, a bucket is left when backward ends
        yield f"gradients of a small GPT, called with {bucket_bytes:,}", bucket_bytes


def observe(in_buckets, bucket_bytes):
    from fsdplab.teaching.lessons.nb03_ddp_by_hand.on_ranks import gradients_by_step, two_steps

    steps = two_steps(lambda model: in_buckets(model, bucket_bytes))
    return gradients_by_step(steps) | messages(steps, bucket_bytes)


def messages(steps, bucket_bytes):
    """What the steps sent, as facts; a rule that holds reads the same for every way to keep it."""
    sizes = [gradient.nbytes for gradient in steps[0].gradients.values() if gradient is not None]
    largest = max((call.nbytes for step in steps for call in step.messages), default=0)
    halves = ("reduce_scatter", "all_gather")  # of an all_reduce
    count = max(sum(0.5 if call.kind in halves else 1 for call in step.messages) for step in steps)
    few = min(2 * sum(sizes) / bucket_bytes, len(sizes) + 2) + 1  # two buckets that follow each other hold more
    late = all(not step.during for step in steps)
    return {
        "what leaves during backward": f"none of {count:g} messages" if late else "the first buckets",
        "the largest message": f"{largest:,} bytes, where bucket_bytes is {bucket_bytes:,}"
        if largest >= bucket_bytes + max(sizes)
        else "less than bucket_bytes and one gradient more",
        "messages a step": f"{count:g}" if count > few else "one a bucket",
    }


SAYS = {
    "otherwise": "these are other numbers: perhaps pieces were written back to the wrong parameters; cut the bucket in"
    " the order in which it was joined",
    "gradients of step 1": "step 0 was right on this rank, so something is left over from it (a list that was not"
    " emptied?), or it was wrong on another rank (an `if rank == 0`?) and the models have differed since",
    "what leaves during backward": "everything waits for the end of backward, so nothing can travel while backward"
    " still computes: call `send()` from `ready`, as soon as the bucket is full",
    "the largest message": "`bucket_bytes` is not what decides: a bucket leaves as soon as it holds that many bytes or"
    " more (bytes, not elements), and is empty then",
    "messages a step": "more messages than buckets: one all_reduce for the whole bucket (join it with torch.cat), and"
    " only when it is full; a count of its bytes begins at 0 again once it has left",
    "hung": "deadlock: a rank waits in a collective that another rank never calls. Every rank must make the same calls"
    " in the same order: no `if rank == 0` around them, and no decision that depends on a rank's own values",
}
