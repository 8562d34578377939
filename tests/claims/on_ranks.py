"""The part of lesson 18 that runs on the ranks: a small GPT in checkpoints, in files on a drive, and in bfloat16.

Everything returned is a number of bytes, a loss, or whether bits are equal: none depends on the machine's speed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdplab import checkpoint
from fsdplab.engine import fully_shard, shard_model
from fsdplab.engine.features.offload import NVMeOffloadPolicy
from fsdplab.engine.features.offloaded_optimizer import offload_optimizer
from fsdplab.workloads import ByteText, block_types, build_model, loss_of
from fsdplab.workloads.shapes import preset

MODEL = "gpt-tiny"


def _trained(steps: int, strategy: str = "full_shard", **policies: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """gpt-tiny after a few steps of AdamW, sharded over all ranks."""
    model = _fresh(strategy, **policies)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(steps):
        _backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _fresh(strategy: str = "full_shard", **policies: Any) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(preset(MODEL))
    shard_model(model, strategy, units=block_types(model), **policies)
    return model


def _backward(model: nn.Module, step: int) -> float:
    """The loss of a step's batch on this rank; its gradients are there afterwards."""
    text = ByteText.from_standard_library()
    batch = text.batch(step, dist.get_rank(), dist.get_world_size(), batch_size=2, sequence_length=32)
    loss = loss_of(model, *batch)
    loss.backward()
    return float(loss)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- checkpoints


def saved(payload: dict[str, Any]) -> dict[str, int]:
    """Bytes of parameters that this rank holds of a full and of a sharded state dict; the latter is saved in
    `payload["folder"]`, the full one beside it as `whole.pt`.
    """
    model, optimizer = _trained(2)
    full = checkpoint.full_state_dict(model)
    shards = checkpoint.states_of(model, optimizer)["model"]
    checkpoint.save(model, optimizer, Path(payload["folder"]) / "checkpoint")
    if dist.get_rank() == 0:
        torch.save(full, Path(payload["folder"]) / "whole.pt")
    return {
        "full": sum(each.nbytes for each in full.values()),
        "sharded": sum(_local(each).nbytes for each in shards.values()),
    }


def loaded(payload: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint read on this number of ranks: bytes that this rank holds, and whether all bits are those saved."""
    model, optimizer = _trained(0)
    checkpoint.load(model, optimizer, Path(payload["folder"]) / "checkpoint")
    held = sum(_local(each).nbytes for each in model.parameters())
    full = checkpoint.full_state_dict(model)
    whole = torch.load(Path(payload["folder"]) / "whole.pt", weights_only=True)
    equal = all(torch.equal(full[name], whole[name]) for name in full)
    return {"bytes": held, "equal": equal and (not full or full.keys() == whole.keys())}


# ---- a drive


def on_a_drive(payload: dict[str, Any]) -> dict[str, Any]:
    """Two steps with shards and optimizer state in files, beside two in memory: losses, and the bytes of the files."""
    usual, _ = _trained(2)
    with tempfile.TemporaryDirectory(dir=payload["folder"]) as drive:
        policy = NVMeOffloadPolicy(drive)
        model = _fresh(offload_policy=policy)
        optimizer = offload_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), policy)
        for step in range(2):
            _backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        pairs = zip(usual.parameters(), model.parameters(), strict=True)
        equal = all(torch.equal(_local(a), _local(b)) for a, b in pairs)
        parameters = sum(_local(each).nbytes for each in model.parameters())
        state = sum(_local(value).nbytes for each in optimizer.state.values() for value in each.values() if value.dim())
    return {"equal": equal, "bytes": parameters + state}


# ---- masters


def curves(payload: dict[str, Any]) -> dict[str, list[float]]:
    """The losses of `payload["steps"]` steps in fp32, in bf16 with fp32 masters, and in bf16 alone."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = {"fp32": _fresh, "bf16, fp32 masters": lambda: _fresh(mp_policy=mixed), "bf16 alone": _bf16_alone}
    found = {}
    for name, built in models.items():
        model = built()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        losses = []
        for step in range(payload["steps"]):
            loss = torch.tensor(_backward(model, step))
            dist.all_reduce(loss)
            losses.append(float(loss) / dist.get_world_size())
            optimizer.step()
            optimizer.zero_grad()
        found[name] = losses
    return found


def _bf16_alone() -> nn.Module:
    torch.manual_seed(0)
    model = build_model(preset(MODEL)).to(torch.bfloat16)
    shard_model(model, "full_shard", units=block_types(model))
    return model


# ---- layers


class _Tied(nn.Module):
    """The output's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(tokens)))


class _Outside(_Tied):
    """The layer's weight is read by the model, and the layer's forward is not called."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.linear(self.embedding(tokens), self.layer.weight))


class _Counting(_Tied):
    """A running statistic in a buffer, as batch normalization has one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layer(self.embedding(tokens))))


def layers(payload: dict[str, Any]) -> dict[str, str]:
    """What becomes of three kinds of layers whose inner layer is a unit: beside a twin on the same batches, or the
    error.
    """
    return {
        "tied weights": _judged(_Tied),
        "running statistics": _judged(_Counting),
        "a weight read outside": _judged(_Outside),
    }


def _judged(build: type[_Tied]) -> str:
    torch.manual_seed(0)
    twin = build()
    torch.manual_seed(0)
    model = build()
    fully_shard(model.layer)
    fully_shard(model)
    tokens = torch.arange(8).reshape(2, 4)[dist.get_rank()]
    try:
        model(tokens).sum().backward()
    except RuntimeError as error:
        return f"refused ({str(error).split(',')[0]})"
    twin(tokens).sum().backward()
    for parameter in twin.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= dist.get_world_size()
    pairs = zip(twin.parameters(), model.parameters(), strict=True)
    apart = max(float((a.grad - b.grad.full_tensor()).abs().max()) for a, b in pairs)
    differing = [name for name, buffer in model.named_buffers() if _differs(buffer)]
    kept = f", but {differing[0]} differs between ranks" if differing else ""
    return f"gradients are the twin's{kept}" if apart < 1e-6 else f"gradients are off by {apart:.0e}"


def _differs(buffer: torch.Tensor) -> bool:
    """Whether a buffer has other values on another rank."""
    mine = buffer.detach().float().reshape(-1)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return any(not torch.equal(mine, each) for each in everyone)
