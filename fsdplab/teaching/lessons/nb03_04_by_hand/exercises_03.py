"""Notebook 03: average gradients in hooks, find a missing division, and send them in buckets."""

from __future__ import annotations

from collections.abc import Sequence

from fsdplab.teaching.core.exercise import Call, Case, Choice, Exercise, Question, Slip, Trial, Wrong, edited
from fsdplab.teaching.core.verdicts import Feedback

from . import grading

_RANKS, _STEPS = 3, 2
_PATIENCE = 25.0  # seconds for a case: two steps of some forty small messages, on a busy machine too
_DRIVERS = grading.DRIVERS
_HUNG = (
    "deadlock: a rank waits in a collective that another rank never calls. Every rank must make the same calls in the"
    " same order: no `if rank == 0` around them, and no decision that depends on a rank's own values"
)


def _cases(*arguments: tuple[int, ...]) -> list[Case]:
    """One case for each tuple of further arguments: all ranks must hold the twin's gradients after every step."""
    expected = (grading.twin_gradients(_RANKS, _STEPS),) * _RANKS
    named = [(f", called with {', '.join(f'{value:,}' for value in more)}" if more else "", more) for more in arguments]
    return [Case(f"gradients of a small GPT{words}", ((_STEPS, *more),) * _RANKS, expected) for words, more in named]


# --- the hook

_HOOK = '''\
import torch.distributed as dist


def average_in_hook(parameter):
    """Called as soon as parameter.grad is there: put the average over all ranks in its place."""
    {}
'''
_HOOK_REFERENCE = _HOOK.format("dist.all_reduce(parameter.grad)\n    parameter.grad /= dist.get_world_size()")
_ALL_REDUCE = "dist.all_reduce(parameter.grad)"
_DIVIDE = "parameter.grad /= dist.get_world_size()"
_AVERAGE = "dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)"


def _each_gradient_once(case: Case, trials: Sequence[Trial]) -> Feedback | None:
    """An all_reduce of each gradient sends 2 P (n-1)/n a step; gathering all gradients everywhere sends more."""
    cause = (
        "more travels than an all_reduce needs: the sum alone is wanted, not every rank's gradient; and each gradient"
        " once a step"
    )
    for trial in trials:
        broken = grading.too_many_bytes(
            trial,
            trial.calls,
            _RANKS,
            f"2 P (n-1)/n in each of {_STEPS} steps",
            _STEPS * grading.step_bytes(_RANKS),
            cause,
        )
        if broken:
            return broken
    return None


average_in_hook = Exercise(
    id="03.average_in_hook",
    title="Average in a hook",
    statement="Write average_in_hook(parameter): a hook that leaves the average over all ranks in parameter.grad.",
    stub=_HOOK.format("...  # two lines: add up over the ranks, then divide"),
    reference=_HOOK_REFERENCE,
    hints=(
        "What does every rank hold when the hook is called, and what should every rank hold when it returns?",
        (
            "dist.all_reduce works in place and adds up by default (op=dist.ReduceOp.AVG averages). The number of ranks"
            " is dist.get_world_size(). A hook returns nothing: it changes parameter.grad itself."
        ),
        "`dist.all_reduce(parameter.grad)`, and then divide `parameter.grad` in place by `dist.get_world_size()`.",
    ),
    cases=lambda: _cases(()),
    explain=grading.explain_gradient,
    rules=_each_gradient_once,
    hung=_HUNG,
    world_size=_RANKS,
    tolerance=grading.TOLERANCE,
    time_limit=_PATIENCE,
    driver=(_DRIVERS, "hooked"),
    wrong=(
        Wrong("no division", edited(_HOOK_REFERENCE, (_DIVIDE, "pass")), "never divided"),
        Wrong("no sum", edited(_HOOK_REFERENCE, (_ALL_REDUCE, "pass")), "the others' shares were never added"),
        Wrong(
            "nothing at all",
            edited(_HOOK_REFERENCE, (_ALL_REDUCE, "pass"), (_DIVIDE, "pass")),
            "nothing came from the other ranks",
        ),
        Wrong(
            "two ranks for ever", edited(_HOOK_REFERENCE, ("dist.get_world_size()", "2")), "ask `dist.get_world_size()`"
        ),
        Wrong(
            "divided twice", edited(_HOOK_REFERENCE, (_ALL_REDUCE, f"{_ALL_REDUCE}\n    {_DIVIDE}")), "divided twice"
        ),
        Wrong(
            "a copy",
            edited(
                _HOOK_REFERENCE,
                (_ALL_REDUCE, "average = parameter.grad.clone()\n    dist.all_reduce(average)"),
                (_DIVIDE, "average /= dist.get_world_size()"),
            ),
            "not written back",
        ),
        Wrong(
            "waits for its neighbour",
            edited(
                _HOOK_REFERENCE,
                (_ALL_REDUCE, "dist.recv(parameter.grad, src=(dist.get_rank() + 1) % dist.get_world_size())"),
            ),
            "deadlock",
            ends="hangs",
        ),
        Wrong(
            "returned",
            edited(
                _HOOK_REFERENCE,
                (_ALL_REDUCE, "average = parameter.grad.clone()\n    dist.all_reduce(average)"),
                (_DIVIDE, "return average / dist.get_world_size()"),
            ),
            "a hook returns nothing",
            ends="raises",
        ),
        Wrong(
            "of the parameter",
            edited(_HOOK_REFERENCE, (_ALL_REDUCE, "dist.all_reduce(parameter.detach())")),
            "the others' shares were never added",
        ),
        Wrong(
            "rank 0's gradient",
            edited(_HOOK_REFERENCE, (_ALL_REDUCE, "dist.broadcast(parameter.grad, src=0)"), (_DIVIDE, "pass")),
            "nothing came from the other ranks",
        ),
        Wrong("clears it", edited(_HOOK_REFERENCE, (_DIVIDE, "parameter.grad = None")), "has no gradient any more"),
        Wrong(
            "reduced to rank 0",
            edited(_HOOK_REFERENCE, (_ALL_REDUCE, "dist.reduce(parameter.grad, dst=0)")),
            "on one rank only",
        ),
        Wrong("another factor", edited(_HOOK_REFERENCE, (_DIVIDE, "parameter.grad /= 7")), "here it is divided by 7"),
        Wrong(
            "divided on rank 0",
            edited(_HOOK_REFERENCE, (_DIVIDE, f"if dist.get_rank() == 0:\n        {_DIVIDE}")),
            "wrong on another rank",
        ),
        Wrong("averaged, then divided", edited(_HOOK_REFERENCE, (_ALL_REDUCE, _AVERAGE)), "divided twice"),
        Wrong(
            "a fresh tensor",
            edited(
                _HOOK_REFERENCE,
                (_ALL_REDUCE, "whole = parameter.grad.clone().zero_()\n    dist.all_reduce(whole)"),
                (_DIVIDE, "parameter.grad = whole"),
            ),
            "the gradient is zero",
        ),
        Wrong(
            "gathers everything",
            edited(
                _HOOK_REFERENCE,
                (
                    _ALL_REDUCE,
                    (
                        "parts = [parameter.grad.clone() for _ in range(dist.get_world_size())]\n   "
                        " dist.all_gather(parts, parameter.grad)"
                    ),
                ),
                (_DIVIDE, "parameter.grad = sum(parts) / len(parts)"),
            ),
            "more travels",
        ),
        Wrong(
            "twice", edited(_HOOK_REFERENCE, (_DIVIDE, f"{_DIVIDE}\n    {_ALL_REDUCE}\n    {_DIVIDE}")), "more travels"
        ),
    ),
)

# --- the missing division

_TOGETHER = '''\
import torch
import torch.distributed as dist


def small_together(model):
    """Average matrices in their hooks, and all 1-D parameters with one message after backward."""
    small, n = [], dist.get_world_size()
    def ready(parameter):
        if parameter.dim() == 1:
            small.append(parameter)
        else:
            dist.all_reduce(parameter.grad)
            parameter.grad /= n

    def finish():
        joined = torch.cat([parameter.grad for parameter in small])
        dist.all_reduce(joined)
{}        for parameter, piece in zip(small, joined.split([len(each) for each in small])):
            parameter.grad.copy_(piece)
        small.clear()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ready)
    return finish
'''
_TOGETHER_REFERENCE = _TOGETHER.format("        joined /= n\n")

small_together = Exercise(
    id="03.small_together",
    title="The missing division",
    statement="small_together(model) sends small gradients in one message; a division is missing. Find it.",
    stub=_TOGETHER.format(""),
    reference=_TOGETHER_REFERENCE,
    hints=(
        "The table names the parameters that are off, and by what factor. What do they have in common?",
        "They are all 1-D, so they take the branch that appends to `small`. Follow them from there into `finish`.",
        "`joined` is a sum when `dist.all_reduce(joined)` returns: divide it by `n` before it is cut into pieces.",
    ),
    cases=lambda: _cases(()),
    explain=grading.explain_gradient,
    rules=_each_gradient_once,
    hung=_HUNG,
    world_size=_RANKS,
    tolerance=grading.TOLERANCE,
    time_limit=_PATIENCE,
    driver=(_DRIVERS, "finished"),
    wrong=(
        Wrong("as it was, with a remark", _TOGETHER.format("        # divided already?\n"), "all of them 1-D"),
        Wrong(
            "divided before, in place, for all",
            edited(
                _TOGETHER.format(""),
                (
                    "        small.clear()",
                    (
                        "        for parameter in model.parameters():\n            parameter.grad /= n\n       "
                        " small.clear()"
                    ),
                ),
            ),
            "divided twice",
        ),
        Wrong(
            "divided in both places",
            edited(_TOGETHER_REFERENCE, ("parameter.grad.copy_(piece)", "parameter.grad.copy_(piece / n)")),
            "divided twice",
        ),
        Wrong(
            "divided too late",
            edited(
                _TOGETHER.format(""), ("        small.clear()", "        joined = joined / n\n        small.clear()")
            ),
            "never divided",
        ),
        Wrong(
            "divided by how many there are to send",
            edited(_TOGETHER_REFERENCE, ("joined /= n", "joined /= len(small)")),
            "here it is divided by 22",
        ),
        Wrong("not emptied", edited(_TOGETHER_REFERENCE, ("        small.clear()\n", "")), "once a step"),
        Wrong(
            "divided by two", edited(_TOGETHER_REFERENCE, ("joined /= n", "joined /= 2")), "ask `dist.get_world_size()`"
        ),
    ),
)

# --- buckets

_BUCKETS = '''\
import torch
import torch.distributed as dist


def in_buckets(model, bucket_bytes):
    """Average gradients during backward, a bucket at a time. Returns what sends the last one."""
    bucket = []  # parameters whose gradients are ready and not sent yet
    def ready(parameter):
        {}

    def send():
        {}

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ready)
    return send
'''
_COUNT = "if sum(each.grad.nbytes for each in bucket) >= bucket_bytes:"
_READY = f"bucket.append(parameter)\n        {_COUNT}\n            send()"
_JOIN = "joined = torch.cat([each.grad.flatten() for each in bucket])"
_CUT = "for each, piece in zip(bucket, joined.split([each.numel() for each in bucket])):"
_BACK = "each.grad.copy_(piece.view_as(each))"
_SEND = (
    f"if bucket:\n            {_JOIN}\n            dist.all_reduce(joined)\n            joined /="
    f" dist.get_world_size()\n            {_CUT}\n                {_BACK}\n            bucket.clear()"
)
_BUCKETS_REFERENCE = _BUCKETS.format(_READY, _SEND)
_SIZES = (36_000, 1)  # with the first, a bucket is left when backward ends


_MESSAGES = {"reduce_scatter": 0.5, "all_gather": 0.5}  # the two halves of an all_reduce


def _bucket_rules(case: Case, trials: Sequence[Trial]) -> Feedback | None:
    """Once every gradient is right: each travels once, in few messages, of the asked size, and most of them during
    backward.
    """
    limit = case.arguments[0][1]
    for trial in trials:
        for step, (backward, after) in enumerate(grading.steps_of(trial.calls)):
            broken = _bucket_step(trial, step, backward, after, limit)
            if broken:
                return broken
    return None


def _bucket_step(trial: Trial, step: int, backward: list[Call], after: list[Call], limit: int) -> Feedback | None:
    calls, most = [*backward, *after], grading.most_buckets(limit) + 1
    largest = max((call.nbytes for call in calls), default=0)
    twice = "a gradient travels twice in a step: empty the bucket once it is sent"
    broken = grading.too_many_bytes(trial, calls, _RANKS, "2 P (n-1)/n", grading.step_bytes(_RANKS), twice)
    if broken:
        return broken
    where = str(step)
    if not backward:
        cause = (
            "everything waits for the end of backward, so nothing can travel while backward still computes: call"
            " `send()` from `ready`, as soon as the bucket is full"
        )
        return Feedback(
            "The values are right, but nothing was sent during backward.",
            "the first bucket leaves during backward",
            f"{len(after)} calls, all after backward",
            cause,
            trial.rank,
            where,
        )
    if largest >= limit + grading.LARGEST:
        cause = (
            f"`bucket_bytes` is not what decides: a bucket leaves as soon as it holds {limit:,} bytes or more (bytes,"
            " not elements)"
        )
        return Feedback(
            "The values are right, but a bucket was too large.",
            f"less than {limit + grading.LARGEST:,} bytes (bucket_bytes and one more gradient)",
            f"{largest:,} bytes",
            cause,
            trial.rank,
            where,
        )
    if sum(_MESSAGES.get(call.kind, 1.0) for call in calls) > most:
        cause = (
            "more messages than buckets: one all_reduce for the whole bucket (join it with torch.cat), and only when it"
            " is full"
        )
        return Feedback(
            "The values are right, but too many messages were sent.",
            f"at most {most} collectives a step",
            f"{len(calls)}",
            cause,
            trial.rank,
            where,
        )
    return None


in_buckets = Exercise(
    id="03.in_buckets",
    title="Buckets",
    statement=(
        "Write in_buckets(model, bucket_bytes): gradients gather in a bucket, and a full bucket leaves in one"
        " all_reduce."
    ),
    stub=_BUCKETS.format(
        "...  # into the bucket; send it once it holds bucket_bytes or more",
        "...  # one all_reduce for the whole bucket, averages back into every .grad, bucket empty",
    ),
    reference=_BUCKETS_REFERENCE,
    hints=(
        (
            "The send half is `finish` of the exercise before, with `bucket` in place of `small`; what is new is when"
            " it is called, and that matrices must be flattened."
        ),
        (
            "In `ready`: append, add up `each.grad.nbytes`, and call `send()` when that is at least `bucket_bytes`. In"
            " `send`: `torch.cat` of the flattened gradients, all_reduce, divide, split, copy back, `bucket.clear()`."
        ),
        (
            "`joined = torch.cat([each.grad.flatten() for each in bucket])`; after all_reduce and division, loop over"
            " `zip(bucket, joined.split([each.numel() for each in bucket]))` and"
            " `each.grad.copy_(piece.view_as(each))`; then `bucket.clear()`. The last bucket may be empty: begin with"
            " `if bucket:`."
        ),
    ),
    cases=lambda: _cases(*((size,) for size in _SIZES)),
    explain=grading.explain_gradient,
    rules=_bucket_rules,
    hung=_HUNG,
    world_size=_RANKS,
    tolerance=grading.TOLERANCE,
    time_limit=_PATIENCE,
    driver=(_DRIVERS, "finished"),
    wrong=(
        Wrong(
            "no division",
            edited(_BUCKETS_REFERENCE, ("            joined /= dist.get_world_size()\n", "")),
            "never divided",
        ),
        Wrong(
            "the last bucket stays",
            edited(_BUCKETS_REFERENCE, ("    return send\n", "    return lambda: None\n")),
            "nothing came from the other ranks",
        ),
        Wrong(
            "returns nothing",
            edited(_BUCKETS_REFERENCE, ("    return send\n", "")),
            "nothing came from the other ranks",
        ),
        Wrong(
            "not written back",
            edited(_BUCKETS_REFERENCE, (_BACK, "each.average = piece.view_as(each)")),
            "not written back",
        ),
        Wrong(
            "written back in another order",
            edited(
                _BUCKETS_REFERENCE,
                (
                    "joined.split([each.numel() for each in bucket])",
                    "joined.flip(0).split([each.numel() for each in bucket])",
                ),
            ),
            "wrong parameters",
        ),
        Wrong("never emptied", edited(_BUCKETS_REFERENCE, ("            bucket.clear()\n", "")), "travels twice"),
        Wrong(
            "all at the end",
            edited(_BUCKETS_REFERENCE, (f"        {_COUNT}\n            send()\n", "")),
            "as soon as the bucket is full",
        ),
        Wrong("one message a gradient", edited(_BUCKETS_REFERENCE, (_COUNT, "if True:")), "more messages than buckets"),
        Wrong("another size", edited(_BUCKETS_REFERENCE, (">= bucket_bytes", ">= 40_000")), "not what decides"),
        Wrong(
            "counts elements",
            edited(_BUCKETS_REFERENCE, ("each.grad.nbytes", "each.numel()")),
            "as soon as the bucket is full",
        ),
        Wrong(
            "buckets not joined",
            edited(
                _BUCKETS_REFERENCE,
                (
                    "dist.all_reduce(joined)",
                    "[dist.all_reduce(part) for part in joined.split([each.numel() for each in bucket])]",
                ),
            ),
            "more messages than buckets",
        ),
    ),
)

# --- questions

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

ITEMS = (average_in_hook, small_together, in_buckets, message_count, accumulate, order)
