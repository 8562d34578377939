"""Right answers to the exercises of notebook 13, besides the references."""

import torch
import torch.distributed as dist

from fsdplab.engine import fully_shard, shard_model


def bytes_each__by_hand(cut, n):
    optimizer = n if "optimizer" in cut else 1
    kept = {"moments": 8 / optimizer, "master": 4 / optimizer, "gradient": 4 / (n if "gradients" in cut else 1)}
    remade = "parameters" in cut or "optimizer" not in cut
    return {**kept, "working copy": 0 if remade else 2}


def global_norm__a_float(gradients):
    squares = torch.tensor(sum(float(g.double().norm()) ** 2 for g in gradients), dtype=torch.float64)
    dist.all_reduce(squares)
    return squares.item() ** 0.5


def global_norm__gathered(gradients):
    mine = torch.stack([g.float().norm() ** 2 for g in gradients] or [torch.zeros(())]).sum()
    every = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return torch.stack(every).sum().sqrt()


def shard_tied__left_to_the_root(model):
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def shard_tied__shard_model(model):
    shard_model(model, "full_shard")


def fine_tune__freezes_after_sharding(model, shard):
    shard(model)
    model.requires_grad_(False)
    adapters = [p for name, p in model.named_parameters() if "adapter" in name]
    for p in adapters:
        p.requires_grad = True
    return torch.optim.AdamW(adapters)


def fine_tune__all_handed_over(model, shard):
    for name, p in model.named_parameters():
        p.requires_grad = "adapter" in name
    return torch.optim.AdamW(shard(model).parameters(), lr=0.1)


def fit__offload_and_some_recomputation():
    return dict(checkpoint="selective", offload="cpu")


def fit__only_what_differs():
    return dict(precision="bf16", checkpoint="full", offload="cpu")
