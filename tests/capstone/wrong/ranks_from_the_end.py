"""20.shards: the rows of rank"""


def rows_of(whole, n):
    return torch.chunk(whole, n)[n - 1 - dist.get_rank()].clone()
