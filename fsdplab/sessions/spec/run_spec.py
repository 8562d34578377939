"""Joins the parts of parts.py into one spec, checked once.

Ranks take seconds to start, so an invalid request fails here, before any process exists, in one line: what happened,
what was got, what was expected, what to do. An existing `RunSpec` can be run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from fsdplab.common.names import OVER_ALL_RANKS
from fsdplab.common.words import plural

from . import gpus
from .choices import ON_SHARED_MEMORY
from .pairs import PAIRS
from .parts import EngineChoice, Measuring, Network, Placement, Sharding, WorkloadPart
from .rules import Rules, SpecError

_OF_RANKS = ("card", "profile", "memory", "prefetch", "checkpoint", "offload", "compile", "transport")  # not the twin's
CALIBRATION = 3  # steps without a link that a wind tunnel measures


@dataclass(frozen=True, kw_only=True)
class RunSpec(Placement, Measuring, Network, EngineChoice, Sharding, WorkloadPart):
    """One run: model, data, strategy, engine, ranks. Sizes in bytes, times in seconds; raises SpecError when invalid.

    Its fields are those of its parts, which say what they mean. (A dataclass has the fields of its last base first.)

    >>> RunSpec(strategy="zero1", world_size=2).total_steps
    6
    """

    RULES: ClassVar[Rules] = PAIRS

    @property
    def total_steps(self) -> int:
        """Steps of training in all: untimed, timed, under the profiler."""
        return self.untimed + self.steps + self.profiler_warmup + self.profile

    @property
    def untimed(self) -> int:
        """Steps before the timed ones: warm-up, and those in which a wind tunnel measures how fast this machine
        computes.
        """
        return self.warmup + (CALIBRATION if self.emulate and not self.link else 0)

    @property
    def profiler_warmup(self) -> int:
        """Steps that the profiler throws away before those it keeps: one on CUDA, where the first is slower, and none
        on the CPU, where it is not.
        """
        return 1 if self.profile and self.device_type == "cuda" else 0

    @property
    def replicas(self) -> int:
        """Shard groups that hold the same shards: 1 but under a strategy with groups of ranks."""
        # 8 ranks with a shard size of 4: 2
        return self.world_size // (self.shard_size or self.world_size)

    @property
    def processes(self) -> int:
        """Rank processes to start: the twin replays all ranks in one."""
        return 1 if self.engine == "twin" else self.world_size

    @property
    def why_this_device(self) -> str:
        """Why ranks share GPUs, or do not run on those that there are; "" where each rank has what a user expects."""
        found = gpus.usable_gpus()
        if self.shares_a_gpu:
            return f"{plural(found, 'GPU')} for {plural(self.processes, 'rank')}, which take turns"
        if self.device == "auto" and self.device_type == "cpu" and found:
            return f"this machine has {plural(found, 'GPU')}; --device cuda lets ranks share"
        return ""

    @property
    def shares_a_gpu(self) -> bool:
        """Whether there are more CUDA ranks than GPUs; such a run's times are emulated."""
        return self.device_type == "cuda" and 0 < gpus.usable_gpus() < self.processes

    @property
    def backend(self) -> str:
        """The process group's backend: `nccl` on cuda, else `gloo`, or `shm` for an engine of torch that asks for
        shared memory.

        The lab's engine chooses its transport on top of gloo. Torch's engines use shared memory behind an emulated link
        too. Ranks that share a GPU use NCCL where it can do that, else gloo through host memory.
        """
        if self.device_type == "cuda":
            # NCCL before 2.30 refuses two ranks on one GPU
            by_host = self.transport == "auto" and self.shares_a_gpu and gpus.nccl_version() < gpus.MULTI_RANK_NCCL
            return "gloo" if by_host or self.transport == "gloo" else "nccl"
        return "shm" if (self.transport == "shm" or self.linked) and self.engine in ON_SHARED_MEMORY else "gloo"

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, JSON-able; `RunSpec(**spec.as_dict()) == spec`."""
        return asdict(self)


def spec_for(spec: Any, settings: dict[str, Any]) -> RunSpec:
    """Return the spec itself, or that of a model (a Workload, a file, a preset's name) with these settings."""
    if not isinstance(spec, RunSpec):
        return RunSpec(model=spec, **settings)
    if settings:
        raise SpecError(f"a RunSpec and {', '.join(settings)} were given; put the settings into the spec", *settings)
    return spec


def specs_for(specs: Any, settings: dict[str, Any]) -> list[RunSpec]:
    """Return the specs themselves, or, for a model, those of five strategies (or of `strategies`) and the unsharded
    twin.
    """
    if isinstance(specs, Sequence) and not isinstance(specs, str):
        return [spec_for(spec, settings) for spec in specs]
    if isinstance(specs, RunSpec):
        raise SpecError("a comparison has several runs; give a list of RunSpecs, or a model")
    strategies = settings.pop("strategies", OVER_ALL_RANKS)
    # two steps under the profiler: what a comparison says of exposed time needs a trace
    ranks = [RunSpec(model=specs, strategy=strategy, **{"profile": 2, **settings}) for strategy in strategies]
    # what describes a rank's memory or transport means nothing for the twin
    own = {name: value for name, value in settings.items() if name not in _OF_RANKS}
    return [*ranks, RunSpec(model=specs, engine="twin", **own | {"memory": False})]
