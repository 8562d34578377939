"""The questions of notebook 03: a count, and two choices on order and accumulation."""

from __future__ import annotations

from fsdplab.teaching.core.exercise import Choice, Question, Slip

message_count = Question(
    id="03.message_count",
    statement=(
        "A model has 1.5 GB of gradients, in thousands of tensors. With buckets of 25 MB (the default of torch's DDP),"
        " how many all_reduces does a step make?"
    ),
    unit="",
    expected=60.0,
    tolerance=0.02,
    slips=(
        Slip("GB over MB: 1.5 GB are 1500 MB", value=0.06),
        Slip("that is the number of buckets in MiB of gradients: count both in MB", value=1.5 * 1024 / 25),
        Slip("one bucket is one all_reduce: the ring's two halves are inside it", value=120.0),
    ),
    hints=("How many buckets does it take to carry everything once?", "1.5 GB are 1500 MB.", "1500 / 25."),
    explanation="1500 MB / 25 MB, whatever the number of tensors.",
)

accumulate = Choice(
    id="03.accumulate",
    statement=(
        "A step has 4 micro-batches: four times forward and backward, each loss divided by 4, then one optimizer step."
        " `average_in_hook` is on every parameter. What do you get?"
    ),
    options={
        "a": "the right gradient, with the bytes of one backward",
        "b": "the right gradient, with the bytes of four",
        "c": "a wrong gradient: what was averaged before is averaged again",
    },
    right="b",
    because={
        "a": "the hook runs in every backward, four times a step, and each time it sends the whole gradient.",
        "b": (
            "averaging what is equal on all ranks already changes nothing, so the sum is right; but all of it travels"
            " four times. DDP's `no_sync()` keeps the hooks quiet until the last micro-batch."
        ),
        "c": (
            "the part that was averaged before is equal on all ranks, and the average of equal numbers is that number."
        ),
    },
)

order = Choice(
    id="03.order",
    statement=(
        "Why does a bucket take gradients in the order in which they become ready, and not in the order of"
        " `model.parameters()`?"
    ),
    options={
        "a": "so that the first bucket is complete early in backward and can leave while the rest is computed",
        "b": "because `torch.cat` needs the last layer's gradient first",
        "c": "because ranks could otherwise get different sums",
    },
    right="a",
    because={
        "a": (
            "backward begins at the head: a bucket that also waits for the embedding's gradient can only leave at the"
            " very end."
        ),
        "b": "`torch.cat` joins in whatever order it is given.",
        "c": "every rank uses the same order either way; what changes is when a bucket is full.",
    },
)
