"""One weight, two uses, one unit

Repair shard_tied(model), so that the tied weight is one parameter in one unit. Blocks stay units.

1. The error message names two remedies. Both are a matter of one line.
2. `fully_shard` takes a list of modules: they become one unit. And what no unit claims is left to the last call,
   fully_shard(model).
3. Replace the two lines by `fully_shard([model.token_embedding, model.head])`, or delete both.
"""

from fsdplab.engine import fully_shard


def shard_tied(model):
    """Shard a GPT whose head shows the embedding's weight; a unit a block, the model is the last."""
    for block in model.blocks:
        fully_shard(block)
    ### BEGIN SOLUTION
    ## fully_shard(model.token_embedding)
    ## fully_shard(model.head)
    fully_shard([model.token_embedding, model.head])
    ### END SOLUTION
    fully_shard(model)


# ---- check: on 3 ranks, within 1e-5, in 20 s, facts only

import torch.distributed as dist

from fsdplab.engine import FSDPModule
from fsdplab.teaching.core.collectives_log import collectives, payload_bytes
from fsdplab.teaching.lessons.nb13_trading.on_ranks import TIED, batch
from fsdplab.workloads import build_model, loss_of


def cases(rank, n):
    yield ("one backward of a small GPT",)


def observe(shard_tied):
    model = build_model(TIED)
    shard_tied(model)
    units = sum(isinstance(block, FSDPModule) for block in model.blocks)
    with collectives() as in_forward:
        loss = loss_of(model, *batch(0, dist.get_rank(), dist.get_world_size()))
    loss.backward()
    gradient = model.token_embedding.weight.grad
    return {
        "blocks that are units": units,
        "the model is a unit": isinstance(model, FSDPModule),
        "units that blocks are in": len({each.unit for each in in_forward if each.unit.startswith("blocks.")}),
        "head and embedding show one parameter": model.head.weight is model.token_embedding.weight,
        "bytes unsharded in the forward": payload_bytes(in_forward, "all_gather"),
        "gradient of the tied weight": gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient,
    }


def unsharded_wrongly(got, right):
    if got["bytes unsharded in the forward"] < right["bytes unsharded in the forward"]:
        return "a parameter is in no unit: nobody averages its gradient over the ranks"
    return "the weight is unsharded twice: one unit holds it for both uses"


SAYS = {
    "blocks that are units": "every block stays a unit of its own: call fully_shard(block) for each",
    "units that blocks are in": "every block stays a unit of its own: one call for each, a list makes one unit of all",
    "the model is a unit": "call fully_shard(model) last: it holds what no unit below it holds",
    "head and embedding show one parameter": "head and embedding have weights of their own now: they began equal, and"
    " from the first update on they differ. Keep the one parameter, in one unit",
    "bytes unsharded in the forward": unsharded_wrongly,
    "gradient of the tied weight": "the tied weight's gradient is the sum of two, from the embedding and from the head,"
    " averaged over the ranks",
    "hung": "the ranks make different calls: shard the same modules in the same order on every rank",
}
