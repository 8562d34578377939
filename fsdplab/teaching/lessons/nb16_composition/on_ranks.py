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
from fsdplab.teaching.core.in_use import function_of
from fsdplab.workloads import build_model, loss_of, preset
from fsdplab.workloads.moe import build_moe, moe_loss_of, spread_experts
from fsdplab.workloads.parallel import build_stage
from fsdplab.workloads.twin import replay_gradients

NEAR = 2e-5  # how far AdamW lets rounding drift in a few steps of 1e-3
_KINDS = {"all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


def tokens_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """The batch of a data-parallel rank: tokens int64 [2, 16], and targets one further on."""
    tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(100 * step + rank))
    return tokens[:, :-1], tokens[:, 1:]


# ---- drivers of the exercises


def tensor(payload: dict[str, Any]) -> dict[str, Any]:
    """Train GPT-tiny on a 2 x 2 mesh as the `compose` in use composes it."""
    open_course(workspace=payload["workspace"])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = function_of("16.compose")(build_model("gpt-tiny"), mesh)
    axes = ("dp", {mesh["tp"].get_group().group_name: "tp"})
    seen = beside_twin(model, build_model("gpt-tiny"), loss_of, mesh["dp"].get_local_rank(), 2, axes)
    names = ("attention.query.weight", "attention.output.weight", "attention_norm.weight")
    held = dict(model.blocks[0].named_parameters())
    return seen | {"at rest": _places({name: held[name] for name in names})}


def experts(payload: dict[str, Any]) -> dict[str, Any]:
    """Train MoE-tiny on a 2 x 2 mesh, expert gradients divided by `payload["divide"]`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    everyone = mesh._flatten("dp")
    model = spread_experts(build_moe(), mesh["ep"])
    for block in model.blocks:
        fully_shard(block.feed_forward.experts, mesh=mesh["efsdp"]).set_gradient_divide_factor(payload["divide"])
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)
    names = {mesh["ep"].get_group().group_name: "ep"}
    seen = beside_twin(model, build_moe(), moe_loss_of, dist.get_rank(), 4, ("dp and efsdp", names))
    return seen | {"at rest": _places(dict(model.blocks[0].feed_forward.named_parameters()))}


def _places(held: dict[str, nn.Parameter]) -> list[list[str]]:
    """[name, placement, this rank's shape] of each."""
    return [[name, at_rest(each), str(list(local_of(each).shape))] for name, each in held.items()]


def beside_twin(
    model: nn.Module,
    twin: nn.Module,
    loss: Callable[..., Tensor],
    rank: int,
    ranks: int,
    axes: tuple[str, dict[str, str]] = ("dp", {}),
) -> dict[str, Any]:
    """Three AdamW steps of both: the largest difference of a parameter, the first gradients' ratios, losses, bytes per
    axis.
    """
    optimizers = [torch.optim.AdamW(_by_mesh(each), lr=1e-3, fused=True) for each in (model, twin)]
    losses: list[list[float]] = []
    ratios: dict[str, float] = {}
    for step in range(3):
        with counted(*axes) as sent:
            value = loss(model, *tokens_of(step, rank))
            value.backward()
        replay_gradients(twin, [[tokens_of(step, each)] for each in range(ranks)], loss)
        losses.append([value.item(), loss(twin, *tokens_of(step, rank)).item()])
        ratios = ratios or _ratios(model, twin)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    drift = max(float((whole(a) - b).abs().max()) for a, b in pairs)
    return {"drift": drift, "ratios": ratios, "losses": losses, "bytes": dict(sent)}


def _by_mesh(model: nn.Module) -> list[dict[str, Any]]:
    """The parameters in a group for each mesh: a fused step takes those of one mesh, and a looped one spends a second
    on placements when it is taken first.
    """
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]


def _ratios(model: nn.Module, twin: nn.Module) -> dict[str, float]:
    """The norm of a gradient over the twin's, for a matrix of each kind of the first block."""
    expected = dict(twin.named_parameters())
    chosen = [(name, p) for name, p in model.named_parameters() if name.startswith("blocks.0") and p.dim() > 1]
    pairs = {name: (whole(p.grad).norm(), expected[name].grad.norm()) for name, p in chosen}
    return {name.removeprefix("blocks.0."): float(ours / twins) for name, (ours, twins) in pairs.items()}


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank of its mesh."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def at_rest(parameter: Tensor) -> str:
    """Placement by mesh axis: "dp: rows, strided by 2; tp: rows"."""
    if not isinstance(parameter, DTensor):
        return "whole on every rank"
    names = parameter.device_mesh.mesh_dim_names or tuple(map(str, range(parameter.device_mesh.ndim)))
    return "; ".join(f"{name}: {_words(placement)}" for name, placement in zip(names, parameter.placements))


def _words(placement: Any) -> str:
    if placement.is_replicate():
        return "whole"
    cut = {0: "rows", 1: "columns"}.get(placement.dim, f"dimension {placement.dim}")
    factor = getattr(placement, "split_factor", 1)
    return f"{cut} of each share" if factor > 1 else cut


# ---- bytes per axis


@contextmanager
def counted(engine_axis: str, groups: dict[str, str]) -> Iterator[Counter[str]]:
    """`with counted("dp", {group name: "tp"}) as sent`: bytes that this rank sends in the body, by axis."""
    sent: Counter[str] = Counter()
    with collectives() as issued, _ByGroup(groups, sent):
        yield sent
    if issued:
        sent[engine_axis] += sum(each.wire_bytes for each in issued)


class _ByGroup(TorchDispatchMode):
    """Adds what collectives over the named groups send to `sent`: DTensor's own, and all-to-alls of tokens."""

    def __init__(self, groups: dict[str, str], sent: Counter[str]) -> None:
        super().__init__()
        self.groups, self.sent = groups, sent

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out, name = func(*args, **(kwargs or {})), func.__name__.split(".")[0]
        if func.namespace == "_c10d_functional" and name in _KINDS:
            n = dist.distributed_c10d._resolve_process_group(args[-1]).size()
            self._add(args[-1], bytes_sent(Call(_KINDS[name], out.nbytes), n))
        elif func.namespace == "c10d" and name == "alltoall_base_":
            source, group, splits = args[1], dist.ProcessGroup.unbox(args[2]), args[4]
            rows = splits or [len(source) // group.size()] * group.size()
            self._add(group.group_name, (sum(rows) - rows[group.rank()]) * source.nbytes / max(1, len(source)))
        return out

    def _add(self, group: str, nbytes: float) -> None:
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
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # slow to import

    number, rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    module, twin = build_stage(FOUR_BLOCKS, number, 2), build_model(FOUR_BLOCKS)
    for block in [*module.blocks.values(), module]:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=reshard)
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=_entropy)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, fused=True) for each in (module, twin)]
    for step in range(2):
        tokens, targets = (torch.cat(part) for part in zip(*_micro_batches(step, rank)))
        with collectives() as issued:
            schedule.step(*([tokens] if module.begins else []), target=targets if module.ends else None)
        replay_gradients(twin, [_micro_batches(step, each) for each in range(2)], loss_of)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    seen, expected = Counter(each.kind for each in issued), dict(twin.named_parameters())
    drift = max(float((whole(p) - expected[name]).abs().max()) for name, p in module.named_parameters())
    return {"all_gather": seen["all_gather"], "reduce_scatter": seen["reduce_scatter"], "drift": drift}


def _micro_batches(step: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Four of one sequence each: tokens and targets, int64 [1, 16]."""
    tokens = torch.randint(0, 256, (MICRO_BATCHES, 17), generator=torch.Generator().manual_seed(100 * step + rank))
    return list(zip(tokens[:, :-1].split(1), tokens[:, 1:].split(1)))


def _entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
