"""Stage 1: shards as parameters

After `fully_shard(module)` each parameter is a DTensor, placed as Shard(0), that holds this rank's rows and nothing
else, under its old name. `state_dict()` and `full_tensor()` work from here on. `fully_shard` returns the module.

1. `module.modules()` and each one's `_parameters` find every parameter and the module that owns it. Which of them did
   an earlier call shard?
2. `whole.chunk(n)` are the rows of all ranks; with fewer rows than ranks the last ranks get none. A chunk is a view and
   keeps the whole alive.
3. `nn.Parameter(DTensor.from_local(rows.clone(), mesh, [Shard(0)], run_check=False, shape=whole.shape,
   stride=whole.stride()), requires_grad=whole.requires_grad)`, put into `owner._parameters[name]`.
"""

# ---- check: of fully_shard, on 4 ranks, in 30 s, facts only

from fsdplab.teaching.lessons.nb20_own_fully_shard import causes
from fsdplab.teaching.lessons.nb20_own_fully_shard import on_ranks as seen
from fsdplab.teaching.lessons.nb20_own_fully_shard.nets import PARTLY_FROZEN


def cases(rank, n):
    yield "a net of eight blocks, two of them frozen, just sharded", PARTLY_FROZEN


observe = seen.shards
EXPECTED = {
    seen.RETURNED: "the module",
    seen.WRONG_NAMES: [],
    seen.NO_DTENSOR: [],
    seen.WRONG_SHARDS: [],
    seen.WRONG_WHOLES: [],
    seen.KEPT: 0,
}
SAYS = causes.OF_SHARDS
