"""One rank's training of a run that a learner chose: its memory, and the time on its emulated link.

For the drivers of lessons. They judge bytes and seconds of the emulated link's clock, never wall time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.engine import events
from fsdplab.profiling import MemoryRecorder, MemoryTimeline, TagLog
from fsdplab.sessions import RunSpec, SpecError
from fsdplab.sessions.worker.emulated_network import EmulatedNetwork
from fsdplab.sessions.worker.engines import build
from fsdplab.workloads import ByteText

from .collectives_log import collectives


def complaint(choices: Any, job: dict[str, Any], names: Sequence[str]) -> str:
    """Return why these choices cannot be run, or nothing."""
    if not isinstance(choices, dict):
        return f"expected a dict, got {type(choices).__name__}"
    # a name that no run has is a slip of spelling, and another sentence than one that the job has fixed
    unsupported = [str(name) for name in choices if name not in names]
    unknown = [name for name in unsupported if name not in RunSpec.__dataclass_fields__]
    if unknown:
        return f"there is no setting {', '.join(unknown)}; you choose {', '.join(names)}, spelt so"
    if unsupported:
        return f"{', '.join(unsupported)} belongs to the job; you choose {', '.join(names)}"
    try:
        RunSpec(**{**job, **choices})
    except SpecError as error:
        return str(error)
    return ""


class Training:
    """One rank's training of a spec, behind its link: the memory of its second step, and the link's clock over further
    ones.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        heartbeat = SimpleNamespace(enter=lambda *_: None)
        # Any: the part of a RankContext that a setup and a network read; this heartbeat is not read
        context: Any = SimpleNamespace(
            device=torch.device("cpu"), rank=self.rank, world_size=self.ranks, heartbeat=heartbeat
        )
        self._tags = TagLog()
        self._text = ByteText.from_standard_library()
        self._done = 0  # steps
        self._setup = build(spec, context)
        EmulatedNetwork(spec, context).begin(self._setup)

    def _step(self, batch_size: int | None = None, sequence_length: int | None = None) -> list[events.Collective]:
        """Train one step on this rank's batch; return its collectives."""
        shape = (batch_size or self.spec.batch_size, sequence_length or self.spec.sequence_length)
        # tokens and targets, int64 [batch_size, sequence_length]
        batch = self._text.batch(self._done, self.rank, self.ranks, *shape)
        with collectives() as seen:
            self._setup.train_step([[batch]])
        self._done += 1
        return seen

    def measured(self) -> MemoryTimeline:
        """Return the memory of the second step, as a run's record has it.

        The first makes the optimizer's state and tells the engine the order of its units; a few tokens do that in a
        third of the time.
        """
        self._step(batch_size=1, sequence_length=8)
        with MemoryRecorder(
            model=self._setup.model,
            optimizer=self._setup.optimizer,
            engine=self.spec.engine,
            device=torch.device("cpu"),
            tags=self._tags,
            ignore=[self._text.data],
            offloaded=self.spec.offload != "none",
        ) as recorder:
            self._step()
        self._tags.close()
        return recorder.timeline

    def most_of_ranks(self, value: int) -> int:
        """Return the largest of the ranks' values: what they decide by it, they decide alike."""
        # int64, so that bytes stay exact
        most = torch.tensor(value)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def clocked(self, steps: int) -> tuple[float, float]:
        """Train `steps` steps and return the seconds a step on the link, and the hidden part of a typical all-gather.

        The part is agreed by all ranks. Typical is the median of all gathers of the `steps`: on a busy machine some
        wait long for a rank that is not running, so it takes a few steps. The clock of the link takes one.
        """
        trained = [self._step() for _ in range(steps)]
        on_the_link = statistics.median(map(transfer_ns, trained)) / 1e9
        hidden_parts = []
        for step in trained:
            for collective in step:
                if collective.kind == "all_gather":
                    hidden_parts.append(hidden_part(collective))
        # one part for all ranks, their mean: what they decide by it, they decide alike
        typical = torch.tensor(statistics.median(hidden_parts) if hidden_parts else 1.0, dtype=torch.float64)
        dist.all_reduce(typical)
        return on_the_link, typical.item() / self.ranks


def transfer_ns(collectives: Sequence[events.Collective]) -> int:
    """Return the time of these on the link, in ns: 5 and 4 ns are 9."""
    return sum(collective.end_ns - collective.start_ns for collective in collectives)


def hidden_part(collective: events.Collective) -> float:
    """Return the part of its transfer for which the host was not blocked: 10 ns of which it waited 4 are 0.6.

    Waiting for a peer comes on top, so the part is at least 0.
    """
    return max(0.0, 1 - (collective.waited_ns or 0) / transfer_ns([collective]))
