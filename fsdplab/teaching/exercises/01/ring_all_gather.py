"""A ring all-gather

Write ring_all_gather(mine) with isend and recv: every rank talks to its neighbours only, in n - 1 steps.

1. Draw three ranks in a circle. After the first step, which block does each rank own that its right neighbour lacks?
2. At step s, rank r sends the block of rank `(r - s) % n`, which it has just received, and receives that of
   `(r - s - 1) % n`. If everybody sends first and waits, nobody receives: start the send, receive, then wait for the
   send.
3. In the loop: `sending = dist.isend(whole[(rank - step) % n], dst=(rank + 1) % n)`, then `dist.recv` into
   `whole[(rank - step - 1) % n]` from `(rank - 1) % n`, then `sending.wait()`.
"""

import torch
import torch.distributed as dist


def ring_all_gather(mine):
    """Join every rank's `mine` [k, ...] in rank order: [n * k, ...]. Send to one neighbour only."""
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = mine.new_zeros((n, *mine.shape))  # one block a rank
    #! whole = torch.zeros((n, *mine.shape))
    #: a buffer was made with torch's default dtype
    whole[rank] = mine
    #! blocks = list(whole)
    #! dist.all_gather(blocks, mine)
    #! return torch.cat(blocks)
    #: the collective does the whole work; the exercise is to do it with isend and recv
    for step in range(n - 1):
        ### BEGIN SOLUTION  send a block to rank + 1 while receiving one from rank - 1 (mod n)
        sending = dist.isend(whole[(rank - step) % n], dst=(rank + 1) % n)
        #! sending = isend(whole[(rank - step) % n], dst=(rank + 1) % n)
        #: raises: it needs its own imports and helpers
        #! sending = dist.isend(mine, dst=(rank + 1) % n)
        #: the same block arrives at every step: after the first, forward the block that you have just received, not
        #: your own
        #! if step == n - 2:
        #!     continue
        #! sending = dist.isend(whole[(rank - step) % n], dst=(rank + 1) % n)
        #: a block never arrived: count your steps, n - 1 of them, and see that each brings another block: pass on
        #: what you have just received
        #! continue
        #: no block has arrived: the loop neither sends nor receives, or receives into something that is not returned
        #! sending = dist.isend(whole[(rank - step) % n], dst=rank + 1)
        #: raises: the ring is not closed
        dist.recv(whole[(rank - step - 1) % n], src=(rank - 1) % n)
        #! dist.recv(whole[(rank - step + 1) % n], src=(rank - 1) % n)
        #: blocks lie in the wrong places: what arrives at step s is owned by rank `(r - s - 1) % n`
        #! dist.recv(whole[(rank - step - 1) % n], src=rank - 1)
        #: raises: the ring is not closed
        sending.wait()
        ### END SOLUTION
    return whole.flatten(0, 1)
    #! sending = dist.isend(whole[(rank + 1) % n], dst=(rank + 1) % n)
    #! dist.recv(whole[rank], src=(rank - 1) % n)
    #! sending.wait()
    #! return whole.flatten(0, 1)
    #: more messages than needed: after n - 1 steps everybody has every block
    #! return whole.flip(0).flatten(0, 1)
    #: blocks lie in the wrong places: what arrives at step s is owned by rank `(r - s - 1) % n`
    #! return torch.cat([whole[(rank - step) % n] for step in range(n)])
    #: blocks lie in the order of their arrival, the own one first; the result wants them in rank order
    #! return whole
    #: the blocks are stacked or one is missing: join them along the first dimension, [n * k, ...]
    #! return list(whole)
    #: a list of blocks is not yet the result: join them with torch.cat
    #! print(whole)
    #: the function returns nothing


#! def ring_all_gather(mine):
#!     rank, n = dist.get_rank(), dist.get_world_size()
#!     blocks, incoming = [mine], torch.empty_like(mine)
#!     for step in range(n - 1):
#!         out = dist.isend(blocks[-1].clone(), dst=(rank + 1) % n)
#!         dist.recv(incoming, src=(rank - 1) % n)
#!         out.wait()
#!         blocks.append(incoming)
#!     return torch.cat([blocks[(rank - owner) % n] for owner in range(n)])
#: one receive buffer was used for all steps, and the last block overwrote the others: receive into a fresh buffer

#! def ring_all_gather(mine):
#!     rank, n = dist.get_rank(), dist.get_world_size()
#!     whole = mine.new_zeros((n, *mine.shape))
#!     whole[rank] = mine
#!     for step in range(1, n):
#!         out = dist.isend(mine, dst=(rank + step) % n)
#!         dist.recv(whole[(rank - step) % n], src=(rank - step) % n)
#!         out.wait()
#!     return whole.flatten(0, 1)
#: every rank sends its block to everybody; in a ring it talks to one neighbour and forwards what it received

#! def ring_all_gather(mine):
#!     rank, n = dist.get_rank(), dist.get_world_size()
#!     whole = mine.new_zeros((n, *mine.shape))
#!     whole[rank] = mine
#!     for step in range(n - 1):
#!         incoming = torch.empty_like(whole)
#!         out = dist.isend(whole, dst=(rank + 1) % n)
#!         dist.recv(incoming, src=(rank - 1) % n)
#!         out.wait()
#!         whole = torch.maximum(whole, incoming)
#!     return whole.flatten(0, 1)
#: more bytes than needed: everything received so far is sent again; send only the block that arrived last

#! def ring_all_gather(mine):
#!     rank, n = dist.get_rank(), dist.get_world_size()
#!     whole = mine.new_zeros((n, *mine.shape))
#!     whole[rank] = mine
#!     for step in range(n - 1):
#!         dist.send(whole[(rank - step) % n], dst=(rank + 1) % n)
#!         dist.recv(whole[(rank - step - 1) % n], src=(rank - 1) % n)
#!     return whole.flatten(0, 1)
#: hangs: deadlock: a rank waits for a message, or for a receiver, that never comes

#! def ring_all_gather(mine):
#!     rank, n = dist.get_rank(), dist.get_world_size()
#!     whole = mine.new_zeros((n, *mine.shape))
#!     whole[rank] = mine
#!     for step in range(n - 1):
#!         dist.recv(whole[(rank - step - 1) % n], src=(rank - 1) % n)
#!         dist.send(whole[(rank - step) % n], dst=(rank + 1) % n)
#!     return whole.flatten(0, 1)
#: hangs: as above


# ---- check: on 3 ranks


def cases(rank, n):
    yield "floats [2, 3] a rank", 100.0 * rank + torch.arange(6.0).reshape(2, 3)  # every element says whose it is
    yield "whole numbers [4] a rank", 1000 * rank + torch.arange(4)


def observe(ring_all_gather, mine):
    from fsdplab.teaching.core.comm_log import WireLog, kinds_of

    rank, n = dist.get_rank(), dist.get_world_size()
    with WireLog() as log:
        whole = ring_all_gather(mine)
    tensor = isinstance(whole, torch.Tensor)
    facts = {"shape": f"a tensor {list(whole.shape)}" if tensor else f"a {type(whole).__name__}"}
    if tensor:
        blocks = [whole[owner * len(mine) : (owner + 1) * len(mine)] for owner in range(n)]
        facts["the own block"] = blocks[rank]
        facts |= {f"the block that step {step} brings": blocks[(rank - step - 1) % n] for step in range(n - 1)}
    facts["collectives"] = ", ".join(kind for kind in kinds_of(log.calls) if kind not in ("send", "recv")) or "none"
    facts["ranks to which this one sends"] = len({call.peer for call in log.calls if call.kind == "send"})
    return facts


SAYS = {
    "shape": "one tensor is expected, every rank's rows in rank order: join the blocks along the first dimension",
    "the own block": "blocks lie in the wrong places: rank r's own rows begin at row r * k",
    "the block that step 0 brings": "this block is not what the left neighbour sent at step 0, its own: was it"
    " received into the place of rank `(r - 1) % n`?",
    "the block that step 1 brings": "what arrives at step s is owned by rank `(r - s - 1) % n`: forward the block that"
    " you have just received, and receive each into its own place",
    "collectives": "a collective does the whole work; the exercise is to do it with isend and recv",
    "ranks to which this one sends": "in a ring a rank sends to one neighbour only, and forwards what it received",
    "hung": "deadlock: a rank waits for a message, or for a receiver, that never comes. Begin the send with isend,"
    " receive, then wait for the send; `dst` is rank + 1 and `src` is rank - 1, both modulo n",
}
