"""20.shards: place it as Shard(0)"""


def rows_of(whole, n):
    return torch.chunk(whole, n, dim=-1)[dist.get_rank()].clone()


def as_dtensor(local, item, unit):
    place = [Shard(len(item.shape) - 1)]
    return DTensor.from_local(local, unit.mesh, place, run_check=False, shape=item.shape, stride=item.stride)
