"""A right fully_shard in functions, as a learner might write it; files in `right` and `wrong` replace some of them."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def fully_shard(module):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    unit = SimpleNamespace(
        module=module, mesh=mesh, n=mesh.size(), items=[], whole=False, gather=None, root=True,
        shared=SimpleNamespace(forward=[], backward=[], now_backward=False, reduction=None),
    )  # fmt: skip
    for owner, name, parameter in own_parameters(module):
        unit.items.append(sharded(owner, name, parameter, unit))
    adopt_inner_units(module, unit)
    module.fsdp_unit = unit
    module.register_forward_pre_hook(lambda module, args: before_forward(unit, args))
    module.register_forward_hook(lambda module, args, output: after_forward(unit, output))
    return module


def own_parameters(module):
    for owner in list(module.modules()):
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None and not isinstance(parameter, DTensor):
                yield owner, name, parameter


def adopt_inner_units(module, unit):
    for inner in module.modules():
        if hasattr(inner, "fsdp_unit"):
            inner.fsdp_unit.shared, inner.fsdp_unit.root = unit.shared, False


def sharded(owner, name, parameter, unit):
    item = SimpleNamespace(
        owner=owner, name=name, shape=parameter.shape, stride=parameter.stride(), numel=parameter.numel(),
        each=-(-parameter.shape[0] // unit.n) * (parameter.numel() // parameter.shape[0]),
        train=parameter.requires_grad,
    )  # fmt: skip
    item.shard = nn.Parameter(as_dtensor(rows_of(parameter.detach(), unit.n), item, unit), requires_grad=item.train)
    item.full = nn.Parameter(torch.zeros(parameter.shape), requires_grad=item.train)
    free(item)
    return item


def rows_of(whole, n):
    pieces = list(torch.chunk(whole, n))
    return pieces[dist.get_rank()].clone() if dist.get_rank() < len(pieces) else whole[:0].clone()


def as_dtensor(local, item, unit):
    return DTensor.from_local(local, unit.mesh, [Shard(0)], run_check=False, shape=item.shape, stride=item.stride)


def free(item):
    item.full.untyped_storage().resize_(0)
    item.owner._parameters[item.name] = item.shard


# ---- messages


def begin_gather(unit):
    if unit.whole or unit.gather is not None or not unit.items:
        return
    lines = []
    for item in unit.items:
        local = item.shard.to_local().detach().flatten()
        lines.append(pad(local, (0, item.each - local.numel())))
    line = torch.cat(lines)
    buffer = torch.empty(unit.n * line.numel())
    unit.gather = (buffer, all_gather(buffer, line, async_op=True))


def finish_gather(unit):
    begin_gather(unit)
    if unit.gather is not None:
        buffer, work = unit.gather
        unit.gather = None
        work.wait()
        copy_out(unit, buffer)
    unit.whole = True


def copy_out(unit, buffer):
    lines, at = buffer.view(unit.n, -1), 0
    for item in unit.items:
        fill(item, lines[:, at : at + item.each].flatten()[: item.numel].view(item.shape))
        at += item.each


def fill(item, values):
    item.full.untyped_storage().resize_(4 * item.numel)
    item.full.data.copy_(values)
    item.owner._parameters[item.name] = item.full


def release(unit):
    for item in unit.items:
        free(item)
    unit.whole = False


def reduce(unit):
    items = [item for item in unit.items if item.train]
    if all(item.full.grad is None for item in items):
        return
    finish_reduction(unit.shared)
    lines = torch.cat([to_lines(item, unit) for item in items], dim=1)
    mine = torch.empty(lines.shape[1])
    unit.shared.reduction = (unit, items, lines, mine, reduce_scatter(mine, lines.flatten(), async_op=True))


def to_lines(item, unit):
    gradient, item.full.grad = item.full.grad, None
    if gradient is None:
        gradient = torch.zeros(item.shape)
    return pad(gradient.flatten(), (0, unit.n * item.each - item.numel)).view(unit.n, item.each)


def finish_reduction(shared):
    if shared.reduction is None:
        return
    (unit, items, _, mine, work), shared.reduction = shared.reduction, None
    work.wait()
    mean, at = averaged(mine, unit), 0
    for item in items:
        local = item.shard.to_local()
        set_gradient(item, mean[at : at + local.numel()].view(local.shape), unit)
        at += item.each


def averaged(mine, unit):
    return mine / unit.n


def set_gradient(item, rows, unit):
    gradient = as_dtensor(rows, item, unit)
    item.shard.grad = gradient if item.shard.grad is None else item.shard.grad + gradient


# ---- hooks


def before_forward(unit, args):
    finish_gather(unit)
    if unit.shared.now_backward:
        return
    ahead(unit, unit.shared.forward)
    if unit not in unit.shared.forward:
        unit.shared.forward.append(unit)
    for tensor in args:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda gradient: after_backward(unit))


def after_forward(unit, output):
    if unit.shared.now_backward:
        return
    if not unit.root or not torch.is_grad_enabled():
        release(unit)
    if unit not in unit.shared.backward:
        unit.shared.backward.insert(0, unit)
    if output.requires_grad:
        output.register_hook(lambda gradient: before_backward(unit))


def before_backward(unit):
    if not unit.shared.now_backward:
        unit.shared.now_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(lambda: end_of_backward(unit.shared))
    finish_gather(unit)
    ahead(unit, unit.shared.backward)


def after_backward(unit):
    if unit.whole:
        release(unit)
        reduce(unit)


def end_of_backward(shared):
    for unit in shared.forward:
        after_backward(unit)
    finish_reduction(shared)
    shared.now_backward = False


def ahead(unit, order):
    if unit in order and order[-1] is not unit:
        begin_gather(order[order.index(unit) + 1])
