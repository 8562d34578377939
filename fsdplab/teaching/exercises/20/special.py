"""Stage 5: checkpointed blocks, frozen blocks, rows that do not divide

The same training on a net whose rows the ranks do not divide, with two blocks that are checkpointed
(`checkpoint(block, x, use_reentrant=False)`: the block's forward, with your hooks, runs again in the middle of its
backward) and two that are frozen. A frozen unit is needed in backward too, and is resharded there, but reduces nothing.

1. In the second forward of a checkpointed block your hooks are called again. What must they not do then?
2. A flag that is set while a backward runs lets both forward hooks tell the two forwards apart: in the second one
   nothing is resharded, noted or unsharded ahead.
3. Of a frozen unit no gradient arrives, so do not count gradients to find the end of its backward: the gradient of its
   input arrives all the same. Reduce the parameters with `requires_grad` only, and nothing where there are none.
"""

# ---- check: of fully_shard, on 4 ranks, in 60 s, facts only

from fsdplab.teaching.lessons.nb20_own_fully_shard import causes
from fsdplab.teaching.lessons.nb20_own_fully_shard import on_ranks as seen
from fsdplab.teaching.lessons.nb20_own_fully_shard.nets import UNEVEN


def cases(rank, n):
    yield "three steps, blocks 1 and 3 checkpointed, 2 and 4 frozen", UNEVEN


observe = seen.trained
EXPECTED = causes.AS_THE_TWIN
SAYS = causes.OF_TRAINING
