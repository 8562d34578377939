"""What a step costs beside FSDP2's, on a group that moves nothing: operators that the host dispatches, and the memory
peak. Both are counted, so they are the same on every machine.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fsdplab.engine import MixedPrecisionPolicy, fully_shard

WIDTH, BLOCKS = 192, 4
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three = self.mix(self.first(x)).chunk(3, -1)
        x = x + self.out(one * two + three)
        return x + self.down(torch.relu(self.up(self.second(x))))


class Steps:
    """A model under one of the two engines, as rank 0 of `ranks` that are not there."""

    def __init__(self, shard: Any, policy: str, ranks: int) -> None:
        mesh = init_device_mesh("cpu", (ranks,))
        self.model = nn.Sequential(*[Block() for _ in range(BLOCKS)], nn.Linear(WIDTH, 8))
        for each in [*list(self.model)[:BLOCKS], self.model]:
            shard(each, mesh=mesh, mp_policy=POLICIES[policy])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        for _ in range(2):
            self.run()

    def run(self) -> None:
        self.model(torch.ones(2, WIDTH)).float().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def dispatched(self) -> int:
        counted: Counter = Counter()

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                counted[str(function)] += 1
                return function(*args, **(kwargs or {}))

        with Counting():
            self.run()
        return counted.total()

    def peak(self) -> int:
        """Bytes above what is held between two steps."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.run()
            self.run()
        with tempfile.TemporaryDirectory() as folder:
            profiler.export_chrome_trace(str(Path(folder) / "trace.json"))
            events = json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]
        held = [event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]"]
        return max(held) - held[-1]


def costs(ranks: int, policies: list[str]) -> dict[str, list[tuple[int, int]]]:
    """Policy -> (operators, peak bytes) of the lab's engine and of FSDP2."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    found = {}
    for policy in policies:
        both = [Steps(shard, policy, ranks) for shard in (fully_shard, torch_fully_shard)]
        found[policy] = [(steps.dispatched(), steps.peak()) for steps in both]
    return found


@pytest.mark.parametrize("world", [8, 64, 512])
def test_no_more_operators_and_no_more_memory_than_fsdp2(ranks, world: int) -> None:
    (found,) = ranks(1, costs, world, list(POLICIES))
    for policy, ((operators, peak), (their_operators, their_peak)) in found.items():
        assert operators <= their_operators, (
            f"{policy} on {world} ranks: {operators} operators, FSDP2 {their_operators}"
        )
        aligned = max(
            3072, their_peak // 1000
        )  # parameters begin at multiples of 64 bytes, of 512 in theirs, uncounted
        assert peak <= their_peak + aligned, (
            f"{policy} on {world} ranks: {peak:,} bytes at the peak, FSDP2 {their_peak:,}"
        )
