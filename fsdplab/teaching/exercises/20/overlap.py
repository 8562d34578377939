"""Stage 4: messages behind computation

While one unit computes, the next one's all-gather is on its way, in forward and in backward; a reduce-scatter is waited
for when the next one is to begin, or at the end. At most one unit is unsharded ahead. The check replays your calls on
a steady clock: a block's forward takes 4 ms, its backward 8 ms, each of its messages 3 ms on one link.

1. `async_op=True` returns a Work; the message travels until you call its `wait()`. Begin an unshard early, wait for it
   late.
2. Which unit comes next? Note the order in which units begin their forwards in the first step; backward has it
   reversed.
3. In before_forward: finish this unit's unshard, then begin that of the next in order. In before_backward: finish this
   one's, begin that of the one before it in order. In after_backward: finish the reduction before, begin this one's.
"""

# ---- check: of fully_shard, on 2 ranks, in 60 s, facts only

from fsdplab.teaching.lessons.nb20_own_fully_shard import causes
from fsdplab.teaching.lessons.nb20_own_fully_shard import on_ranks as seen
from fsdplab.teaching.lessons.nb20_own_fully_shard.nets import EVEN


def cases(rank, n):
    yield "the third step on the steady clock", EVEN


observe = seen.ordered
EXPECTED = {seen.UNWAITED: [], seen.HELD: 0.0, seen.EXPOSED["forward"]: 0.0, seen.EXPOSED["backward"]: 0.0}
SAYS = causes.OF_ORDER
