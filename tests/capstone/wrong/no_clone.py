"""20.shards: clone it

A chunk is a view, and keeps the whole parameter in memory.
"""


def rows_of(whole, n):
    pieces = list(torch.chunk(whole, n))
    return pieces[dist.get_rank()] if dist.get_rank() < len(pieces) else whole[:0]
