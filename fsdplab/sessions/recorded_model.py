"""A model of one's own, recorded for a prediction: of a run on this machine, or of a plan on GPUs that are not here.

The recording is kept for a model and its units; other choices of a run or a plan only play it.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from fsdplab.planning.lab_memory import MicroBatch
from fsdplab.planning.recorded_plan import RecordedPlan, recorded_plan, recorded_spec
from fsdplab.sessions.micro_batch import RecordChoices, record_micro_batch
from fsdplab.sessions.spec import RunSpec, Sharding
from fsdplab.sessions.worker.engines import as_argument, units_of, workload_of
from fsdplab.workloads.errors import ModelError
from fsdplab.workloads.own.reading import workload_in
from fsdplab.workloads.own.value import Workload
from fsdplab.workloads.workload import Task


def plan_of_file(model: str, gpu: str, **choices: Any) -> RecordedPlan:
    """The plan of a step of the model in a file; ModelError, HardwareError or PlanError in one line."""
    path = Path(model).expanduser()
    if not path.is_file():
        raise ModelError(
            f"there is no file {model}; expected a Python file with model(), batch(at), loss(model, batch)"
        )
    spec = recorded_spec(path.name, gpu, **choices)
    return recorded_plan(spec, _of_plan(workload_in(path), spec.param_bytes == 2, spec.checkpointing))


@lru_cache(maxsize=16)
def _of_plan(task: Task, low_precision: bool, checkpoint: str) -> MicroBatch:
    choices = RecordChoices(
        lambda model: as_argument(task.found_units(model).modules),
        low_precision=low_precision, checkpoint=checkpoint, on_card=True,
    )  # fmt: skip
    return record_micro_batch(task, choices)


def recording_of(spec: RunSpec) -> MicroBatch:
    """The first micro-batch of a run, in its units and its precision; raises what the model's own code raises."""
    return _of_run(workload_of(spec), spec.units, spec.precision, spec.checkpoint, spec.world_size, spec.seed)


def has_own_optimizer(spec: RunSpec) -> bool:
    """Whether the model of a run brings an optimizer in place of AdamW."""
    workload = workload_of(spec)
    return isinstance(workload, Workload) and "optimizer" in workload.functions


@lru_cache(maxsize=16)
def _of_run(task: Task, units: str, precision: str, checkpoint: str, world_size: int, seed: int) -> MicroBatch:
    def chosen(model: nn.Module) -> Any:
        return as_argument(units_of(Sharding(units=units), model, task).modules)

    return record_micro_batch(task, RecordChoices(chosen, precision == "bf16", checkpoint, world_size, seed))
