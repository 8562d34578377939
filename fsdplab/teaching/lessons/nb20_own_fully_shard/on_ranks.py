"""The part of notebook 20 that runs on ranks: what each stage's check sees of a learner's `fully_shard`.

Every fact is empty or 0 where the learner's function does as the unsharded twin does. Else it is a list of sentences,
each with the parameter, the step and what the wrong values are like, or a number of bytes or messages too many.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from fsdplab.profiling.memory.live_storages import living_storages
from fsdplab.teaching.core.workspace import load_function
from fsdplab.teaching.lessons.nb20_own_fully_shard.nets import Net, Sizes, TwinStep, batch, loss_of, twin_steps
from fsdplab.teaching.lessons.nb20_own_fully_shard.steady_order import Order, exposed_ms, replayed

FullyShard = Callable[[nn.Module], Any]
Facts = dict[str, Any]
NEAR = 2e-5  # relative to the largest value: sums over 4 ranks in another order
CPU = torch.device("cpu")

RETURNED = "what it returns"
NO_DTENSOR = "parameters that are no DTensor"
WRONG_SHARDS = "shards that are not this rank's rows"
WRONG_WHOLES = "full tensors that differ"
WRONG_NAMES = "parameters missing or renamed"
KEPT = "bytes kept beside the shards"
AT_USE = "parameters with wrong values while a unit computes"
OUTPUTS = "outputs that differ from the unsharded model's"
SHARDED_AGAIN = "parameters that are no DTensor afterwards"
STAYING = "units that stay whole after their turn"
HELD = "blocks too many in memory"
GATHERS = "all-gathers more than needed"
REDUCTIONS = "reduce-scatters more than needed"
LOSSES = "losses that differ from the twin's"
HOOKS = "hooks that a forward adds"
GRADIENTS = "gradients that differ from the twin's"
FROZEN = "frozen parameters with a gradient"
PARAMETERS = "parameters that differ from the twin's after the last step"
MOST_BLOCKS = {"forward": 4.0, "backward": 4.5}


def sharded(net: Net, fully_shard: FullyShard) -> Any:
    """Call the learner's function on each block and then on the root, as PyTorch's is called; what it returned."""
    returned = None
    for unit in net.units:
        returned = fully_shard(unit)
    return returned


# ---- stage 1


def shards(fully_shard: FullyShard, sizes: Sizes) -> Facts:
    """A net right after it was sharded: kinds, names, rows, values and bytes of its parameters."""
    right = dict(Net(sizes).named_parameters())
    gc.collect()
    before = alive()
    net = Net(sizes)
    returned = sharded(net, fully_shard)
    found = dict(net.named_parameters())
    missing = [name for name in right if name not in found] + [f"{name} (new)" for name in found if name not in right]
    what = "PyTorch's FSDPModule" if isinstance(returned, FSDPModule) else f"a {type(returned).__name__}"
    facts: Facts = {
        RETURNED: "the module" if returned is net and type(net) is Net else what,
        WRONG_NAMES: missing,
        NO_DTENSOR: [name for name, value in found.items() if not isinstance(value, DTensor)],
    }
    if missing or facts[NO_DTENSOR]:
        return facts | {WRONG_SHARDS: [], WRONG_WHOLES: [], KEPT: 0}
    kept = _kept(net, before)
    told = {name: _told_of_shard(value, right[name]) for name, value in found.items()}
    wholes = {name: value.full_tensor().detach() for name, value in found.items()}
    return facts | {
        WRONG_SHARDS: [f"{name}: {what}" for name, what in told.items() if what],
        WRONG_WHOLES: [name for name in right if not _near(wholes[name], right[name])],
        KEPT: kept if not any(told.values()) else 0,
    }


def _told_of_shard(value: Any, right: Tensor) -> str:
    """What is wrong with a shard; "" where it is this rank's rows."""
    if tuple(value.placements) != (Shard(0),):
        return f"placed as {', '.join(map(repr, value.placements))}"
    if value.requires_grad != right.requires_grad:
        return f"requires_grad={value.requires_grad}"
    if value.dtype != right.dtype:
        return f"dtype {value.dtype}"
    if value.shape != right.shape:
        return f"the whole's shape is {list(value.shape)} and not {list(right.shape)}"
    pieces, local = pieces_of(right.detach()), value.to_local().detach()
    rank = dist.get_rank()
    if local.shape != pieces[rank].shape:
        return f"shape {list(local.shape)}, expected {list(pieces[rank].shape)}"
    if torch.equal(local, pieces[rank]):
        return ""
    ranks = dist.get_world_size()
    if torch.equal(local, right[rank::ranks]):
        return f"every {ranks}th row"
    theirs = [other for other, piece in enumerate(pieces) if torch.equal(local, piece)] if local.numel() else []
    return f"the rows of rank {theirs[0]}" if theirs else "other values"


def pieces_of(whole: Tensor) -> list[Tensor]:
    """The rows of each rank, as DTensor cuts them: torch.chunk's, and none for ranks that are left over."""
    pieces = list(whole.chunk(dist.get_world_size()))
    return [*pieces, *[whole[:0]] * (dist.get_world_size() - len(pieces))]


def _kept(net: Net, before: int) -> int:
    """Bytes beyond the shards: behind the parameters, as views keep them, or of tensors that something else holds."""
    gc.collect()
    more = alive() - before - sum(value.to_local().numel() * 4 for value in _dtensors(net))
    return more if more > net.block_bytes / 2 else 0


def _dtensors(net: nn.Module) -> list[DTensor]:
    return [value for value in net.parameters() if isinstance(value, DTensor)]


# ---- stage 2


def forwards(fully_shard: FullyShard, sizes: Sizes) -> Facts:
    """Two forwards without gradients, with other parameters in the second: values, memory and messages."""
    net, twin = Net(sizes), Net(sizes)
    sharded(net, fully_shard)
    watch = Watch(net)
    tokens = batch(sizes, 0, dist.get_rank())[0]
    outputs, hooks, kept = list[str](), list[int](), 0
    for number in (1, 2):
        watch.begin(dict(twin.named_parameters()), f"forward {number}")
        with torch.no_grad(), Order(net.block_bytes) as order:
            got, right = watch.call(net, tokens), twin(tokens)
        outputs += [] if got is None or _near(got, right) else [f"forward {number}"]
        hooks.append(sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in net.modules()))
        after, kept = _no_dtensors(net), max(kept, watch.kept())
        if after or got is None:
            break  # what follows from that tells less
        for each in (net, twin):  # as an optimizer does: the next forward must see it
            for parameter in each.parameters():
                parameter.data.mul_(1.5)
    return {
        AT_USE: watch.wrong,
        OUTPUTS: outputs,
        SHARDED_AGAIN: after,
        STAYING: watch.staying,
        HOOKS: hooks[-1] - hooks[0],
        GATHERS: order.count("all_gather") - len(net.units),
        KEPT: kept,
        HELD: watch.too_many(),
    }


def _no_dtensors(net: nn.Module) -> list[str]:
    return [name for name, value in net.named_parameters() if not isinstance(value, DTensor)]


class Watch:
    """What the units' parameters are while they compute, and how much memory there is beside the shards, in blocks."""

    def __init__(self, net: Net) -> None:
        self.wrong: list[str] = []
        self.staying: list[str] = []
        self.most = {"forward": 0.0, "backward": 0.0}
        self._net, self._block = net, net.block_bytes
        self._root = sum(value.numel() * 4 for value in net.parameters()) - len(net.blocks) * self._block
        self._all = {id(module): name for name, module in net.named_modules()}

    def begin(self, right: dict[str, Tensor], when: str) -> None:
        """From now on units must have these parameters while they compute."""
        self._right = {name: value.detach().clone() for name, value in right.items()}
        gc.collect()
        self._when, self._before = when, alive()
        self._net.told_to(self._probe)

    def call(self, net: Net, tokens: Tensor) -> Tensor | None:
        """The net's output; None where a unit's parameters were so wrong that it could not compute."""
        try:
            return net(tokens)
        except RuntimeError:
            if not self.wrong:
                raise
            return None

    def kept(self) -> int:
        """Bytes in memory now that were not there when this began, unless they are less than half of a block."""
        gc.collect()
        more = alive() - self._before
        return more if more > self._block / 2 else 0

    def too_many(self) -> float:
        """Blocks too many in memory at some moment."""
        gradients = {"forward": 0.0, "backward": len(self._net.blocks) / dist.get_world_size()}
        more = max(most - MOST_BLOCKS[phase] - gradients[phase] for phase, most in self.most.items())
        return round(max(0.0, more), 1)

    def _probe(self, phase: str, unit: str, module: nn.Module) -> None:
        held = (alive() - self._before - self._root) / self._block
        now = "backward" if torch._C._current_graph_task_id() != -1 else phase  # a checkpointed block computes again
        self.most[now] = max(self.most[now], held)
        self._look_for_whole_units(now, module)
        if phase == "forward" and self._right:
            for owner in [self._net.embed, self._net.norm, self._net.head] if unit == "root" else module.modules():
                self._look(owner)

    def _look_for_whole_units(self, phase: str, module: Any) -> None:
        """Blocks before this one in forward, and after it in backward, have had their turn."""
        if module is self._net:
            return
        blocks = list(self._net.blocks)
        at = blocks.index(module)
        for block in blocks[:at] if phase == "forward" else blocks[at + 1 :]:
            name = block.probed_as
            if _is_whole(block) and not any(each.startswith(name) for each in self.staying):
                self.staying.append(f"{name} in the {phase} of {module.probed_as}")

    def _look(self, owner: nn.Module) -> None:
        for short in ("weight", "bias"):
            value, name = getattr(owner, short, None), f"{self._all[id(owner)]}.{short}"
            if value is not None and (what := likeness(value, self._right[name])):
                self.wrong.append(f"{name} in {self._when}: {what}")


def _is_whole(unit: nn.Module) -> bool:
    return any(not isinstance(value, DTensor) and value.untyped_storage().nbytes() > 0 for value in unit.parameters())


def alive() -> int:
    """Bytes of all tensors that this process can reach."""
    return sum(storage.nbytes() for storage in living_storages(CPU).values())


# ---- what wrong values are like

STILL_SHARDED, OTHER_SHAPE, NOTHING = "still a DTensor", "another shape", "no memory"
UNFILLED, REORDERED, OTHER = "not filled", "the right numbers in other places", "other values"
ZEROS, IN_PART, ROUNDED = "zeros", "zeros in part", "nearly right, as if rounded"


def _near(got: Any, right: Tensor) -> bool:
    if not isinstance(got, Tensor) or isinstance(got, DTensor) or got.shape != right.shape:
        return False
    return bool((got.detach() - right.detach()).abs().max() <= NEAR * right.detach().abs().max() + 1e-12)


def likeness(got: Any, right: Tensor, others: dict[str, Tensor] | None = None) -> str:
    """What a wrong value is like: one of `others`, a multiple, the right numbers elsewhere; "" for a right one."""
    if isinstance(got, DTensor):
        return STILL_SHARDED
    if got.shape != right.shape:
        return f"{OTHER_SHAPE}, {list(got.shape)}, expected {list(right.shape)}"
    if got.numel() and not got.untyped_storage().nbytes():
        return NOTHING
    got, right = got.detach(), right.detach()
    if not got.numel() or _near(got, right):
        return ""
    if not got.isfinite().all():
        return UNFILLED
    if not got.any():
        return ZEROS
    for name, other in (others or {}).items():
        if _near(got, other):
            return name
    if (got - right).abs().max() <= 0.02 * right.abs().max():
        return ROUNDED
    if _near(got, right * (got != 0)):
        return IN_PART
    factor = float((got * right).sum() / (right * right).sum())
    if abs(factor) > 1e-6 and _near(got, factor * right):
        return f"{factor:.4g} times"
    return REORDERED if _near(got.flatten().sort()[0], right.flatten().sort()[0]) else OTHER


# ---- stages 3 and 5


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Adam hides a gradient's wrong factor, which a check must not; weight decay shows a frozen one's zero gradient."""
    return torch.optim.SGD(parameters, lr=0.5, weight_decay=0.1)


def trained(fully_shard: FullyShard, sizes: Sizes, steps: int = 3) -> Facts:
    """Steps of training beside the twin: losses, gradients, parameters, memory and messages of the last step."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    net, before = Net(sizes), dict(Net(sizes).named_parameters())
    sharded(net, fully_shard)
    watch, optimizer = Watch(net), sgd(net.parameters())
    found: Facts = {name: [] for name in (FROZEN, LOSSES, SHARDED_AGAIN, GRADIENTS, PARAMETERS)}
    for step, right in enumerate(twin_steps(sizes, ranks, steps, sgd)):
        watch.begin(before, f"step {step}")
        with Order(net.block_bytes) as order:
            loss = loss_of(net, *batch(sizes, step, rank))
            loss.backward()
        expected = right.losses[rank]
        found[LOSSES] += [] if abs(loss.item() - expected) <= NEAR * abs(expected) else [f"step {step}"]
        found[SHARDED_AGAIN] = found[SHARDED_AGAIN] or _no_dtensors(net)
        found[GRADIENTS] += _wrong_gradients(net, right, step)
        found[FROZEN] += [
            f"{name}, step {step}"
            for name, value in net.named_parameters()
            if not value.requires_grad and value.grad is not None
        ]
        optimizer.step()
        optimizer.zero_grad()
        found[PARAMETERS] += _wrong_parameters(net, right, step)
        kept, before = watch.kept(), right.parameters
    told = _until_first_wrong(steps, [*found[GRADIENTS], *found[PARAMETERS]])
    return found | {
        AT_USE: told(watch.wrong),
        **{name: told(found[name]) for name in (LOSSES, GRADIENTS, PARAMETERS)},
        STAYING: watch.staying,
        GATHERS: gathers_beyond(order, sizes.blocks),
        REDUCTIONS: order.count("reduce_scatter") - (sizes.blocks + 1 - len(sizes.frozen)),
        KEPT: kept,
        HELD: watch.too_many(),
        "_ranks": ranks,
        "_checkpointed": len(sizes.checkpointed),
    }


def _wrong_parameters(net: Net, right: TwinStep, step: int) -> list[str]:
    """The shards that are not this rank's rows of the twin's parameters."""
    found = []
    for name, value in net.named_parameters():
        whole = right.parameters[name]
        if not isinstance(value, DTensor):
            continue
        what = f"{OTHER_SHAPE}, {list(value.shape)}" if value.shape != whole.shape else ""
        if what := what or likeness(value.to_local(), pieces_of(whole)[dist.get_rank()]):
            found.append(f"{name}, step {step}: {what}")
    return found


def gathers_beyond(order: Order, blocks: int) -> int:
    """All-gathers of a step beyond two of each block and one of the root; the last block may stay whole in between."""
    count, most = order.count("all_gather"), 2 * blocks + 1
    return count - most if count > most else min(0, count - (most - 1))


def _until_first_wrong(steps: int, wrong: list[str]) -> Callable[[list[str]], list[str]]:
    """What is told of the steps up to the first that leaves a rank with wrong values: the rest follows from that."""
    mine = (step for step in range(steps) if any(f"step {step}:" in each for each in wrong))
    first = torch.tensor(min(mine, default=steps))
    dist.all_reduce(first, dist.ReduceOp.MIN)
    return lambda told: [each for each in told if any(f"step {step}" in each for step in range(int(first) + 1))]


def _wrong_gradients(net: Net, right: TwinStep, step: int) -> list[str]:
    rank, found = dist.get_rank(), []
    for name, value in net.named_parameters():
        if (mean := right.gradients.get(name)) is None:
            continue
        what = _told_of_gradient(
            value.grad,
            mean,
            {
                "this rank's own": pieces_of(right.of_rank[rank][name])[rank],
                **{f"the rows of rank {other}": piece for other, piece in enumerate(pieces_of(mean)) if other != rank},
            },
        )
        found += [f"{name}, step {step}: {what}"] if what else []
    return found


def _told_of_gradient(gradient: Any, mean: Tensor, others: dict[str, Tensor]) -> str:
    if gradient is None:
        return "none"
    if not isinstance(gradient, DTensor):
        return "no DTensor"
    return likeness(gradient.to_local(), pieces_of(mean)[dist.get_rank()], others)


# ---- stage 4

UNWAITED = "messages that nobody waits for"
EXPOSED = {"forward": "ms exposed in forward, too many", "backward": "ms exposed in backward, too many"}
MOST_EXPOSED_MS = {"forward": 3.6, "backward": 6.6}  # the first all-gathers; another, and the last reductions


def ordered(fully_shard: FullyShard, sizes: Sizes) -> Facts:
    """The third step of a training on the steady clock, and how many blocks it has in memory."""
    net, order = _third_step(fully_shard, sizes)
    watch = Watch(net)
    watch.begin({}, "step 3")
    loss_of(net, *batch(sizes, 3, dist.get_rank())).backward()
    bars = replayed(order.moments)
    over = {EXPOSED[phase]: exposed_ms(bars, phase) - most for phase, most in MOST_EXPOSED_MS.items()}
    return {
        UNWAITED: order.unwaited(),
        **{name: round(max(0.0, ms), 1) for name, ms in over.items()},
        HELD: watch.too_many(),
        "_leaderboard": {"exposed_ms": round(exposed_ms(bars), 1)},
        "_bars": [[bar.lane, bar.name, bar.start, bar.end] for bar in bars],
    }


def _third_step(fully_shard: FullyShard, sizes: Sizes) -> tuple[Net, Order]:
    net = Net(sizes)
    sharded(net, fully_shard)
    optimizer = sgd(net.parameters())
    for step in range(3):
        with Order(net.block_bytes) as order:
            net.told_to(order.computed)
            loss_of(net, *batch(sizes, step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, order


def order_of(payload: dict[str, Any]) -> list[list[Any]]:
    """The moments of the third step of a net with `payload["blocks"]` blocks, under the function in a file."""
    fully_shard = load_function(Path(payload["file"]), "fully_shard")
    net, order = _third_step(fully_shard, Sizes(blocks=payload["blocks"]))
    return [[each.what, each.name, each.number, each.blocks] for each in order.moments]
