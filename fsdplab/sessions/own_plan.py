"""Plans a step of a user's own model on GPUs that are not here, from its recording, for the strategy lab."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdplab.planning.hardware import Gpu
from fsdplab.planning.lab_memory import MicroBatch
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.program import StepWork
from fsdplab.planning.recorded_plan import RecordedPlan, named_shape, recorded_plan, recorded_work
from fsdplab.sessions.spec import RunSpec
from fsdplab.workloads.own.sources import name_of


@dataclass(frozen=True, kw_only=True)
class OwnPlan(PlanSpec):
    """A plan whose model is one of one's own: `of` names it, its batch, its units and its recomputation, as a run of
    one rank. Of `model` only the name is used.
    """

    of: RunSpec

    @property
    def recording(self) -> MicroBatch:
        """The model's micro-batch on one of the GPUs; raises what its code raises."""
        from fsdplab.sessions.recorded_model import recording_on_gpus  # which imports torch

        return recording_on_gpus(self.of, self.gpus)

    @property
    def plan(self) -> RecordedPlan:
        """Memory, traffic and time of the step."""
        return recorded_plan(self, self.recording)

    @property
    def work(self) -> StepWork:
        """What its units compute and send."""
        return recorded_work(self, self.recording)


def own_plan(of: RunSpec, gpu: Gpu, **mesh: Any) -> OwnPlan:
    """Plan a step of `of` on GPUs; `mesh` are their number, the strategy and other fields of a PlanSpec."""
    return OwnPlan(
        model=named_shape(name_of(of.model)),
        gpu=gpu,
        seq=1,
        param_dtype=of.precision,
        checkpointing=of.checkpoint,
        optimizer=of.optimizer,
        prefetch=of.prefetch,
        of=of,
        **mesh,
    )
