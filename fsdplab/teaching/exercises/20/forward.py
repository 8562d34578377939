"""Stage 2: unshard before forward, reshard after it

A unit computes with whole parameters, and afterwards its module has shards again and their memory is free: at most two
units besides the root are whole at once. One all-gather for each unit. After this stage an evaluation under
`torch.no_grad()` is that of the unsharded model.

1. `module.register_forward_pre_hook(f, with_kwargs=True)` and `module.register_forward_hook(f)` are the two moments.
2. Each rank sends its rows of all the unit's parameters in one line, each part as long as the first rank's. What
   arrives is n such lines, and a parameter is one part of each: `lines.view(n, -1)`, split along dim 1. gloo wants both
   tensors flat. What is sent may stand in `lines[rank]` at once: then it takes no memory of its own.
3. Keep one whole `nn.Parameter` for each shard all the time, as autograd will need the same tensor again, and free its
   memory in between, `whole.untyped_storage().resize_(0)`. Write through `whole.data`, which autograd does not follow.
"""

# ---- check: of fully_shard, on 2 ranks, in 30 s, facts only

from fsdplab.teaching.lessons.nb20_own_fully_shard import causes
from fsdplab.teaching.lessons.nb20_own_fully_shard import on_ranks as seen
from fsdplab.teaching.lessons.nb20_own_fully_shard.nets import EVEN


def cases(rank, n):
    yield "two evaluations under no_grad", EVEN


observe = seen.forwards
EXPECTED = {
    seen.AT_USE: [],
    seen.OUTPUTS: [],
    seen.SHARDED_AGAIN: [],
    seen.STAYING: [],
    seen.HOOKS: 0,
    seen.GATHERS: 0,
    seen.KEPT: 0,
    seen.HELD: 0.0,
}
SAYS = causes.OF_FORWARD
