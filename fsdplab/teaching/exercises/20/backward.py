"""Stage 3: backward, with gradients reduced

Before a unit's backward its parameters are whole again, afterwards they are shards, and each shard's `.grad` is a
DTensor with this rank's rows of the mean gradient over all ranks. One reduce-scatter for each unit. The root stays
whole from its forward to its backward, which comes at once. After this stage you can train: the check does, beside the
twin.

1. A hook on an output, `output.register_hook(f)`, is called when its gradient arrives: before the unit's backward. One
   on an input that has a gradient is called when the unit's backward is done; take a view of it, `x.view_as(x)`, as
   the input is the output of the block before and has that one's hook already. The root's inputs are tokens, which
   have none.
2. `torch.autograd.Variable._execution_engine.queue_callback(f)`, called during a backward, calls f at its end. There
   the root is resharded and reduced. Take gradients from the whole parameters and set those to None.
3. The reduce-scatter's input is n lines, one for each rank, with zeros where rows do not divide: copy piece r of each
   `gradient.chunk(n)` into line r. Divide what arrives by n, split it, and put each part into `shard.grad`.
"""

# ---- check: of fully_shard, on 4 ranks, in 60 s, facts only

from fsdplab.teaching.lessons.nb20_own_fully_shard import causes
from fsdplab.teaching.lessons.nb20_own_fully_shard import on_ranks as seen
from fsdplab.teaching.lessons.nb20_own_fully_shard.nets import EVEN


def cases(rank, n):
    yield "three steps with SGD", EVEN


observe = seen.trained
EXPECTED = causes.AS_THE_TWIN
SAYS = causes.OF_TRAINING
