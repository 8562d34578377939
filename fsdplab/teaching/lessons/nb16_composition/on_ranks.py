"""The part of lesson 16 that runs on the ranks: composed models are trained beside their twins.

Bytes are counted per mesh axis: what the engine sends, by its own events, and what tensor and expert parallelism send,
under Python's dispatcher. Imports torch, the engine and the workloads only, so that ranks start quickly.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fsdplab.engine import fully_shard
from fsdplab.engine.compat import local_of
from fsdplab.teaching.core.collectives_log import collectives
from fsdplab.teaching.core.comm_log import bytes_sent
from fsdplab.teaching.core.course_state import open_course
from fsdplab.teaching.core.exercise import Call
from fsdplab.teaching.core.functions_in_use import function_of
from fsdplab.workloads import build_model, loss_of, preset
from fsdplab.workloads.moe import build_moe, moe_loss_of, spread_experts
from fsdplab.workloads.parallel import build_stage
from fsdplab.workloads.twin import replay_gradients

NEAR = 2e-5  # how far AdamW lets rounding drift in a few steps of 1e-3
_KINDS = {"all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


def tokens_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the batch of a data-parallel rank: tokens int64 [2, 16], and targets one further on."""
    # 17, since targets are the tokens moved by one
    tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(100 * step + rank))
    return tokens[:, :-1], tokens[:, 1:]


# ---- drivers of the exercises


def tensor(payload: dict[str, Any]) -> dict[str, Any]:
    """Train GPT-tiny on a 2 x 2 mesh as the `compose` in use composes it."""
    open_course(workspace=payload["workspace"])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    compose = function_of("16.compose")
    model = compose(build_model("gpt-tiny"), mesh)
    axes = ("dp", {mesh["tp"].get_group().group_name: "tp"})
    result = beside_twin(model, build_model("gpt-tiny"), loss_of, mesh["dp"].get_local_rank(), 2, axes)
    parameters = dict(model.blocks[0].named_parameters())
    names = ("attention.query.weight", "attention.output.weight", "attention_norm.weight")
    result["at rest"] = _places({name: parameters[name] for name in names})
    return result


def experts(payload: dict[str, Any]) -> dict[str, Any]:
    """Train MoE-tiny on a 2 x 2 mesh, expert gradients divided by `payload["divide"]`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    # one axis of four ranks, over which everything but the experts is sharded
    all_ranks = mesh._flatten("dp")
    model = spread_experts(build_moe(), mesh["ep"])
    for block in model.blocks:
        # an expert lives on two of the four ranks, everything else of a block on all
        sharded_experts = fully_shard(block.feed_forward.experts, mesh=mesh["efsdp"])
        sharded_experts.set_gradient_divide_factor(payload["divide"])
        fully_shard(block, mesh=all_ranks)
    fully_shard(model, mesh=all_ranks)
    axes = ("dp and efsdp", {mesh["ep"].get_group().group_name: "ep"})
    result = beside_twin(model, build_moe(), moe_loss_of, dist.get_rank(), 4, axes)
    result["at rest"] = _places(dict(model.blocks[0].feed_forward.named_parameters()))
    return result


def _places(parameters: dict[str, nn.Parameter]) -> list[list[str]]:
    """Return [name, placement, this rank's shape] of each parameter."""
    places = []
    for name, parameter in parameters.items():
        shape = list(local_of(parameter).shape)
        places.append([name, at_rest(parameter), str(shape)])
    return places


def beside_twin(
    model: nn.Module,
    twin: nn.Module,
    loss: Callable[..., Tensor],
    rank: int,
    ranks: int,
    axes: tuple[str, dict[str, str]] = ("dp", {}),
) -> dict[str, Any]:
    """Take three AdamW steps with a composed model and with its unsharded twin, and compare them.

    `rank` of `ranks` is the place of this process on the data-parallel axis; the twin sees the batches of all.
    `axes` are `counted`'s arguments. Returns the largest difference of a parameter (`drift`), the first gradients'
    `ratios` of norms, the `losses` [model, twin] of each step, and the `bytes` of the last step by axis.
    """
    optimizers = []
    for trained in (model, twin):
        optimizers.append(torch.optim.AdamW(_by_mesh(trained), lr=1e-3, fused=True))
    losses: list[list[float]] = []
    ratios: dict[str, float] = {}
    for step in range(3):
        with counted(*axes) as sent:
            value = loss(model, *tokens_of(step, rank))
            value.backward()
        batches_of_ranks = [[tokens_of(step, other_rank)] for other_rank in range(ranks)]
        replay_gradients(twin, batches_of_ranks, loss)
        # of this rank's own batch, as the composed model's loss is
        twin_value = loss(twin, *tokens_of(step, rank))
        losses.append([value.item(), twin_value.item()])
        if step == 0:
            ratios = _ratios(model, twin)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    distances = []
    for parameter, twin_parameter in zip(model.parameters(), twin.parameters(), strict=True):
        difference = whole(parameter) - twin_parameter
        distances.append(float(difference.abs().max()))
    return {"drift": max(distances), "ratios": ratios, "losses": losses, "bytes": dict(sent)}


def _by_mesh(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters in a group for each mesh, as an optimizer takes them.

    A fused step takes the parameters of one mesh, and a looped one spends a second on placements when it is taken
    first.
    """
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]


def _ratios(model: nn.Module, twin: nn.Module) -> dict[str, float]:
    """Return the norm of a gradient over the twin's, for each matrix of the first block.

    `{"attention.query.weight": 1.0, ...}` where the gradient has the length of the twin's.
    """
    twin_parameters = dict(twin.named_parameters())
    ratios = {}
    for name, parameter in model.named_parameters():
        if name.startswith("blocks.0") and parameter.dim() > 1:
            # a ratio of 2 would be a sum over two ranks that was not divided
            norm = whole(parameter.grad).norm()
            twin_norm = twin_parameters[name].grad.norm()
            ratios[name.removeprefix("blocks.0.")] = float(norm / twin_norm)
    return ratios


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor, on every rank of its mesh."""
    if isinstance(tensor, DTensor):
        return tensor.detach().full_tensor()
    return tensor.detach()


def at_rest(parameter: Tensor) -> str:
    """Return the placement by mesh axis: "dp: rows, strided by 2; tp: rows"."""
    if not isinstance(parameter, DTensor):
        return "whole on every rank"
    mesh = parameter.device_mesh
    axes = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return "; ".join(f"{axis}: {_words(placement)}" for axis, placement in zip(axes, parameter.placements))


def _words(placement: Any) -> str:
    """Return a placement in words: `rows`, or `rows of each share` where an axis cuts what another has cut."""
    if placement.is_replicate():
        return "whole"
    # the weight of a Linear is [out, in]: dimension 0 are its rows
    cut = {0: "rows", 1: "columns"}.get(placement.dim, f"dimension {placement.dim}")
    is_strided = getattr(placement, "split_factor", 1) > 1
    return f"{cut} of each share" if is_strided else cut


def _all_to_all_bytes(source: Tensor, group: dist.ProcessGroup, splits: list[int]) -> float:
    """Return the bytes of an all-to-all that leave this rank.

    `source` [rows, ...] is cut into `splits` rows for each rank, or evenly where there are none.
    """
    rows = splits or [len(source) // group.size()] * group.size()
    sent_rows = sum(rows) - rows[group.rank()]  # what a rank sends to itself does not travel
    row_bytes = source.nbytes / max(1, len(source))
    return sent_rows * row_bytes


# ---- bytes per axis


@contextmanager
def counted(engine_axis: str, groups: dict[str, str]) -> Iterator[Counter[str]]:
    """Count the bytes that this rank sends in the body, by axis: `with counted("dp", {group name: "tp"}) as sent`.

    What the engine sends is of `engine_axis`.
    """
    sent: Counter[str] = Counter()
    with collectives() as issued, _ByGroup(groups, sent):
        yield sent
    for collective in issued:
        sent[engine_axis] += collective.wire_bytes


class _ByGroup(TorchDispatchMode):
    """Adds what collectives over the named groups send to `sent`: DTensor's own, and all-to-alls of tokens."""

    def __init__(self, groups: dict[str, str], sent: Counter[str]) -> None:
        super().__init__()
        self.groups, self.sent = groups, sent

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls the collectives of its local tensors, which are seen here
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if func.namespace == "_c10d_functional" and name in _KINDS:
            group_name = args[-1]
            group = dist.distributed_c10d._resolve_process_group(group_name)
            # the output's bytes, as `bytes_sent` counts them: of a reduce_scatter one block
            call = Call(_KINDS[name], out.nbytes)
            self._add(group_name, bytes_sent(call, group.size()))
        elif func.namespace == "c10d" and name == "alltoall_base_":
            group = dist.ProcessGroup.unbox(args[2])
            self._add(group.group_name, _all_to_all_bytes(args[1], group, args[4]))
        return out

    def _add(self, group: str, nbytes: float) -> None:
        """Add bytes to the axis of a group; groups without a name are left out."""
        if group in self.groups:
            self.sent[self.groups[group]] += round(nbytes)


# ---- pipeline stages

FOUR_BLOCKS = dataclasses.replace(preset("gpt-tiny"), layers=4)
MICRO_BATCHES = 4


def stages(payload: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Train two stages x two data ranks with units resharded or kept between a micro-batch's two passes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    return {"resharded": _train(mesh, True), "kept": _train(mesh, False)}


def _train(mesh: DeviceMesh, reshard: bool) -> dict[str, Any]:
    """Train this rank's stage for two steps beside its twin, the whole model.

    Returns how many collectives the last step had, and the largest difference of a parameter.
    """
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # slow to import

    number, rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    module = build_stage(FOUR_BLOCKS, number, 2)
    twin = build_model(FOUR_BLOCKS)
    for unit in [*module.blocks.values(), module]:
        fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=reshard)
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=_entropy)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in (module, twin)]

    for step in range(2):
        micro_batches = _micro_batches(step, rank)
        tokens = torch.cat([tokens for tokens, _ in micro_batches])  # int64 [4, 16]
        targets = torch.cat([targets for _, targets in micro_batches])
        # the first stage takes the tokens, the last one the targets
        inputs = [tokens] if module.begins else []
        with collectives() as issued:
            schedule.step(*inputs, target=targets if module.ends else None)
        batches_of_ranks = [_micro_batches(step, other_rank) for other_rank in range(2)]
        replay_gradients(twin, batches_of_ranks, loss_of)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    counts = Counter(collective.kind for collective in issued)
    twin_parameters = dict(twin.named_parameters())
    distances = []
    for name, parameter in module.named_parameters():
        difference = whole(parameter) - twin_parameters[name]
        distances.append(float(difference.abs().max()))
    return {"all_gather": counts["all_gather"], "reduce_scatter": counts["reduce_scatter"], "drift": max(distances)}


def _micro_batches(step: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return four micro-batches of one sequence each: tokens and targets, int64 [1, 16]."""
    tokens = torch.randint(0, 256, (MICRO_BATCHES, 17), generator=torch.Generator().manual_seed(100 * step + rank))
    return list(zip(tokens[:, :-1].split(1), tokens[:, 1:].split(1)))


def _entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits [batch, length, words]."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
