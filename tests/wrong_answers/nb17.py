"""Wrong answers to the exercises of notebook 17, written from their statements alone."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdplab.workloads import loss_of


def port__the_root_is_forgotten(model, steps):
    for b in model.blocks:
        fully_shard(b)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    out = []
    for micro in steps:
        opt.zero_grad()
        s = 0.0
        for x, y in micro:
            loss = loss_of(model, x, y) / len(micro)
            loss.backward()
            s += loss.item()
        torch.nn.utils.clip_grad_norm_([p for b in model.blocks for p in b.parameters()], 0.1)
        opt.step()
        out.append(s)
    return out


def port__zero_grad_in_every_micro_batch(model, steps):
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    out = []
    for micro in steps:
        s = 0.0
        for x, y in micro:
            opt.zero_grad()
            loss = loss_of(model, x, y) / len(micro)
            loss.backward()
            s += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        out.append(s)
    return out


def port__reduces_the_first_micro_batch(model, steps):
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    out = []
    for micro in steps:
        s = 0.0
        for i, (x, y) in enumerate(micro):
            model.set_requires_gradient_sync(i == 0)
            loss = loss_of(model, x, y) / len(micro)
            loss.backward()
            s += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        opt.zero_grad()
        out.append(s)
    return out


def port__clips_in_every_micro_batch(model, steps):
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    out = []
    for micro in steps:
        s = 0.0
        for x, y in micro:
            loss = loss_of(model, x, y) / len(micro)
            loss.backward()
            s += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        opt.zero_grad()
        out.append(s)
    return out


def port__a_loss_for_each_micro_batch(model, steps):
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    out = []
    for micro in steps:
        for x, y in micro:
            loss = loss_of(model, x, y) / len(micro)
            loss.backward()
            out.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        opt.zero_grad()
    return out


def port__clips_after_the_step(model, steps):
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    out = []
    for micro in steps:
        opt.zero_grad()
        s = 0.0
        for i, (x, y) in enumerate(micro):
            model.set_requires_gradient_sync(i == len(micro) - 1)
            loss = loss_of(model, x, y) / len(micro)
            loss.backward()
            s += loss.item()
        opt.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        out.append(s)
    return out


def port__clips_each_parameter(model, steps):
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    out = []
    for micro in steps:
        opt.zero_grad()
        s = 0.0
        for i, (x, y) in enumerate(micro):
            model.set_requires_gradient_sync(i == len(micro) - 1)
            loss = loss_of(model, x, y) / len(micro)
            loss.backward()
            s += loss.item()
        for p in model.parameters():
            torch.nn.utils.clip_grad_norm_([p], 0.1)
        opt.step()
        out.append(s)
    return out


def port__optimizer_before_sharding(model, steps):
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    out = []
    for micro in steps:
        opt.zero_grad()
        s = 0.0
        for i, (x, y) in enumerate(micro):
            model.set_requires_gradient_sync(i == len(micro) - 1)
            loss = loss_of(model, x, y) / len(micro)
            loss.backward()
            s += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        out.append(s)
    return out


def port__the_mean_over_ranks(model, steps):
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    out = []
    for micro in steps:
        opt.zero_grad()
        s = 0.0
        for i, (x, y) in enumerate(micro):
            model.set_requires_gradient_sync(i == len(micro) - 1)
            loss = loss_of(model, x, y) / len(micro)
            loss.backward()
            s += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        total = torch.tensor(s)
        dist.all_reduce(total)
        out.append(total.item() / dist.get_world_size())
    return out


def port__in_bf16(model, steps):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for b in model.blocks:
        fully_shard(b, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    out = []
    for micro in steps:
        opt.zero_grad()
        s = 0.0
        for i, (x, y) in enumerate(micro):
            model.set_requires_gradient_sync(i == len(micro) - 1)
            loss = loss_of(model, x, y) / len(micro)
            loss.backward()
            s += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        out.append(s)
    return out


def port__steps_after_every_micro_batch(model, steps):
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    out = []
    for micro in steps:
        s = 0.0
        for x, y in micro:
            opt.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            s += loss.item() / len(micro)
        out.append(s)
    return out


def from_meta__rows_are_never_read(make, read_rows):
    with torch.device("meta"):
        model = make()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)

    model.to_empty(device="cpu")
    return model


def from_meta__built_on_the_host(make, read_rows):
    model = make()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)

    n, r = dist.get_world_size(), dist.get_rank()
    with torch.no_grad():
        for name, p in model.named_parameters():
            c, mine = -(-p.shape[0] // n), p.to_local()
            mine.copy_(read_rows(name, r * c, r * c + len(mine)))
    return model


def from_meta__reads_all_rows(make, read_rows):
    with torch.device("meta"):
        model = make()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)

    model.to_empty(device="cpu")
    n, r = dist.get_world_size(), dist.get_rank()
    with torch.no_grad():
        for name, p in model.named_parameters():
            whole = read_rows(name, 0, len(p))
            p.to_local().copy_(whole.chunk(n)[r])
    return model


def from_meta__rows_of_equal_shards(make, read_rows):
    with torch.device("meta"):
        model = make()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)

    model.to_empty(device="cpu")
    r = dist.get_rank()
    with torch.no_grad():
        for name, p in model.named_parameters():
            mine = p.to_local()
            mine.copy_(
                read_rows(name, r * len(mine), r * len(mine) + len(mine))
                if (r + 1) * len(mine) <= len(p)
                else read_rows(name, len(p) - len(mine), len(p)).flip(0)
            )
    return model


def from_meta__three_written_down(make, read_rows):
    with torch.device("meta"):
        model = make()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mine = parameter.to_local()
            start = dist.get_rank() * -(-parameter.shape[0] // 3)
            mine.copy_(read_rows(name, start, start + len(mine)))
    return model
