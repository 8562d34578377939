"""torch cuts the parameters, without messages."""

from torch.distributed.tensor import distribute_tensor


def rows_of(whole, n):
    mesh = init_device_mesh("cpu", (n,))
    return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None).to_local().clone()
