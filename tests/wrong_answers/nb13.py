"""Wrong answers to the exercises of notebook 13, written from their statements alone."""

import torch
import torch.distributed as dist


def bytes_each__whole_numbers(cut, n):
    optimizer, gradients = (n if state in cut else 1 for state in ("optimizer", "gradients"))
    copy = 2 if "optimizer" in cut and "parameters" not in cut else 0
    return {"working copy": copy, "gradient": 4 // gradients, "master": 4 // optimizer, "moments": 8 // optimizer}


def bytes_each__another_name(cut, n):
    share = {state: 1 / n if state in cut else 1 for state in ("gradients", "optimizer")}
    copy = 2 if "optimizer" in cut and "parameters" not in cut else 0
    master = 4 * share["optimizer"]
    return {"working copy": copy, "gradients": 4 * share["gradients"], "master": master, "moments": 2 * master}


def bytes_each__texts(cut, n):
    share = {state: 1 / n if state in cut else 1 for state in ("gradients", "optimizer")}
    copy = 2 if "optimizer" in cut and "parameters" not in cut else 0
    kept = {"gradient": f"{4 * share['gradients']} bytes", "master": 4 * share["optimizer"]}
    return {"working copy": copy, **kept, "moments": 8 * share["optimizer"]}


def fine_tune__an_attribute_that_nobody_reads(model, shard):
    for name, parameter in model.named_parameters():
        parameter.require_grad = "adapter" in name
    shard(model)
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])


def global_norm__the_last_tensor(gradients):
    total = torch.zeros(())
    for gradient in gradients:
        total = gradient.float().square().sum()
    dist.all_reduce(total)
    return total.sqrt()


def global_norm__in_bf16(gradients):
    total = torch.zeros((), dtype=torch.bfloat16)
    for gradient in gradients:
        total += gradient.bfloat16().square().sum()
    dist.all_reduce(total)
    return total.float().sqrt()


def global_norm__an_object(gradients):
    squares = sum(float(gradient.double().square().sum()) for gradient in gradients)
    each = [None] * dist.get_world_size()
    dist.all_gather_object(each, squares)
    return sum(each) ** 0.5
