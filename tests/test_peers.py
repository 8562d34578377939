"""Libraries that the lab puts beside its own engine, or that shard through it: `pytest -m peers`, or `.ci/peers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdplab.records import comparison_json
from fsdplab.sessions import RunSpec, compare

pytestmark = pytest.mark.peers
TINY = {"model": "gpt-tiny", "steps": 4, "sequence_length": 32, "device": "cpu"}
STAGES = {"deepspeed-1": "zero1", "deepspeed-2": "zero2", "deepspeed-3": "full_shard"}


@pytest.mark.default
@pytest.mark.timeout(600)
def test_deepspeeds_stages_train_as_the_twin_does(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install -e '.[peers]'")
    specs = [RunSpec(engine=engine, strategy=strategy, **TINY) for engine, strategy in STAGES.items()]
    twin, *records = compare([RunSpec(engine="twin", **TINY), *specs], directory=tmp_path)
    runs = comparison_json(records, twin)["runs"]
    assert [run["engine"] for run in runs] == list(STAGES)
    assert [run["matches_reference"] for run in runs] == [True, True, True]
    assert all(len(run["losses"]) == 6 and run["step_time_s"]["median"] > 0 for run in runs)


# ---- torchtitan's own function, which calls `fully_shard`


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Decoder(nn.Module):
    """The parts that torchtitan's functions ask a decoder for."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(64, 32)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(3)})
        self.norm = nn.LayerNorm(32)
        self.output = nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return self.output(self.norm(hidden))


def by_torchtitan(engine: str) -> tuple[list[float], bool]:
    """Losses of four steps, and whether the lab's engine sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.models.llama3.infra import parallelize

    import fsdplab.engine

    if engine == "lab":
        parallelize.fully_shard = fsdplab.engine.fully_shard  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model: Any = Decoder()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize.apply_fsdp(model, mesh, torch.float32, torch.float32, pp_enabled=False)
    if engine != "lab":  # it divides gradients itself, which gloo needs to be told; the lab's engine does not
        for module in model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(4):
        tokens = torch.randint(0, 64, (2, 16))
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, isinstance(model, fsdplab.engine.FSDPModule)


def test_torchtitan_shards_a_decoder_with_either_engine(ranks: Any) -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install -e '.[peers]'")
    stock, ours = ranks(2, by_torchtitan, "stock"), ranks(2, by_torchtitan, "lab")
    assert [sharded_by_us for _, sharded_by_us in stock + ours] == [False, False, True, True]
    assert [losses for losses, _ in stock] == [losses for losses, _ in ours]
