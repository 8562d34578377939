"""Right answers to the exercises of notebook 01, besides the references."""

import threading

import torch
import torch.distributed as dist
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend


def ring_all_gather__the_other_way_round(mine):
    rank, n = dist.get_rank(), dist.get_world_size()
    blocks = {rank: mine}
    for step in range(n - 1):
        incoming = torch.empty_like(mine)
        receiving = dist.irecv(incoming, src=(rank + 1) % n)
        dist.send(blocks[(rank + step) % n], dst=(rank - 1) % n)
        receiving.wait()
        blocks[(rank + step + 1) % n] = incoming
    return torch.cat([blocks[owner] for owner in range(n)])


def ring_all_gather__batched(mine):
    rank, n = dist.get_rank(), dist.get_world_size()
    have = [mine]
    for _ in range(n - 1):
        have.append(torch.empty_like(mine))
        pair = [P2POp(isend, have[-2], (rank + 1) % n), P2POp(irecv, have[-1], (rank - 1) % n)]
        for work in batch_isend_irecv(pair):
            work.wait()
    return torch.cat([have[(rank - owner) % n] for owner in range(n)])


def ring_all_gather__a_thread_sends(mine):
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = mine.new_zeros((n, *mine.shape))
    whole[rank] = mine
    for step in range(n - 1):
        sender = threading.Thread(target=dist.send, args=(whole[(rank - step) % n], (rank + 1) % n))
        sender.start()
        dist.recv(whole[(rank - step - 1) % n], (rank - 1) % n)
        sender.join()
    return whole.flatten(0, 1)
