"""Wrong answers to the exercise of notebook 00, written from its statement alone."""

import torch
import torch.distributed as dist


def hello_ranks__without_its_f():
    return "rank {dist.get_rank()} of {dist.get_world_size()}"


def hello_ranks__the_dots_of_the_hint():
    return f"rank {dist.get_rank()} of {...}"


def hello_ranks__not_called():
    return f"rank {dist.get_rank} of {dist.get_world_size}"


def hello_ranks__the_number_of_this_check():
    return f"rank {dist.get_rank()} of 3"


def hello_ranks__cards():
    return f"rank {dist.get_rank()} of {torch.cuda.device_count()}"


def hello_ranks__a_generator():
    yield f"rank {dist.get_rank()} of {dist.get_world_size()}"


def hello_ranks__on_rank_0_alone():
    if dist.get_rank() == 0:
        return f"rank {dist.get_rank()} of {dist.get_world_size()}"
