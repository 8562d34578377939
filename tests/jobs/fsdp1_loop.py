"""A loop with FullyShardedDataParallel, PyTorch's first FSDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0) for _ in range(3))),
        auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for step in range(16):
        loss = model(torch.randn(4, 32, 64)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {dist.get_rank()} step {step} loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
