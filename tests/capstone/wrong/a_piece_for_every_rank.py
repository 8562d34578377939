"""20.special: fewer pieces"""


def rows_of(whole, n):
    return torch.chunk(whole, n)[dist.get_rank()].clone()
