"""A ring all-gather

Write ring_all_gather(mine) with isend and recv: every rank talks to its neighbours only, in n - 1 steps.

1. Draw three ranks in a circle. After the first step, which block does each rank own that its right neighbour lacks?
2. At step s, counted from 0, rank r sends the block of rank `(r - s) % n`: first its own, then the one that it has
   just received. It receives that of `(r - s - 1) % n`. If everybody sends first and waits, nobody receives: start the
   send, receive, then wait for the send.
3. In the loop: `sending = dist.isend(whole[(rank - step) % n], dst=(rank + 1) % n)`, then `dist.recv` into
   `whole[(rank - step - 1) % n]` from `(rank - 1) % n`, then `sending.wait()`.
"""

import torch
import torch.distributed as dist


def ring_all_gather(mine):
    """Join every rank's `mine` [k, ...] in rank order: [n * k, ...]. Send to one neighbour only."""
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = mine.new_zeros((n, *mine.shape))  # one block a rank
    whole[rank] = mine
    for step in range(n - 1):
        ### BEGIN SOLUTION  send a block to rank + 1 while receiving one from rank - 1 (mod n)
        sending = dist.isend(whole[(rank - step) % n], dst=(rank + 1) % n)
        dist.recv(whole[(rank - step - 1) % n], src=(rank - 1) % n)
        sending.wait()
        ### END SOLUTION
    return whole.flatten(0, 1)


# ---- check: on 3 ranks, also on 2


def cases(rank, n):
    yield "floats [2, 3] a rank", 100, 100.0 * rank + torch.arange(6.0).reshape(2, 3)  # an element says whose it is
    yield "whole numbers [4] a rank", 1000, 1000 * rank + torch.arange(4)


def observe(ring_all_gather, apart, mine):
    from fsdplab.teaching.core.comm_log import WireLog

    rank, n = dist.get_rank(), dist.get_world_size()
    given = [mine + apart * (owner - rank) for owner in range(n)]
    with WireLog() as log:
        whole = ring_all_gather(mine)
    tensor = isinstance(whole, torch.Tensor)
    facts = {"`mine` afterwards": "as it was given" if torch.equal(mine, given[rank]) else "changed"}
    facts |= {"shape": f"a tensor {list(whole.shape)}" if tensor else f"a {type(whole).__name__}"}
    if tensor:
        blocks = [whole[owner * len(mine) : (owner + 1) * len(mine)] for owner in range(n)]
        facts["the own block"] = blocks[rank]
        facts |= {f"the block that step {step} brings": blocks[(rank - step - 1) % n] for step in range(n - 1)}
        facts["_owners"] = [next((i for i in range(n) if torch.equal(block, given[i])), None) for block in blocks]
    others = dict.fromkeys(call.kind for call in log.calls if call.kind not in ("send", "recv"))
    facts["collectives"] = ", ".join(others) or "none"
    peers = [call.peer for call in log.calls if call.kind == "send"]
    facts["ranks to which this one sends"] = len(set(peers)) or 1  # a thread's messages are not seen
    return facts | {"_rank": rank, "_peers": peers, "_received": sum(call.kind == "recv" for call in log.calls)}


def wrong_place(got, right):
    """What lies in the first wrong place, and how it may have come there."""
    rank, owners, n = got["_rank"], got["_owners"], len(got["_owners"])
    if not got["_peers"] and not got["_received"]:
        return "this rank neither sends nor receives, so nothing comes from the others"
    place = next(far for far in ((rank - step) % n for step in range(n)) if owners[far] != far)
    if got["_received"] < n - 1:
        return f"{n - 1} messages (n - 1) bring the others' blocks, and {got['_received']} came: count the loop's steps"
    if (rank - 1) % n in got["_peers"]:
        return (
            "blocks go round the other way here, to rank - 1: `dst` is `(rank + 1) % n`, and `src` is `(rank - 1) % n`"
        )
    if owners == [(rank - step) % n for step in range(n)]:
        return (
            "blocks lie in the order of their arrival, the own one first; the result wants them in rank order, and what"
            " step s brings is owned by rank `(r - s - 1) % n`"
        )
    if place == rank:
        return (
            "the own block is not in its place, `whole[rank]`: another was received into it, or it was never put there"
        )
    if owners[place] is None:
        return (
            f"no block lies in the place of rank {place}: what arrives belongs into `whole[(rank - step - 1) % n]`."
            " Or the left neighbour sent a row that was still empty: what it has by then is `whole[(rank - step) % n]`"
        )
    said = f"in the place of rank {place} lies the block of rank {owners[place]}: "
    if owners.count(owners[place]) == 1:
        return said + "what arrives at step s is owned by rank `(r - s - 1) % n`"
    if owners[place] == (rank - 1) % n:
        return said + "the same one came at every step. After the first, forward the block that you have just received"
    return said + "it came last, and all messages were received into the same memory: each needs its own place"


def not_to_be_called(got, right):
    """Whether the collective did the work, or came besides isend and recv."""
    if not got["_received"]:
        return "a collective does the whole work; the exercise is to do it with isend and recv"
    return (
        f"no collective may be called, and {got['collectives']} is one: leave it out. `recv` waits for the block of its"
        " step, and nothing else has to be waited for but `sending`"
    )


SAYS = {
    "`mine` afterwards": "a message was received into `mine`, the caller's tensor, perhaps while it was being sent:"
    " take another place",
    "shape": "one tensor is expected, every rank's rows in rank order: join the blocks along the first dimension",
    "the own block": wrong_place,
    "the block that step 0 brings": wrong_place,
    "the block that step 1 brings": wrong_place,
    "collectives": not_to_be_called,
    "ranks to which this one sends": "in a ring a rank sends to one neighbour only, and forwards what it received",
    "hung": "deadlock: a rank waits for a message, or for a receiver, that never comes. Begin the send with isend,"
    " receive, then wait for the send; `dst` is rank + 1 and `src` is rank - 1, both modulo n",
}
