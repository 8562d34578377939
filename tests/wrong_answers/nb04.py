"""Wrong answers to the exercises of notebook 04, written from their statements alone."""

import torch
import torch.distributed as dist


def rows_of__start_and_how_many(rows, rank, n):
    size = -(-rows // n)
    start = min(rank * size, rows)
    return start, min(size, rows - start)


def rows_of__all_row_numbers(rows, rank, n):
    size = -(-rows // n)
    return list(range(min(rank * size, rows), min((rank + 1) * size, rows)))


def rows_of__arguments_in_another_order(rank, rows, n):
    size = -(-rows // n)
    return min(rank * size, rows), min((rank + 1) * size, rows)


def reduce_rows__the_largest_alone(parameter, mine):
    blocks = list(parameter.grad.chunk(dist.get_world_size()))
    mine.grad = torch.empty_like(mine)
    dist.reduce_scatter(mine.grad, blocks, op=dist.ReduceOp.MAX)
    parameter.grad = None


def reduce_rows__a_window_on_the_whole(parameter, mine):
    blocks = list(parameter.grad.chunk(dist.get_world_size()))
    mine.grad = blocks[dist.get_rank()]
    dist.reduce_scatter(mine.grad, [block.clone() for block in blocks])
    mine.grad /= dist.get_world_size()
    parameter.grad = None


def reduce_rows__takes_what_the_call_returns(parameter, mine):
    blocks = list(parameter.grad.chunk(dist.get_world_size()))
    mine.grad = dist.reduce_scatter(torch.empty_like(mine), blocks)
    parameter.grad = None


def step_and_gather__steps_on_one_rank(pairs, optimizer):
    if dist.get_rank() == 0:
        optimizer.step()
    for parameter, mine in pairs:
        dist.all_gather(list(parameter.detach().chunk(dist.get_world_size())), mine.detach())


def step_and_gather__names_the_step(pairs, optimizer):
    optimizer.step
    for parameter, mine in pairs:
        dist.all_gather(list(parameter.detach().chunk(dist.get_world_size())), mine.detach())


def reduce_rows__three_written_down(parameter, mine):
    mine.grad = torch.empty_like(mine)
    dist.reduce_scatter(mine.grad, list(parameter.grad.chunk(dist.get_world_size())))
    mine.grad /= 3
    parameter.grad = None


def step_and_gather__three_written_down(pairs, optimizer):
    optimizer.step()
    for parameter, mine in pairs:
        dist.all_gather(list(parameter.detach().chunk(3)), mine.detach())
