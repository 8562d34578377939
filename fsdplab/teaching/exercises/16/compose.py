"""Tensor parallel inside, sharded outside

Write compose(model, mesh): tensor-parallel over mesh['tp'], fully sharded over mesh['dp'].

1. Which of the two must see whole parameters to cut them: tensor parallelism, or sharding?
2. `parallelize` first, on the tp part of the mesh. Then, as always: each block a unit, and the model itself last.
3. `parallelize(model, mesh["tp"])`; `for block in model.blocks: fully_shard(block, mesh=mesh["dp"])`; `return
   fully_shard(model, mesh=mesh["dp"])`.
"""

from fsdplab.engine import fully_shard
from fsdplab.workloads.parallel import parallelize


def compose(model, mesh):
    """Cut `model` over mesh["tp"], shard the rest over mesh["dp"]: a unit a block, then the root."""
    ### BEGIN SOLUTION
    ## ...  # four lines; the order matters
    ## return model
    parallelize(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])
    ### END SOLUTION


# ---- check: on 4 ranks, in 40 s, facts only

from torch.distributed.device_mesh import init_device_mesh

from fsdplab.engine import FSDPModule
from fsdplab.teaching.lessons.nb16_composition.on_ranks import NEAR, at_rest, beside_twin
from fsdplab.workloads import build_model, loss_of

REST = "a query weight at rest"
EXPECTED = {REST: "dp: rows of each share; tp: rows", "units": 3, "trains as the twin": True}


def cases(rank, n):
    yield ("gpt-tiny on 2 x 2, three steps of AdamW",)


def observe(compose):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = compose(build_model("gpt-tiny"), mesh)
    if model is None:
        return {REST: "nothing"}
    rest = at_rest(model.blocks[0].attention.query.weight)
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    drift = beside_twin(model, build_model("gpt-tiny"), loss_of, mesh["dp"].get_local_rank(), 2)["drift"]
    return {REST: rest, "units": units, "trains as the twin": drift < NEAR}


def resting(got, right):
    if got[REST] == "whole on every rank":
        return (
            "nothing is cut in the model that is returned: `parallelize` it, `fully_shard` its blocks and then itself,"
            " and return it, no copy"
        )
    if "tp" not in got[REST]:
        return 'no tensor parallelism: `parallelize(model, mesh["tp"])` comes first'
    if "dp" not in got[REST]:
        return 'nothing is sharded over dp: call `fully_shard(..., mesh=mesh["dp"])` on the blocks, then on the model'
    return "the axes are exchanged: tensor parallelism belongs on `tp`, whose ranks read the same text"


def counted(got, right):
    if not got["units"]:
        return "no unit of the lab's engine: import `fully_shard` from `fsdplab.engine`, whose bytes this lesson counts"
    return f"{got['units']} unit(s): one for each of the two blocks and one for the rest, the blocks first"


SAYS = {
    REST: resting,
    "units": counted,
    "trains as the twin": "it trains, but not as the twin does: see which ranks read the same text, and which sum"
    " gradients",
}
