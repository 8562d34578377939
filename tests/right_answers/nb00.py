"""Right answers to the exercises of notebook 00, besides the references."""

from torch.distributed import get_rank, get_world_size


def hello_ranks__another_import():
    return f"rank {get_rank()} of {get_world_size()}"
