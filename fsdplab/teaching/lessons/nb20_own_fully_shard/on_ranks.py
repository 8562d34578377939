"""The part of notebook 20 that runs on ranks: what each stage's check sees of a learner's `fully_shard`.

Every fact is empty or 0 where the learner's function does as the unsharded twin does. Else it is a list of sentences,
each with the parameter, the step and what the wrong values are like, or a number of bytes or messages too many.
"""

from __future__ import annotations

import gc
import time
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
LET_GO_S = 0.5  # within which a transport's own thread lets go of a message's tensors
MOST_BLOCKS = {"forward": 4.0, "backward": 4.5}


def sharded(net: Net, fully_shard: FullyShard) -> Any:
    """Call the learner's function on each block and then on the root, as PyTorch's is called.

    Returns what the last call, that on the root, returned.
    """
    returned = None
    for unit in net.units:
        returned = fully_shard(unit)
    return returned


# ---- stage 1


def shards(fully_shard: FullyShard, sizes: Sizes) -> Facts:
    """Shard a net, and return its facts right after: kinds, names, rows, values and bytes of its parameters."""
    right = dict(Net(sizes).named_parameters())
    gc.collect()
    before = alive()
    net = Net(sizes)
    returned = sharded(net, fully_shard)
    parameters = dict(net.named_parameters())
    missing = [name for name in right if name not in parameters]
    new = [f"{name} (new)" for name in parameters if name not in right]
    facts: Facts = {
        RETURNED: _returned(returned, net),
        WRONG_NAMES: [*missing, *new],
        NO_DTENSOR: _no_dtensors(net),
        WRONG_SHARDS: [],
        WRONG_WHOLES: [],
        KEPT: 0,
    }
    if missing or new or facts[NO_DTENSOR]:
        return facts  # what follows reads every parameter as a DTensor
    # first, since `full_tensor()` below makes wholes of its own
    kept_bytes = _kept(net, before)
    for name, value in parameters.items():
        wrong = _told_of_shard(value, right[name])
        if wrong:
            facts[WRONG_SHARDS].append(f"{name}: {wrong}")
    # an all-gather of each parameter: wrong rows of one rank show in the wholes of all
    wholes = {name: value.full_tensor().detach() for name, value in parameters.items()}
    facts[WRONG_WHOLES] = [name for name in right if not _near(wholes[name], right[name])]
    if not facts[WRONG_SHARDS]:
        facts[KEPT] = kept_bytes
    return facts


def _returned(returned: Any, net: Net) -> str:
    """Return in words what the learner's function returned: "the module" where it is the net itself."""
    if returned is net and type(net) is Net:
        return "the module"
    if isinstance(returned, FSDPModule):
        return "PyTorch's FSDPModule"
    return f"a {type(returned).__name__}"


def _told_of_shard(value: Any, right: Tensor) -> str:
    """Return what is wrong with a shard; "" where it is this rank's rows of `right`, the whole parameter."""
    if tuple(value.placements) != (Shard(0),):
        return f"placed as {', '.join(map(repr, value.placements))}"
    if value.requires_grad != right.requires_grad:
        return f"requires_grad={value.requires_grad}"
    if value.dtype != right.dtype:
        return f"dtype {value.dtype}"
    if value.shape != right.shape:
        return f"the whole's shape is {list(value.shape)} and not {list(right.shape)}"

    rank, ranks = dist.get_rank(), dist.get_world_size()
    local = value.to_local().detach()
    pieces = pieces_of(right.detach())
    rows = pieces[rank]
    if local.shape != rows.shape:
        return f"shape {list(local.shape)}, expected {list(rows.shape)}"
    if torch.equal(local, rows):
        return ""
    # rows 1, 5, 9 on rank 1 of 4, in place of one piece of neighbours
    if torch.equal(local, right[rank::ranks]):
        return f"every {ranks}th row"
    for other, piece in enumerate(pieces):
        if local.numel() and torch.equal(local, piece):
            return f"the rows of rank {other}"
    return "other values"


def pieces_of(whole: Tensor) -> list[Tensor]:
    """Return the rows of each rank, as DTensor cuts them: torch.chunk's, and none for ranks that are left over.

    Of 5 rows over 4 ranks: 2, 2, 1 and 0 rows.
    """
    ranks = dist.get_world_size()
    pieces = list(whole.chunk(ranks))
    while len(pieces) < ranks:
        pieces.append(whole[:0])
    return pieces


def _kept(net: Net, before: int) -> int:
    """Return the bytes beyond the shards: behind the parameters, as views keep them, or of tensors held elsewhere."""
    gc.collect()
    shard_bytes = sum(value.to_local().numel() * 4 for value in _dtensors(net))
    allowed = net.block_bytes / 2  # small tensors may stay
    more = alive_beyond(before + shard_bytes, allowed)
    return more if more > allowed else 0


def _dtensors(net: nn.Module) -> list[DTensor]:
    """Return the parameters that are sharded."""
    return [value for value in net.parameters() if isinstance(value, DTensor)]


# ---- stage 2


def forwards(fully_shard: FullyShard, sizes: Sizes) -> Facts:
    """Take two forwards without gradients, with other parameters in the second: values, memory and messages."""
    net, twin = Net(sizes), Net(sizes)
    sharded(net, fully_shard)
    watch = Watch(net)
    tokens = batch(sizes, 0, dist.get_rank())[0]
    wrong_outputs, hooks, kept_bytes = list[str](), list[int](), 0
    for number in (1, 2):
        watch.begin(dict(twin.named_parameters()), f"forward {number}")
        with torch.no_grad(), Order(net.block_bytes) as order:
            # the twin computes on the same tokens, with the same parameters in one piece
            output, right = watch.call(net, tokens), twin(tokens)
        if output is not None and not _near(output, right):
            wrong_outputs.append(f"forward {number}")
        hooks.append(_hooks_of(net))
        not_resharded = _no_dtensors(net)
        kept_bytes = max(kept_bytes, watch.kept())
        if not_resharded or output is None:
            break  # what follows from that tells less
        for model in (net, twin):  # as an optimizer does: the next forward must see it
            for parameter in model.parameters():
                parameter.data.mul_(1.5)
    return {
        AT_USE: watch.wrong,
        OUTPUTS: wrong_outputs,
        SHARDED_AGAIN: not_resharded,
        STAYING: watch.staying,
        # hooks after the second forward less those after the first: each forward may add none
        HOOKS: hooks[-1] - hooks[0],
        # of the last forward, in which each unit is unsharded once
        GATHERS: order.count("all_gather") - len(net.units),
        KEPT: kept_bytes,
        HELD: watch.too_many(),
    }


def _hooks_of(net: nn.Module) -> int:
    """Return the number of forward hooks of all modules."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in net.modules())


def _no_dtensors(net: nn.Module) -> list[str]:
    """Return the names of the parameters that are not sharded."""
    return [name for name, value in net.named_parameters() if not isinstance(value, DTensor)]


class Watch:
    """What the units' parameters are while they compute, and how much memory there is beside the shards, in blocks."""

    def __init__(self, net: Net) -> None:
        self.wrong: list[str] = []
        self.staying: list[str] = []
        self.most = {"forward": 0.0, "backward": 0.0}  # blocks in memory
        self._net, self._block = net, net.block_bytes
        whole_bytes = sum(value.numel() * 4 for value in net.parameters())
        self._root = whole_bytes - len(net.blocks) * self._block  # bytes of what no block has
        self._all = {id(module): name for name, module in net.named_modules()}

    def begin(self, right: dict[str, Tensor], when: str) -> None:
        """Expect these parameters from now on while units compute; none are expected where `right` is empty."""
        self._right = {name: value.detach().clone() for name, value in right.items()}
        gc.collect()
        self._when, self._before = when, alive()
        self._net.told_to(self._probe)

    def call(self, net: Net, tokens: Tensor) -> Tensor | None:
        """Return the net's output; None where a unit's parameters were so wrong that it could not compute."""
        try:
            return net(tokens)
        except RuntimeError:
            if not self.wrong:
                raise
            return None

    def kept(self) -> int:
        """Return the bytes in memory now that were not there when this began; 0 for less than half of a block."""
        gc.collect()
        allowed = self._block / 2
        more = alive_beyond(self._before, allowed)
        return more if more > allowed else 0

    def too_many(self) -> float:
        """Return the blocks too many in memory at some moment."""
        beyond = [most - self._allowed(phase) for phase, most in self.most.items()]
        return round(max(0.0, *beyond), 1)

    def _allowed(self, phase: str) -> float:
        """Return how many blocks may be in memory at any moment of a phase."""
        if phase == "forward":
            return MOST_BLOCKS[phase]
        # in backward a rank also holds its shards of all gradients: of 8 blocks over 4 ranks 2 blocks
        return MOST_BLOCKS[phase] + len(self._net.blocks) / dist.get_world_size()

    def _probe(self, phase: str, unit: str, module: nn.Module) -> None:
        """Note memory and values: each unit calls this while it computes."""
        now = phase
        if torch._C._current_graph_task_id() != -1:  # a checkpointed block computes again
            now = "backward"
        # once there were too many, a further look need not wait
        allowed = max(self._allowed(now), self.most[now])
        # the root is whole all the time, and no block
        at_rest = self._before + self._root
        blocks_held = alive_beyond(at_rest, allowed * self._block) / self._block
        self.most[now] = max(self.most[now], blocks_held)
        self._look_for_whole_units(now, module)
        if phase != "forward" or not self._right:
            return
        owners: Iterable[nn.Module] = module.modules()
        if unit == "root":  # its blocks are units of their own
            owners = [self._net.embed, self._net.norm, self._net.head]
        for owner in owners:
            self._look(owner)

    def _look_for_whole_units(self, phase: str, module: Any) -> None:
        """Note whole blocks that have had their turn: before this one in forward, and after it in backward."""
        if module is self._net:
            return
        blocks = list(self._net.blocks)
        place = blocks.index(module)
        # forward runs up the blocks, and backward down
        had_their_turn = blocks[:place] if phase == "forward" else blocks[place + 1 :]
        for block in had_their_turn:
            name = block.probed_as
            is_noted = any(sentence.startswith(name) for sentence in self.staying)
            if _is_whole(block) and not is_noted:
                self.staying.append(f"{name} in the {phase} of {module.probed_as}")

    def _look(self, owner: nn.Module) -> None:
        """Note the parameters of one module that differ from the expected ones."""
        for short in ("weight", "bias"):
            value = getattr(owner, short, None)
            if value is None:
                continue
            name = f"{self._all[id(owner)]}.{short}"
            difference = likeness(value, self._right[name])
            if difference:
                self.wrong.append(f"{name} in {self._when}: {difference}")


def _is_whole(unit: nn.Module) -> bool:
    """Return whether a parameter of a unit is unsharded and has memory."""
    unsharded = [value for value in unit.parameters() if not isinstance(value, DTensor)]
    return any(value.untyped_storage().nbytes() > 0 for value in unsharded)


def alive() -> int:
    """Return the bytes of all tensors that this process can reach."""
    return sum(storage.nbytes() for storage in living_storages(CPU).values())


def alive_beyond(before: int, allowed: float) -> int:
    """Return the bytes of all tensors beyond `before`; where they are more than `allowed`, once they stay so.

    The thread of gloo that completes a message keeps its tensors for some microseconds after `wait` has returned, and
    for milliseconds on a busy machine. What a learner's function keeps is still there after LET_GO_S.
    """
    until = time.monotonic() + LET_GO_S
    while True:
        more = alive() - before
        if more <= allowed or time.monotonic() > until:
            return more
        time.sleep(0.002)


# ---- what wrong values are like

STILL_SHARDED, OTHER_SHAPE, NOTHING = "still a DTensor", "another shape", "no memory"
UNFILLED, REORDERED, OTHER = "not filled", "the right numbers in other places", "other values"
ZEROS, IN_PART, ROUNDED = "zeros", "zeros in part", "nearly right, as if rounded"


def _near(got: Any, right: Tensor) -> bool:
    """Return whether a tensor is right but for rounding; a DTensor is not."""
    if not isinstance(got, Tensor) or isinstance(got, DTensor) or got.shape != right.shape:
        return False
    right = right.detach()
    allowed = NEAR * right.abs().max() + 1e-12
    return bool((got.detach() - right).abs().max() <= allowed)


def likeness(got: Any, right: Tensor, others: dict[str, Tensor] | None = None) -> str:
    """Return what a wrong value is like; "" for a right one.

    It may be one of `others`, a multiple of the right value, or the right numbers elsewhere.
    """
    if isinstance(got, DTensor):
        return STILL_SHARDED
    if got.shape != right.shape:
        return f"{OTHER_SHAPE}, {list(got.shape)}, expected {list(right.shape)}"
    if got.numel() and not got.untyped_storage().nbytes():
        return NOTHING
    got, right = got.detach(), right.detach()
    # a rank that is left over has no rows: nothing can be wrong
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
    # right wherever it is not 0
    if _near(got, right * (got != 0)):
        return IN_PART
    # the multiple of `right` that is nearest to `got`, by least squares
    factor = float((got * right).sum() / (right * right).sum())
    if abs(factor) > 1e-6 and _near(got, factor * right):
        return f"{factor:.4g} times"
    # the same numbers once both are sorted
    if _near(got.flatten().sort()[0], right.flatten().sort()[0]):
        return REORDERED
    return OTHER


# ---- stages 3 and 5


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return SGD with weight decay.

    Adam hides a gradient's wrong factor, which a check must not; weight decay shows a frozen parameter's zero gradient.
    """
    return torch.optim.SGD(parameters, lr=0.5, weight_decay=0.1)


def trained(fully_shard: FullyShard, sizes: Sizes, steps: int = 3) -> Facts:
    """Train beside the twin: losses, gradients, parameters, memory, and messages of the last step."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    net, before = Net(sizes), dict(Net(sizes).named_parameters())
    sharded(net, fully_shard)
    watch, optimizer = Watch(net), sgd(net.parameters())
    facts: Facts = {name: [] for name in (FROZEN, LOSSES, SHARDED_AGAIN, GRADIENTS, PARAMETERS)}
    for step, right in enumerate(twin_steps(sizes, ranks, steps, sgd)):
        watch.begin(before, f"step {step}")
        with Order(net.block_bytes) as order:
            loss = loss_of(net, *batch(sizes, step, rank))
            loss.backward()
        if not _is_loss(loss.item(), right.losses[rank]):
            facts[LOSSES].append(f"step {step}")
        if not facts[SHARDED_AGAIN]:
            facts[SHARDED_AGAIN] = _no_dtensors(net)
        facts[GRADIENTS] += _wrong_gradients(net, right, step)
        facts[FROZEN] += [f"{name}, step {step}" for name in _frozen_with_gradient(net)]
        optimizer.step()
        optimizer.zero_grad()
        facts[PARAMETERS] += _wrong_parameters(net, right, step)
        # what a step leaves in memory, and what the next one must begin with
        kept_bytes, before = watch.kept(), right.parameters

    until_first_wrong = _until_first_wrong(steps, [*facts[GRADIENTS], *facts[PARAMETERS]])
    for name in (LOSSES, GRADIENTS, PARAMETERS):
        facts[name] = until_first_wrong(facts[name])
    # a frozen block has no gradients to reduce; 1 is the root
    trained_units = sizes.blocks + 1 - len(sizes.frozen)
    return facts | {
        AT_USE: until_first_wrong(watch.wrong),
        STAYING: watch.staying,
        GATHERS: gathers_beyond(order, sizes.blocks),
        REDUCTIONS: order.count("reduce_scatter") - trained_units,
        KEPT: kept_bytes,
        HELD: watch.too_many(),
        "_ranks": ranks,
        "_checkpointed": len(sizes.checkpointed),
    }


def _is_loss(loss: float, expected: float) -> bool:
    """Return whether a loss is the twin's but for rounding; NaN is not."""
    return abs(loss - expected) <= NEAR * abs(expected)


def _frozen_with_gradient(net: Net) -> list[str]:
    """Return the names of the frozen parameters that have a gradient."""
    names = []
    for name, value in net.named_parameters():
        if not value.requires_grad and value.grad is not None:
            names.append(name)
    return names


def _wrong_parameters(net: Net, right: TwinStep, step: int) -> list[str]:
    """Return the shards that are not this rank's rows of the twin's parameters, and what they are like."""
    wrong = []
    for name, value in net.named_parameters():
        whole = right.parameters[name]
        if not isinstance(value, DTensor):
            continue
        if value.shape != whole.shape:
            difference = f"{OTHER_SHAPE}, {list(value.shape)}"
        else:
            difference = likeness(value.to_local(), pieces_of(whole)[dist.get_rank()])
        if difference:
            wrong.append(f"{name}, step {step}: {difference}")
    return wrong


def gathers_beyond(order: Order, blocks: int) -> int:
    """Return how many all-gathers a step has beyond two of each block and one of the root; below 0 for too few.

    The last block may stay whole in between, so that one less is right too.
    """
    # one for each block's forward, one for its backward, and one for the root
    count, most = order.count("all_gather"), 2 * blocks + 1
    if count > most:
        return count - most
    return min(0, count - (most - 1))


def _until_first_wrong(steps: int, wrong: list[str]) -> Callable[[list[str]], list[str]]:
    """Return a filter for sentences about the steps up to the first that leaves a rank with wrong values.

    What is wrong in later steps follows from that. All ranks call this, and agree on the step.
    """
    first_here = steps
    for step in reversed(range(steps)):
        if any(f"step {step}:" in sentence for sentence in wrong):
            first_here = step
    first = torch.tensor(first_here)
    # another rank may be wrong in an earlier step, from which this rank's errors follow
    dist.all_reduce(first, dist.ReduceOp.MIN)
    shown_steps = [f"step {step}" for step in range(int(first) + 1)]

    def until(sentences: list[str]) -> list[str]:
        return [sentence for sentence in sentences if any(step in sentence for step in shown_steps)]

    return until


def _wrong_gradients(net: Net, right: TwinStep, step: int) -> list[str]:
    """Return the gradients that are not this rank's rows of the mean, and what they are like."""
    rank, wrong = dist.get_rank(), []
    for name, value in net.named_parameters():
        mean = right.gradients.get(name)
        if mean is None:
            continue
        # values that a usual mistake leaves in place of the mean
        likely = {"this rank's own": pieces_of(right.of_rank[rank][name])[rank]}
        for other, piece in enumerate(pieces_of(mean)):
            if other != rank:
                likely[f"the rows of rank {other}"] = piece
        difference = _told_of_gradient(value.grad, mean, likely)
        if difference:
            wrong.append(f"{name}, step {step}: {difference}")
    return wrong


def _told_of_gradient(gradient: Any, mean: Tensor, others: dict[str, Tensor]) -> str:
    """Return what is wrong with a gradient; "" where it is this rank's rows of the mean."""
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
    """Replay the third step of a training on the steady clock, and return how many blocks it has in memory."""
    net, order = _third_step(fully_shard, sizes)
    watch = Watch(net)
    # without expected values: memory is looked at, and parameters were compared in the stage before
    watch.begin({}, "step 3")
    loss_of(net, *batch(sizes, 3, dist.get_rank())).backward()
    bars = replayed(order.moments)
    facts: Facts = {UNWAITED: order.unwaited()}
    for phase, most in MOST_EXPOSED_MS.items():
        beyond = exposed_ms(bars, phase) - most
        facts[EXPOSED[phase]] = round(max(0.0, beyond), 1)
    return facts | {
        HELD: watch.too_many(),
        "_leaderboard": {"exposed_ms": round(exposed_ms(bars), 1)},
        "_bars": [[bar.lane, bar.name, bar.start, bar.end] for bar in bars],
    }


def _third_step(fully_shard: FullyShard, sizes: Sizes) -> tuple[Net, Order]:
    """Train three steps; return the net, and the order of the last step."""
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
    """Return the moments of the third step of a net with `payload["blocks"]` blocks, under the function in a file."""
    fully_shard = load_function(Path(payload["file"]), "fully_shard")
    _, order = _third_step(fully_shard, Sizes(blocks=payload["blocks"]))
    return [[moment.what, moment.name, moment.number, moment.blocks] for moment in order.moments]
