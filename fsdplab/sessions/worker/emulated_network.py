"""Installs the emulated network of a spec between the ranks: a named link, or the wind tunnel's.

The wind tunnel asks how fast a link must be for communication to take the same part of a step as on another machine.
That depends on how fast this machine computes, so it is measured on the run itself, in its warm-up, without a link.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.common.names import SAVES_MOST
from fsdplab.engine import MatrixOptimizer
from fsdplab.engine.emulation.link import Link, emulate, emulate_exchange, emulate_group
from fsdplab.engine.transport.shared_memory.process_group import SharedMemoryGroup
from fsdplab.planning.links import LinkSpec, parse_link
from fsdplab.planning.windtunnel import link_for
from fsdplab.sessions.formula import traffic_of
from fsdplab.sessions.spec import RunSpec
from fsdplab.sessions.worker.engines import TrainingSetup
from fsdplab.sessions.worker.rank_process import RankContext


@dataclass
class EmulatedNetwork:
    """Installs the emulated links of one run, on one rank."""

    spec: RunSpec
    context: RankContext
    chosen: LinkSpec | None = None
    # seconds of each step of calibration, without its communication
    computing: list[float] = field(default_factory=list)

    def begin(self, setup: TrainingSetup) -> None:
        """Install the link that the spec names."""
        if self.spec.link or self.spec.link_across:
            self.chosen = _named(self.spec.link)
            self._place(setup)

    def warmed_up(self, setup: TrainingSetup) -> None:
        """Choose and place the wind tunnel's link, after the warm-up."""
        target = self.spec.target
        if target is None or self.spec.link or self.context.world_size == 1:
            return
        # every rank computes the same link from the slowest one, which the others wait for
        slowest = torch.tensor(statistics.median(self.computing), device=self.context.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        rows = traffic_of(self.spec, SAVES_MOST[0])  # what the target's ratio is about
        self.chosen = link_for(
            target,
            compute_s=slowest.item(),
            wire_bytes=sum(row.step_bytes for row in rows),
            collectives=sum(row.count for row in rows),
            ranks=self.context.world_size,
        )
        self._place(setup)

    def note_step(self, step: int, seconds: float, ledger: Sequence[dict[str, Any]]) -> None:
        """Record a calibration step of `seconds`, without its waiting for other ranks."""
        # the time computing takes: a step of 200 ms that waited for 50 ms is 150 ms
        waited = sum(row["waited_ns"] or 0 for row in ledger if row["step"] == step) / 1e9
        self.computing.append(max(seconds - waited, 1e-6))

    def _place(self, setup: TrainingSetup) -> None:
        # the link between shard groups, where it is another than inside of them
        across = _named(self.spec.link_across) or self.chosen
        if self.spec.engine == "lab":
            emulate(setup.model, shard=self._link(self.chosen), replicate=self._link(across))
            if isinstance(setup.optimizer, MatrixOptimizer):
                emulate_exchange(setup.optimizer, self._link(self.chosen))
        # torch's engines send through the process group, so the link is placed there
        elif isinstance(dist.group.WORLD, SharedMemoryGroup):
            emulate_group(dist.group.WORLD, self._link(self.chosen))

    def _link(self, chosen: LinkSpec | None) -> Link | None:
        if chosen is None:
            return None
        return Link(chosen.bytes_per_s, chosen.latency_s, self.spec.link_queues)

    def as_dict(self) -> dict[str, Any] | None:
        """Return the network as the record has it; None without one."""
        if not self.spec.linked:
            return None
        network = _link_as_dict(self.chosen) or {"name": "none", "bytes_per_s": None, "latency_s": None}
        target = None
        if self.spec.emulate:
            target = f"{self.spec.as_model} on {self.spec.emulate}"
            network["name"] = f"wind tunnel of {target}"
        network["queues"] = self.spec.link_queues
        network["across"] = _link_as_dict(_named(self.spec.link_across))
        network["as"] = target
        return network


def _named(link: str | None) -> LinkSpec | None:
    return parse_link(link) if link else None


def _link_as_dict(link: LinkSpec | None) -> dict[str, Any] | None:
    if link is None:
        return None
    return {"name": link.name, "bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s}
