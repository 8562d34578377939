"""Wrong answers to the exercise of notebook 00, written from its statement alone."""

import torch
import torch.distributed as dist


def hello_ranks__without_its_f():
    """an `f` before the quotes"""
    return "rank {dist.get_rank()} of {dist.get_world_size()}"


def hello_ranks__the_dots_of_the_hint():
    """the stub's dots are still there"""
    return f"rank {dist.get_rank()} of {...}"


def hello_ranks__not_called():
    """a function stands in this text and is not called"""
    return f"rank {dist.get_rank} of {dist.get_world_size}"


def hello_ranks__the_number_of_this_check():
    """the number of ranks is written down"""
    return f"rank {dist.get_rank()} of 3"


def hello_ranks__cards():
    """the fourth word is the number of ranks"""
    return f"rank {dist.get_rank()} of {torch.cuda.device_count()}"


def hello_ranks__a_generator():
    """`yield` makes a generator"""
    yield f"rank {dist.get_rank()} of {dist.get_world_size()}"


def hello_ranks__on_rank_0_alone():
    """`if dist.get_rank() == 0:` lets one rank alone do what stands there"""
    if dist.get_rank() == 0:
        return f"rank {dist.get_rank()} of {dist.get_world_size()}"
