"""The divide factor of expert gradients

Write average_expert(gradient, efsdp): sum an expert's gradient over the right ranks and divide by the right number.

1. All ranks' tokens come to an expert. How many ranks' tokens does the mean loss count?
2. Sum over the ranks that hold the same experts; the tokens of the others have come to you already, by all-to-all.
3. `dist.all_reduce(gradient, group=efsdp)`, then divide by `dist.get_world_size()`.
"""

import torch.distributed as dist


def average_expert(gradient, efsdp):
    """Average the gradient of this rank's experts; `efsdp` is the group of those that hold the same."""
    ### BEGIN SOLUTION
    ## ...  # sum over whom? divide by what?
    ## return gradient
    dist.all_reduce(gradient, group=efsdp)
    return gradient / dist.get_world_size()
    ### END SOLUTION


# ---- check: on 4 ranks, also on 2, within 1e-6

import torch
from torch.distributed.device_mesh import init_device_mesh


def cases(rank, n):
    yield "four ranks as 2 x 2", torch.arange(6.0).reshape(2, 3) + 10.0**rank


def observe(average_expert, gradient):
    shape = 2, dist.get_world_size() // 2  # on four ranks r and r + 2 hold the same experts
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("efsdp", "ep"))
    return average_expert(gradient, mesh["efsdp"].get_group())


SAYS = {"otherwise": "sum over the ranks that hold the same experts, then divide by the number of all ranks"}
