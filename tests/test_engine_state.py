"""A training state leaves and enters the engine: state dicts move no bytes, checkpoints fit any number of ranks and
PyTorch.

Every checker (`collectives`, `apart`, `differing`, `most_alive`) is also shown something wrong, which it must see.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdplab import checkpoint
from fsdplab.engine import STRATEGIES, shard_model

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Trainee = tuple[nn.Module, torch.optim.Optimizer]


class Small(nn.Module):
    """Rows that divide by nothing, fewer rows than ranks, tied, frozen and low-precision parameters, and a buffer."""

    def __init__(self, seed: int = 0, blocks: int = 2, width: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, width)) for _ in range(blocks)
        )
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.first = nn.Linear(width, width, bias=False)
        self.last = nn.Linear(width, width, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("offset", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.frozen
        for block in self.blocks:
            x = x + block(x)
        return self.last(x) * self.scale + self.offset.sum()


def trainee(
    engine: str, seed: int = 0, policy: MixedPrecisionPolicy = MixedPrecisionPolicy(), lr: float = 1e-2
) -> Trainee:
    """A model and its AdamW: a strategy of the lab, "hybrid_shard over" so many replicas, PyTorch's FSDP2, or plain."""
    model = Small(seed)
    if engine == "torch":
        for module in (*model.blocks, model):
            torch_fully_shard(module, mp_policy=policy)
    elif engine != "plain":
        strategy, _, replicas = engine.partition(" over ")
        mesh = init_device_mesh("cpu", (int(replicas), dist.get_world_size() // int(replicas))) if replicas else None
        shard_model(model, strategy, mp_policy=policy, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return model(torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + rank))).float().square().mean()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """A copy of all parameters, buffers and optimizer states, unsharded; made without torch.distributed.checkpoint."""
    held = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        held |= {f"{name}: {key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return dict(zip(held, gathered(list(held.values()))))


def gathered(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors, the slices put together: all slices over the same ranks in one collective, where DTensor's own
    way takes one each.
    """
    groups = [_cut_over(value) for value in values]
    parts: dict[Any, list[dict[int, torch.Tensor]]] = {}
    for group in dict.fromkeys(each for each in groups if each is not None):
        mine = {i: local_of(v).detach().clone() for i, (v, its) in enumerate(zip(values, groups)) if its is group}
        parts[group] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(parts[group], mine, group=group)
    return [
        local_of(value).detach().clone()
        if group is None
        else torch.cat([part[i] for part in parts[group]]).view_as(value)
        for i, (value, group) in enumerate(zip(values, groups))
    ]


def _cut_over(value: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks over whose slices a tensor is cut; None for a whole one."""
    cuts = (
        [i for i, each in enumerate(value.placements) if not each.is_replicate()] if isinstance(value, DTensor) else []
    )
    assert all(value.placements[i] == Shard(0) for i in cuts) and len(cuts) <= 1
    return value.device_mesh.get_group(cuts[0]) if cuts else None


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names that only one of them has, or that are not equal to the last bit."""
    both = ours.keys() & theirs.keys()
    return sorted((ours.keys() ^ theirs.keys()) | {name for name in both if not torch.equal(ours[name], theirs[name])})


def engines_for(world_size: int) -> list[str]:
    hybrid = {1: ["hybrid_shard over 1"], 2: ["hybrid_shard over 1", "hybrid_shard over 2"], 3: ["hybrid_shard over 3"]}
    return [*(name for name in STRATEGIES if name != "hybrid_shard"), *hybrid[world_size]]


# ---- a state dict moves no bytes


def collectives(call: Callable[[], object]) -> int:
    with CommDebugMode() as seen:
        call()
    return seen.get_total_counts()


def local_of(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def apart(model: nn.Module, values: dict[str, torch.Tensor]) -> list[str]:
    """Names of state whose values are not the very memory of the model (an empty slice has none to share)."""
    live = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    assert values.keys() == live.keys(), sorted(values.keys() ^ live.keys())
    return [n for n, v in values.items() if local_of(v).data_ptr() != local_of(live[n]).data_ptr()]


def sharded_state(engines: list[str]) -> None:
    for engine in engines:
        model, optimizer = trainee(engine)
        for before in (lambda: train(model, optimizer, 0), lambda: loss_of(model, 0), model.unshard):
            before()
            values: dict[str, Any] = {}
            assert collectives(lambda: values.update(model.state_dict())) == 0, engine
            assert apart(model, values) == [], engine
        cut = engine != "no_shard"
        assert all(isinstance(values[name], DTensor) == cut for name, _ in model.named_parameters()), engine
        assert collectives(lambda: get_state_dict(model, optimizer)) == 0, engine


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_state_dict_moves_no_bytes(ranks, world_size: int) -> None:
    ranks(world_size, sharded_state, engines_for(world_size))


# ---- the whole state dict, on rank 0, in bounded memory


class Alive(TorchDispatchMode):
    """The most bytes alive at once in storages that operations made, beside those of `model`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.most = self._now = 0
        self._known = {local_of(value).untyped_storage()._cdata for value in model.state_dict().values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._now += storage.nbytes()
            self.most = max(self.most, self._now)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._now -= nbytes


def most_alive(engine: str, call: Callable[[nn.Module], object]) -> tuple[int, int, int]:
    """Most bytes alive while `call` gathers, those of the largest parameter, and those of the whole model."""
    model = Small(blocks=40, width=64)
    shard_model(model, engine)
    sizes = [parameter.numel() * 4 for parameter in model.parameters()]
    with Alive(model) as alive:
        call(model)
    return alive.most, max(sizes), sum(sizes)


def on_the_host(model: nn.Module) -> object:
    return checkpoint.full_state_dict(model)


@pytest.mark.parametrize("engine", ["full_shard", "zero1", "no_shard"])
def test_the_whole_is_gathered_a_parameter_at_a_time(ranks, engine: str) -> None:
    (first, largest, everything), (second, *_) = ranks(2, most_alive, engine, on_the_host)
    assert second <= 3 * largest < everything / 2, f"rank 1 held {second} bytes, the largest parameter has {largest}"
    assert everything <= first <= everything + 4 * largest


def whole_on_rank_0(engines: list[str]) -> None:
    for engine in engines:
        model, optimizer = trainee(engine)
        train(model, optimizer, 0)
        expected = {name: value for name, value in whole(model, optimizer).items() if ": " not in name}
        held = checkpoint.full_state_dict(model)
        train(model, optimizer, 1)
        assert differing(held, expected if dist.get_rank() == 0 else {}) == [], engine
        if dist.get_rank() == 0:
            assert "scale" in differing(held, whole(*trainee("plain")))
            assert all(v.untyped_storage().nbytes() == v.nbytes for v in held.values()), "carries more than its bytes"
            Small().load_state_dict(held)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_whole_is_a_copy_on_rank_0_and_nothing_elsewhere(ranks, world_size: int) -> None:
    ranks(world_size, whole_on_rank_0, engines_for(world_size))


# ---- save and load


def lab_save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    checkpoint.save(model, optimizer, folder)


def stock_save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """As a user of PyTorch does without the lab."""
    parts = get_state_dict(model, optimizer)
    dcp.save({"model": parts[0], "optim": parts[1]}, checkpoint_id=folder)


def stock_load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    parts = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    dcp.load(parts, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optim"])


def resumed(engines: list[str], policy: MixedPrecisionPolicy, folder: Path) -> None:
    """Two steps, save, two more; a stranger loads and does the last two:
    equal bits, and other bits without the load.
    """
    for engine in engines:
        model, optimizer = trainee(engine, policy=policy)
        train(model, optimizer, 0, 1)
        checkpoint.save(model, optimizer, folder / engine)
        train(model, optimizer, 2, 3)
        expected = whole(model, optimizer)
        other, its = trainee(engine, seed=5, policy=policy, lr=0.5)
        train(other, its, 9)
        checkpoint.load(other, its, folder / engine)
        assert its.param_groups[0]["lr"] == 1e-2
        train(other, its, 2, 3)
        assert differing(whole(other, its), expected) == [], engine
        assert all(value.dtype == torch.float32 for value in other.state_dict().values())
        half, its = trainee(engine, policy=policy)
        checkpoint.load(half, torch.optim.AdamW(half.parameters()), folder / engine)  # parameters only reach `half`
        train(half, its, 2, 3)
        assert "scale" in differing(whole(half, its), expected), "a run without the optimizer's state looks the same"


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_goes_on_as_if_never_interrupted(ranks, tmp_path: Path, world_size: int, policy) -> None:
    ranks(world_size, resumed, engines_for(world_size), policy, tmp_path)


def write(engine: str, save: Callable[..., None], folder: Path) -> None:
    model, optimizer = trainee(engine)
    train(model, optimizer, 0, 1)
    save(model, optimizer, folder / "checkpoint")
    expected = whole(model, optimizer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(expected, folder / "whole.pt")


def read(engine: str, load: Callable[..., None], folder: Path) -> None:
    expected = torch.load(folder / "whole.pt")
    model, optimizer = trainee(engine, seed=7)
    assert len(differing(whole(model, optimizer), expected)) > 20
    load(model, optimizer, folder / "checkpoint")
    assert differing(whole(model, optimizer), expected) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # plain PyTorch, without a process group
@pytest.mark.parametrize(
    "saved,save,loaded,load",
    [
        ("3 full_shard", lab_save, "2 zero1", checkpoint.load),
        ("3 zero2", lab_save, "2 hybrid_shard over 2", checkpoint.load),
        ("2 no_shard", lab_save, "3 full_shard", checkpoint.load),
        ("2 hybrid_shard over 2", lab_save, "3 shard_grad_op", stock_load),
        ("1 full_shard", stock_save, "3 zero2", checkpoint.load),
        ("3 zero1", lab_save, "1 no_shard", checkpoint.load),
        ("3 torch", stock_save, "2 full_shard", stock_load),
        ("3 torch", stock_save, "2 zero1", checkpoint.load),
        ("2 full_shard", lab_save, "3 torch", stock_load),
        ("2 no_shard", lab_save, "2 torch", checkpoint.load),
        ("3 full_shard", lab_save, "0 plain", checkpoint.load),
        ("2 zero1", lab_save, "0 plain", stock_load),
        ("0 plain", stock_save, "2 full_shard", checkpoint.load),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_another_number_of_ranks_or_engine_reads_equal_bits(ranks, tmp_path: Path, saved, save, loaded, load) -> None:
    for call, tool, (world_size, engine) in [(write, save, saved.split(" ", 1)), (read, load, loaded.split(" ", 1))]:
        call(engine, tool, tmp_path) if world_size == "0" else ranks(int(world_size), call, engine, tool, tmp_path)


def test_one_plain_torch_file_can_be_made_of_a_checkpoint(ranks, tmp_path: Path) -> None:
    ranks(3, write, "full_shard", lab_save, tmp_path)
    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "plain.pt")
    model, expected = Small(seed=7), torch.load(tmp_path / "whole.pt")
    assert "scale" in differing(model.state_dict(), expected)
    model.load_state_dict(torch.load(tmp_path / "plain.pt")["model"])
    assert {name for name in differing(model.state_dict(), expected) if ": " not in name} == set()


# ---- the traps that `checkpoint` closes


def before_the_first_step(tool: Callable[..., None], folder: Path) -> tuple[list[str], list[str]]:
    """What saving at step 0, gradients in hand, changes in a run; and what a run resumed from that checkpoint has
    other.
    """
    (model, optimizer), (undisturbed, its) = trainee("full_shard"), trainee("full_shard")
    loss_of(model, 0).backward()
    tool(model, optimizer, folder)
    optimizer.step(), optimizer.zero_grad()
    train(undisturbed, its, 0)
    expected = whole(undisturbed, its)
    other, others = trainee("zero2", seed=5)
    loss_of(other, 3).backward()
    checkpoint.load(other, others, folder)
    others.zero_grad()
    train(other, others, 0)
    return differing(whole(model, optimizer), expected), differing(whole(other, others), expected)


def test_saving_before_the_first_step_is_not_a_step(ranks, tmp_path: Path) -> None:
    assert ranks(2, before_the_first_step, lab_save, tmp_path / "lab") == [([], [])] * 2


def stock_counts_a_step() -> float:
    model, optimizer = trainee("full_shard")
    get_state_dict(model, optimizer)
    return optimizer.state[model.scale]["step"].item()


def test_torchs_own_call_counts_as_a_step(ranks) -> None:
    """The reason why `save` does more; when this fails, torch has mended it and `_slices` may shrink."""
    assert ranks(1, stock_counts_a_step) == [1.0]


def left_gathered(folder: Path) -> None:
    """A forward with gradients, never followed by a backward, leaves parameters gathered; a save is still whole."""
    for engine in ("full_shard", "shard_grad_op", "zero1"):
        model, optimizer = trainee(engine)
        train(model, optimizer, 0)
        expected = whole(model, optimizer)
        loss_of(model, 1)
        checkpoint.save(model, optimizer, folder / engine)
        other, its = trainee("zero2", seed=5)
        loss_of(other, 1).backward()  # gradients in hand, and a lone forward, on the loading side too
        loss_of(other, 1)
        checkpoint.load(other, its, folder / engine)
        assert differing(whole(other, its), expected) == [], engine


def optimizer_alone(engine: str) -> None:
    model, optimizer = trainee(engine)
    train(model, optimizer, 0)
    loss_of(model, 1)
    with pytest.raises(KeyError):
        get_optimizer_state_dict(model, optimizer)
    model.state_dict()
    get_optimizer_state_dict(model, optimizer)


@pytest.mark.parametrize("engine", ["torch", "full_shard"])
def test_a_lone_forward_does_leave_what_the_optimizer_cannot_name(ranks, engine: str) -> None:
    """The state that the next test saves from is one that torch's calls cannot read, unless the model's slices come
    first.
    """
    ranks(2, optimizer_alone, engine)


def test_a_save_after_a_lone_forward(ranks, tmp_path: Path) -> None:
    ranks(1, left_gathered, tmp_path / "1")
    ranks(2, left_gathered, tmp_path / "2")


# ---- errors


def refusals(folder: Path) -> None:
    model, optimizer = trainee("full_shard")
    rank = dist.get_rank()
    with pytest.raises(FileNotFoundError, match="no checkpoint in .*nowhere: got no such folder, expected a .metadata"):
        checkpoint.load(model, optimizer, folder / "nowhere")
    (folder / f"foreign{rank}").mkdir()
    with pytest.raises(FileNotFoundError, match="got an empty folder"):
        checkpoint.load(model, optimizer, folder / f"foreign{rank}")
    (folder / f"foreign{rank}" / "model.safetensors").touch()
    with pytest.raises(FileNotFoundError, match="got model.safetensors"):
        checkpoint.load(model, optimizer, folder / f"foreign{rank}")
    checkpoint.save(model, optimizer, folder / "good")
    with pytest.raises(dcp.api.CheckpointException, match="Checkpoint already exists"):
        checkpoint.save(model, optimizer, folder / "good")
    before = whole(model, optimizer)
    for other, complaint in [
        (Small(width=8), r"'blocks.0.0.weight' is \(5, 7\) torch.float32 in it and \(5, 8\) torch.float32 here"),
        (Small(blocks=3), r"'blocks.2.0.bias' is absent in it and \(5,\) torch.float32 here \(4 differ in all\)"),
        (Small(blocks=1), r"'blocks.1.0.bias' is \(5,\) torch.float32 in it and absent here"),
    ]:
        shard_model(other, "zero1")
        with pytest.raises(ValueError, match=complaint):
            checkpoint.load(other, torch.optim.AdamW(other.parameters()), folder / "good")
    with pytest.raises(
        ValueError, match=r"another optimizer: 'blocks.0.0.bias.exp_avg' is \(5,\) torch.float32 in it and absent here"
    ):
        checkpoint.load(model, torch.optim.SGD(model.parameters(), lr=1.0), folder / "good")
    assert differing(whole(model, optimizer), before) == [], "a refused load changed something"
    checkpoint.load(model, optimizer, folder / "good")


def test_what_cannot_be_loaded_is_refused_with_the_remedy(ranks, tmp_path: Path) -> None:
    ranks(2, refusals, tmp_path)
