"""The engine on fake tensors: shapes and dtypes without memory, over a process group that moves nothing.

So a model's step can be recorded without its memory, and PyTorch's memory tracker and runtime estimator work on a model
that this engine has sharded. That its numbers are those of PyTorch's own engine on the same model is checked too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_engine
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

import fsdplab.engine as lab_engine
from fsdplab.engine import STRATEGIES
from tests.surface import Block

WIDTH = 256


class Net(nn.Module):
    """Four blocks, and in each of them a parameter that no forward uses."""

    def __init__(self, width: int = WIDTH, blocks: int = 4, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, 4 * width + 1) for _ in range(blocks))
        for block in self.blocks:
            block.unused = nn.Parameter(torch.empty(4))
        if recompute:
            self.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in self.blocks)
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def make_believe(ranks: int = 4, rank: int = 1) -> None:
    """One process as `rank` of many: collectives return at once and move nothing."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())


def sharded(fsdp: Any, model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    return fsdp.fully_shard(model, **options)


def train(model: nn.Module, steps: int = 2) -> None:
    """Steps with clipping and Adam; afterwards what was fake is so still, and what nobody uses has no gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.empty(64, WIDTH)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
    assert isinstance(loss, FakeTensor) and loss.shape == ()
    for name, parameter in model.named_parameters():
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        assert isinstance(local, FakeTensor) and local.device.type == "cpu", name
        assert (parameter.grad is None) == name.endswith("unused"), name


# ---- every way to shard


MIXED = torch_engine.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "mixed precision": {"mp_policy": MIXED},
    "kept gathered": {"reshard_after_forward": False},
    "fewer ranks": {"reshard_after_forward": 2},
    "offloaded": {"offload_policy": torch_engine.CPUOffloadPolicy(pin_memory=False)},
}


def mesh_of(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def every_option() -> None:
    make_believe(8)
    for options in OPTIONS.values():
        for shape in ((8,), (2, 4)):
            mesh = mesh_of(*shape)
            with FakeTensorMode():
                train(sharded(lab_engine, Net(blocks=2), mesh=mesh, **options))
    with FakeTensorMode():
        train(sharded(lab_engine, Net(blocks=2)))  # over the default mesh


def test_every_option(ranks) -> None:
    ranks(1, every_option)


def every_strategy() -> None:
    make_believe()
    for name in STRATEGIES:
        mesh = mesh_of(2, 2) if name == "hybrid_shard" else mesh_of(4)
        with FakeTensorMode():
            checkpoint = "selective" if name == "full_shard" else "none"
            train(lab_engine.shard_model(Net(blocks=2), name, mesh=mesh, checkpoint=checkpoint))


def test_every_strategy(ranks) -> None:
    ranks(1, every_strategy)


def without_memory() -> float:
    """A hundred billion parameters, 400 GB were they there, from the meta device."""
    make_believe(64)
    with FakeTensorMode(), FlopCounterMode(display=False) as counted:
        with torch.device("meta"):
            model = Net(65536, blocks=3)
        sharded(lab_engine, model)
        model.to_empty(device="cpu")
        model(torch.empty(2, 65536)).sum().backward()
    held = {name: parameter.numel() for name, parameter in model.named_parameters() if name.endswith("weight")}
    assert sum(held.values()) > 100e9
    # 2 rows, 2 operations a product, 3 products a weight; the first one's input needs no gradient
    assert counted.get_total_flops() == 2 * 2 * (3 * sum(held.values()) - held["blocks.0.up.weight"])
    return sum(held.values())


def test_a_model_that_fits_no_machine(ranks) -> None:
    ranks(1, without_memory)


def on_meta() -> None:
    """Sharding needs no memory; training does, and says so."""
    with torch.device("meta"):
        model = Net()
    sharded(lab_engine, model)
    assert all(parameter.is_meta and isinstance(parameter, DTensor) for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="materialized from meta device"):
        model(torch.empty(2, WIDTH))


def test_meta(ranks) -> None:
    ranks(2, on_meta)


# ---- PyTorch's tools


def peak(fsdp: Any, recompute: bool, **options: Any) -> dict[str, int]:
    """What `FSDPMemTracker` says of a step's peak, by its categories; the model trains on once it is gone."""
    mesh = mesh_of(4)
    with FakeTensorMode():
        model = sharded(fsdp, Net(recompute=recompute), mesh=mesh, **options)
        optimizer = torch.optim.Adam(model.parameters(), foreach=True)
        x = torch.empty(64, WIDTH)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((x,))
        with tracker:
            for step in range(2):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    tracker.reset_mod_stats()
        assert len(tracker.memory_tracking) == 5, "one record a unit"
        model(x).square().mean().backward()
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return {str(getattr(kind, "value", kind)): nbytes for kind, nbytes in snapshot.items()}


def tracked() -> None:
    make_believe()
    peak(torch_engine, False)  # DTensor makes what it keeps, in the first optimizer step of a process
    for recompute, after in ((False, True), (True, True), (False, False)):
        stock, ours = (peak(each, recompute, reshard_after_forward=after) for each in (torch_engine, lab_engine))
        assert ours["OptState"] == pytest.approx(stock["OptState"], rel=1e-3)
        assert ours["Sharded Param"] == pytest.approx(stock["Sharded Param"], rel=1e-3)
        assert 0 < ours["Unsharded Param"] <= 1.001 * stock["Unsharded Param"]
        assert 0 < ours["Total"] <= 1.001 * stock["Total"], (recompute, after, ours, stock)


def test_the_memory_tracker_of_torch(ranks) -> None:
    """Its peak is that of PyTorch's own engine, or less."""
    ranks(1, tracked)


def estimated(engine: str) -> dict[str, int]:
    """How many operators the runtime estimator saw in each unit; the times themselves it takes from a GPU."""

    def one_each(cls: type, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        return func(*args, **(kwargs or {})), float(func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default))

    make_believe()
    mesh = mesh_of(4)
    with FakeTensorMode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(RuntimeEstimator, "_roofline_estimate", classmethod(one_each))
        model = sharded({"torch": torch_engine, "lab": lab_engine}[engine], Net(), mesh=mesh)
        x = torch.empty(64, WIDTH)
        with RuntimeEstimator()(estimate_mode_type="operator-level-cost-model") as estimator:
            model(x).sum().backward()
    return {name: int(sum(times.values())) for name, times in estimator.mod_runtimes.items() if ".blocks." in name}


def test_the_runtime_estimator_of_torch(ranks) -> None:
    ((stock,), (ours,)) = (ranks(1, estimated, engine) for engine in ("torch", "lab"))
    assert ours == stock and len(ours) >= 4
