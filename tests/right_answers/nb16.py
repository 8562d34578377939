"""Right answers to the exercises of notebook 16, besides the references."""

from math import prod

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import parallelize_module

from fsdplab.engine import fully_shard
from fsdplab.workloads.parallel import block_plan


def groups_of__by_a_tensor_of_ranks(rank, shape):
    mesh = torch.arange(prod(shape)).view(*shape)
    place = (mesh == rank).nonzero()[0].tolist()
    around = lambda axis: tuple(slice(None) if i == axis else at for i, at in enumerate(place))
    return [mesh[around(axis)].tolist() for axis in range(len(shape))]


def average_expert__counts_the_ranks(gradient, efsdp):
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    dist.all_reduce(gradient, group=efsdp)
    return gradient / ranks


def compose__the_model_first_units_afterwards(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], block_plan(block))
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def average_expert__divides_first(gradient, efsdp):
    gradient = gradient / dist.get_world_size()
    dist.all_reduce(gradient, group=efsdp)
    return gradient
