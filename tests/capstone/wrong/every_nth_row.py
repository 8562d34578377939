"""20.shards: every 4th row"""


def rows_of(whole, n):
    return whole[dist.get_rank() :: n].clone()
