"""From FSDP1 to fully_shard

Write port(model, steps): the loop of the cell above with `fully_shard` in place of FullyShardedDataParallel. `steps` is
a list of steps, each a list of micro-batches (tokens, targets); return the loss of each step. Every block is a unit,
gradients are accumulated over the micro-batches, reduced once a step and clipped to a norm of 0.1, and SGD steps with
lr=0.5.

1. There is no wrapper: `fully_shard` changes a module in place. In which order, blocks and model? And when may the
   optimizer be built?
2. The accumulation stays as it is: each micro-batch's loss divided by their number. `no_sync()` becomes
   `model.set_requires_gradient_sync(False)`, and True again before the last micro-batch. `model.clip_grad_norm_`
   becomes `torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)`.
3. `for block in model.blocks: fully_shard(block)`, then `fully_shard(model)`, then SGD. In a step: zero_grad; for
   each micro-batch forward, `loss / len(micro_batches)`, backward; clip; step.
"""

import torch
from torch.distributed.fsdp import fully_shard

from fsdplab.workloads import loss_of


def port(model, steps):
    """Train, fully sharded; the loss of each step on this rank: the mean over its micro-batches."""
    losses = []
    ### BEGIN SOLUTION
    ## ...  # shard, then build the optimizer
    ## for micro_batches in steps:
    ##     ...
    ##     losses.append(...)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for micro_batches in steps:
        optimizer.zero_grad()
        total = 0.0
        for number, (tokens, targets) in enumerate(micro_batches):
            model.set_requires_gradient_sync(number == len(micro_batches) - 1)
            loss = loss_of(model, tokens, targets) / len(micro_batches)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(total)
    ### END SOLUTION
    return losses


# ---- check: on 2 ranks, within 1e-5, in 40 s, facts only

from torch.distributed.tensor import DTensor

from fsdplab.teaching.core.comm_log import WireLog
from fsdplab.teaching.lessons.nb17_porting.watched import Watched
from fsdplab.workloads import build_model

UNITS, REST, LOSSES, MOVED = "units", "parameters at rest", "losses", "weights after the last step"
REDUCED = "reductions of a unit in a step"


def cases(rank, n):
    text = torch.Generator().manual_seed(7 + rank)
    tokens = torch.randint(256, (3, 2, 2, 17), generator=text)
    steps = [[(each[:, :-1], each[:, 1:]) for each in step] for step in tokens]
    yield "three steps of two micro-batches", steps, 1.0
    yield "gradients whose norm is below 0.1", steps, 0.02


def built(scale):
    """The model, whose gradients are smaller the smaller the scale of its last norm is."""
    model = build_model("gpt-tiny")
    with torch.no_grad():
        model.final_norm.weight.mul_(scale)
    return model


def observe(port, steps, scale):
    model = built(scale)
    with Watched(model, built(scale), steps[0], len(steps)) as watched, WireLog() as log:
        losses = port(model, steps)
    sharded = [isinstance(each, DTensor) for each in model.parameters()]
    rest = "DTensors" if all(sharded) else "none sharded" if not any(sharded) else "some whole"
    units = sum(hasattr(module, "set_requires_gradient_sync") for module in model.modules())
    seen = {REST: rest, UNITS: units}
    plain = isinstance(losses, (list, tuple))
    seen[LOSSES] = [float(each) for each in losses] if plain else "nothing" if losses is None else "no list"
    whole = model.blocks[1].feed_forward.down.weight.detach()
    seen[MOVED] = float((whole.full_tensor() if isinstance(whole, DTensor) else whole).abs().sum())
    seen[REDUCED] = sum(call.kind == "reduce_scatter" for call in log.calls) / len(steps) / max(units, 1)
    first = seen[LOSSES][0] if plain and losses else 0.0
    return seen | {"_first": watched.why_first(first), "_later": watched.why_later()}


def resting(got, right):
    if got[REST] == "none sharded":
        return "nothing is sharded: fully_shard(block) for every block, then fully_shard(model)"
    return (
        "the model itself is no unit: embeddings, last norm and head stay whole on every rank, and nobody averages"
        " their gradients. `fully_shard(model)` after the blocks"
    )


BETWEEN = (
    "look at what happens between two losses. zero_grad, the mean over micro-batches, the last micro-batch's reduction,"
    " clipping by 0.1, SGD with lr=0.5"
)


def apart(got, right):
    if not isinstance(got[LOSSES], list) or len(got[LOSSES]) != len(right[LOSSES]):
        return "return the loss of every step, in a list"
    first, expected = got[LOSSES][0], right[LOSSES][0]
    if abs(first - expected) > 1e-5 * expected:
        return f"the first step's loss, before anything is trained, is another: {got['_first']}"
    return "the first loss is right, later ones are not: " + (got["_later"] or BETWEEN)


SAYS = {
    REST: resting,
    UNITS: "the whole model is one unit, so all of it is unsharded at once: fully_shard(block) for every block first",
    LOSSES: apart,
    REDUCED: "gradients are reduced once a step, after the last micro-batch: no_sync() of FSDP1 is"
    " `model.set_requires_gradient_sync(False)` for the micro-batches before it",
    MOVED: "losses are right, and the last step is not: is the optimizer's step taken after every one?",
    "hung": "the ranks make different calls: shard the same modules, in the same order, on every rank",
}
