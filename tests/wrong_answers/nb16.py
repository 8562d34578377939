"""Wrong answers to the exercises of notebook 16, written from their statements alone."""

from copy import deepcopy
from math import prod

import torch.distributed as dist

from fsdplab.engine import fully_shard
from fsdplab.workloads.parallel import parallelize


def groups_of__the_same_place(rank, shape):
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    place = [rank // stride % size for stride, size in zip(strides, shape)]
    return [
        [other for other in range(prod(shape)) if other // stride % size == at]
        for stride, size, at in zip(strides, shape, place)
    ]


def groups_of__the_places(rank, shape):
    return [list(range(size)) for size in shape]


def groups_of__all_groups_of_an_axis(rank, shape):
    groups = []
    for axis, size in enumerate(shape):
        stride = prod(shape[axis + 1 :])
        firsts = [first for first in range(prod(shape)) if first // stride % size == 0]
        groups.append([list(range(first, first + size * stride, stride)) for first in firsts])
    return groups


def groups_of__without_the_rank(rank, shape):
    groups = []
    for axis, size in enumerate(shape):
        stride = prod(shape[axis + 1 :])
        first = rank - rank // stride % size * stride
        groups.append([other for other in range(first, first + size * stride, stride) if other != rank])
    return groups


def average_expert__sums_a_copy(gradient, efsdp):
    total = gradient.clone()
    dist.all_reduce(total, group=efsdp)
    return gradient / dist.get_world_size()


def average_expert__divides_twice(gradient, efsdp):
    gradient /= dist.get_world_size()
    dist.all_reduce(gradient, group=efsdp)
    return gradient / dist.get_world_size()


def average_expert__multiplies(gradient, efsdp):
    dist.all_reduce(gradient, group=efsdp)
    return gradient * dist.get_world_size()


def compose__a_copy(model, mesh):
    cut = deepcopy(model)
    parallelize(cut, mesh["tp"])
    for block in cut.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(cut, mesh=mesh["dp"])
    return model


def average_expert__four_written_down(gradient, efsdp):
    dist.all_reduce(gradient, group=efsdp)
    return gradient / 4


def average_expert__twice_its_group(gradient, efsdp):
    dist.all_reduce(gradient, group=efsdp)
    return gradient / (2 * dist.get_world_size(efsdp))
