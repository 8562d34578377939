"""Your own fully_shard

Write `fully_shard(module)` here, about 150 lines of plain torch and torch.distributed. It shards those parameters of
`module` that no earlier call has sharded, and is called as PyTorch's is: on each block, then on the model. This check
is the last: a GPT in PyTorch's own loop, with AdamW, clip_grad_norm_, and a checkpoint with which a second model goes
on. Losses and parameters must be the unsharded twin's, messages and memory those of the lab's engine.

1. Pass the five stages first. What fails here and not there is memory, messages, or state that a second model shares
   with the first.
2. torch.optim and torch.distributed.checkpoint see `module.parameters()` and `state_dict()` between steps: the same
   DTensor objects all the time, each with its `.grad`.
3. Keep nothing between steps but the shards. A list of units at the top of the file is shared by all models: keep it in
   an object that the root makes.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves, tree_map

# torch 2.13 renamed these two, and warns of the old names
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def fully_shard(module):
    """Shard the parameters of `module` that no earlier call has sharded, as a unit; return it."""
    ### BEGIN SOLUTION
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    places = [
        (owner, name)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and not isinstance(parameter, DTensor)
    ]
    run = Run()
    for inner in module.modules():  # units that are in this module belong to it now
        if hasattr(inner, "_unit"):
            inner._unit.run, inner._unit.is_root = run, False
    module._unit = unit = Unit([Sharded(owner, name, mesh) for owner, name in places], mesh, run)
    module.register_forward_pre_hook(unit.before_forward, with_kwargs=True)
    module.register_forward_hook(unit.after_forward)
    return module


class Sharded:
    """One parameter: `shard`, a DTensor, is what the optimizer sees; `whole` has memory between unshard and reshard."""

    def __init__(self, owner, name, mesh):
        given = getattr(owner, name)
        self.owner, self.name, self.mesh, n = owner, name, mesh, mesh.size()
        self.shape, self.stride, self.numel = given.shape, given.stride(), given.numel()
        self.padded = -(-len(given) // n) * (given.numel() // len(given))  # all ranks send as much as the first
        rows = given.detach().chunk(n)
        mine = rows[dist.get_rank()].clone() if dist.get_rank() < len(rows) else given.detach()[:0].clone()
        self.shard = nn.Parameter(self.as_dtensor(mine), requires_grad=given.requires_grad)
        self.whole = nn.Parameter(torch.empty_like(given), requires_grad=given.requires_grad)
        self.reshard()

    def as_dtensor(self, mine):
        return DTensor.from_local(mine, self.mesh, [Shard(0)], run_check=False, shape=self.shape, stride=self.stride)

    def unshard(self, of_ranks):  # [n, padded]: in each row what one rank had
        self.whole.untyped_storage().resize_(self.numel * self.whole.element_size())
        # .data: autograd keeps `whole` for backward, and must not take this for a change of its value
        self.whole.data.copy_(of_ranks.flatten()[: self.numel].view(self.shape))
        self.owner._parameters[self.name] = self.whole

    def reshard(self):
        self.whole.untyped_storage().resize_(0)
        self.owner._parameters[self.name] = self.shard

    def give_gradient(self, for_ranks):  # [n, padded]: in each row what one rank is to get
        gradient, self.whole.grad = self.whole.grad, None
        if gradient is not None:  # not used on this rank, perhaps on another
            for rows, line in zip(gradient.chunk(len(for_ranks)), for_ranks):
                put(line, rows)

    def take_gradient(self, mine):
        local = self.shard.to_local()
        new = self.as_dtensor(mine[: local.numel()].view(local.shape))
        self.shard.grad = new if self.shard.grad is None else self.shard.grad + new


class Run:
    """What the units of one model share: in which order forwards begin and end, and what is going on."""

    def __init__(self):
        self.begun, self.ended, self.in_backward, self.finish_reduction = [], [], False, lambda: None

    def begin_backward(self):
        if not self.in_backward:
            self.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def end_backward(self):
        for unit in self.begun:  # the root, and whatever had no input with a gradient
            unit.after_backward()
        self.finish_reduction()
        self.finish_reduction, self.in_backward = lambda: None, False


class Unit:
    """The parameters that are unsharded, resharded and reduced together, with one message each time."""

    def __init__(self, parameters, mesh, run):
        self.parameters, self.n, self.run, self.is_root = parameters, mesh.size(), run, True
        self.is_whole, self.gather = False, None

    # ---- unshard, reshard, reduce

    def begin_unshard(self):
        if self.parameters and not self.is_whole and self.gather is None:
            sizes = [each.padded for each in self.parameters]
            every = torch.empty(self.n, sum(sizes))
            mine = every[dist.get_rank()]  # what is sent stands where it arrives, so it takes no memory of its own
            for each, part in zip(self.parameters, mine.split(sizes)):
                put(part, each.shard.detach().to_local())
            self.gather = every, all_gather(every.view(-1), mine, async_op=True)

    def unshard(self):
        self.begin_unshard()
        if self.gather is not None:
            (every, work), self.gather = self.gather, None
            work.wait()
            parts = every.split([each.padded for each in self.parameters], dim=1)
            for each, part in zip(self.parameters, parts):
                each.unshard(part)
        self.is_whole = True

    def reshard(self):
        for each in self.parameters:
            each.reshard()
        self.is_whole = False

    def begin_reduction(self):
        trained = [each for each in self.parameters if each.whole.requires_grad]
        if not any(each.whole.grad is not None for each in trained):
            return
        self.run.finish_reduction()  # the one before: at most one is under way
        sizes = [each.padded for each in trained]
        given = torch.zeros(self.n, sum(sizes))
        for each, part in zip(trained, given.split(sizes, dim=1)):
            each.give_gradient(part)
        mine = given.new_empty(sum(sizes))
        work = reduce_scatter(mine, given.view(-1), async_op=True)

        def finish(given=given):  # `given` must stay until it was sent
            work.wait()
            mine.div_(self.n)
            for each, part in zip(trained, mine.split(sizes)):
                each.take_gradient(part)
            self.run.finish_reduction = lambda: None

        self.run.finish_reduction = finish

    # ---- four hooks

    def before_forward(self, module, args, kwargs):
        self.unshard()
        if self.run.in_backward:  # a checkpointed block that computes again
            return None
        begin_unshard_after(self, self.run.begun)
        note(self, self.run.begun)
        inputs = tree_map(own_view, (args, kwargs))
        on_gradients(inputs, self.after_backward)
        return inputs

    def after_forward(self, module, args, outputs):
        if self.run.in_backward:
            return
        if not self.is_root or not torch.is_grad_enabled():  # the root's backward comes at once
            self.reshard()
        note(self, self.run.ended)
        on_gradients(outputs, self.before_backward)

    def before_backward(self):
        self.run.begin_backward()
        self.unshard()
        begin_unshard_after(self, self.run.ended[::-1])

    def after_backward(self):
        if self.is_whole:
            self.reshard()
            self.begin_reduction()


def put(line, rows):
    """Write rows into their part of a message; what is left over is padding."""
    line[: rows.numel()].copy_(rows.flatten())


def note(unit, order):
    if unit not in order:
        order.append(unit)


def begin_unshard_after(unit, order):
    """Begin the unshard of the unit that comes next, in the order of the first step."""
    if unit in order[:-1]:
        order[order.index(unit) + 1].begin_unshard()


def own_view(value):
    """A view, whose hook is called before those of the output that it is: one unit ends before the next begins."""
    return value.view_as(value) if isinstance(value, torch.Tensor) else value


def on_gradients(values, call):
    """Call when the gradient of one of these tensors arrives in backward."""
    for tensor in tree_leaves(values):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda gradient: call())
    ### END SOLUTION


# ---- check: on 2 ranks, in 90 s, facts only

from fsdplab.teaching.lessons.nb20_own_fully_shard import causes
from fsdplab.teaching.lessons.nb20_own_fully_shard import pytorchs_loop as seen


def cases(rank, n):
    yield ("a GPT in PyTorch's loop, saved and loaded",)


observe = seen.in_pytorchs_loop
EXPECTED = seen.AS_IT_SHOULD
SAYS = causes.OF_THE_LOOP
