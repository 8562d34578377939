"""Right answers to the exercises of notebook 17, besides the references."""

import torch
import torch.distributed as dist

import fsdplab.engine
from fsdplab.workloads import loss_of


def port__with_the_labs_engine(model, steps):
    fsdplab.engine.shard_model(model, "full_shard", units=[type(model.blocks[0])])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    losses = []
    for micro_batches in steps:
        parts = []
        for tokens, targets in micro_batches:
            model.set_requires_gradient_sync(len(parts) + 1 == len(micro_batches))
            parts.append(loss_of(model, tokens, targets) / len(micro_batches))
            parts[-1].backward()
        fsdplab.engine.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.item() for part in parts))
    return losses


def port__by_unit_settings(model, steps):
    from torch.distributed.fsdp import fully_shard as shard

    for module in [*model.blocks, model]:
        shard(module, reshard_after_forward=module is not model)
    optimizer, losses = torch.optim.SGD(list(model.parameters()), lr=0.5), ()
    for micro_batches in steps:
        share, total = 1 / len(micro_batches), 0.0
        *others, last = micro_batches
        model.set_requires_gradient_sync(False)
        for tokens, targets in others:
            loss = loss_of(model, tokens, targets).mul(share)
            loss.backward()
            total += float(loss)
        model.set_requires_gradient_sync(True)
        loss = loss_of(model, *last).mul(share)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses += (total + float(loss),)
    return losses


def from_meta__by_the_labs_engine(make, read_rows):
    torch.set_default_device("meta")
    try:
        model = make()
    finally:
        torch.set_default_device("cpu")
    fsdplab.engine.shard_model(model, "full_shard", units=[type(model.blocks[0])])
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        height = -(-parameter.shape[0] // dist.get_world_size())
        first = min(dist.get_rank() * height, parameter.shape[0])
        parameter.detach().to_local().copy_(read_rows(name, first, min(first + height, parameter.shape[0])))
    return model


def from_meta__by_chunks(make, read_rows):
    with torch.device("meta"):
        model = make()
    from torch.distributed.fsdp import fully_shard as shard

    for module in [*model.blocks, model]:
        shard(module)
    model.to_empty(device="cpu")
    rank, n = dist.get_rank(), dist.get_world_size()
    for name, parameter in model.named_parameters():
        places = torch.arange(parameter.shape[0]).chunk(n)
        if rank < len(places):
            rows = read_rows(name, int(places[rank][0]), int(places[rank][-1]) + 1)
            parameter.data.to_local().copy_(rows)
    return model
