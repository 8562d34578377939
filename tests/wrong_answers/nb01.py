"""Wrong answers to the exercise of notebook 01, written from its statement alone."""

import torch
import torch.distributed as dist


def ring_all_gather__three_written_down(mine):
    rank = dist.get_rank()
    whole = mine.new_zeros((3, *mine.shape))
    whole[rank] = mine
    for step in range(2):
        sending = dist.isend(whole[(rank - step) % 3], dst=(rank + 1) % 3)
        dist.recv(whole[(rank - step - 1) % 3], src=(rank - 1) % 3)
        sending.wait()
    return whole.flatten(0, 1)


def ring_all_gather__into_what_was_given(mine):
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = mine.new_zeros((n, *mine.shape))
    whole[rank] = mine
    for step in range(n - 1):
        sending = dist.isend(mine.clone(), dst=(rank + 1) % n)
        dist.recv(mine, src=(rank - 1) % n)
        sending.wait()
        whole[(rank - step - 1) % n] = mine
    return whole.flatten(0, 1)


def ring_all_gather__what_recv_returns(mine):
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = mine.new_zeros((n, *mine.shape))
    whole[rank] = mine
    for step in range(n - 1):
        sending = dist.isend(whole[(rank - step) % n], dst=(rank + 1) % n)
        whole[(rank - step - 1) % n] = dist.recv(torch.empty_like(mine), src=(rank - 1) % n)
        sending.wait()
    return whole.flatten(0, 1)


def ring_all_gather__round_the_other_way(mine):
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = mine.new_zeros((n, *mine.shape))
    whole[rank] = mine
    for step in range(n - 1):
        sending = dist.isend(whole[(rank - step) % n], dst=(rank - 1) % n)
        dist.recv(whole[(rank - step - 1) % n], src=(rank + 1) % n)
        sending.wait()
    return whole.flatten(0, 1)


def ring_all_gather__the_step_as_a_block(mine):
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = mine.new_zeros((n, *mine.shape))
    whole[rank] = mine
    for step in range(n - 1):
        sending = dist.isend(whole[step], dst=(rank + 1) % n)
        dist.recv(whole[step + 1], src=(rank - 1) % n)
        sending.wait()
    return whole.flatten(0, 1)


def ring_all_gather__its_own_at_every_step(mine):
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = mine.new_zeros((n, *mine.shape))
    whole[rank] = mine
    for step in range(n - 1):
        sending = dist.isend(mine, dst=(rank + 1) % n)
        dist.recv(whole[(rank - step - 1) % n], src=(rank - 1) % n)
        sending.wait()
    return whole.flatten(0, 1)


def ring_all_gather__a_barrier_in_each_step(mine):
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = mine.new_zeros((n, *mine.shape))
    whole[rank] = mine
    for step in range(n - 1):
        sending = dist.isend(whole[(rank - step) % n], dst=(rank + 1) % n)
        dist.recv(whole[(rank - step - 1) % n], src=(rank - 1) % n)
        sending.wait()
        dist.barrier()
    return whole.flatten(0, 1)


def ring_all_gather__an_all_reduce_to_wait(mine):
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = mine.new_zeros((n, *mine.shape))
    whole[rank] = mine
    for step in range(n - 1):
        sending = dist.isend(whole[(rank - step) % n], dst=(rank + 1) % n)
        dist.recv(whole[(rank - step - 1) % n], src=(rank - 1) % n)
        sending.wait()
    dist.all_reduce(torch.zeros(1))
    return whole.flatten(0, 1)


def ring_all_gather__rows_the_other_way_round(mine):
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = mine.new_zeros((n, *mine.shape))
    whole[rank] = mine
    for step in range(n - 1):
        sending = dist.isend(whole[(rank + step) % n], dst=(rank + 1) % n)
        dist.recv(whole[(rank + step + 1) % n], src=(rank - 1) % n)
        sending.wait()
    return whole.flatten(0, 1)
