"""Records a user's own model for a prediction: of a run on this machine, or of a plan on GPUs that are not here.

The recording is kept for a model and its units; other choices of a run or a plan only play it.
"""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch import nn

from fsdplab.planning.lab_memory import MicroBatch
from fsdplab.planning.program import StepWork
from fsdplab.planning.recorded_plan import RecordedPlan, recorded_plan, recorded_spec, recorded_work
from fsdplab.sessions.launch.stacks import headline
from fsdplab.sessions.micro_batch import RecordChoices, record_micro_batch
from fsdplab.sessions.own_optimizer import OwnStep, own_step
from fsdplab.sessions.spec import RunSpec, Sharding
from fsdplab.sessions.steady_card import plan_of
from fsdplab.sessions.worker.engines import as_argument, matrices_of, units_of, workload_of
from fsdplab.workloads.errors import ModelError
from fsdplab.workloads.own.reading import where_in, workload_in
from fsdplab.workloads.own.sources import source_of
from fsdplab.workloads.own.value import Workload
from fsdplab.workloads.workload import Task


def plan_of_file(model: str, gpu: str, **choices: Any) -> RecordedPlan:
    """Return the plan of a step of the model in a file; ModelError, HardwareError or PlanError in one line."""
    path = Path(model).expanduser()
    if not path.is_file():
        raise ModelError(
            f"there is no file {model}; expected a Python file with model(), batch(at), loss(model, batch)"
        )
    source_of(str(path))  # which says of a step with two losses that it cannot be predicted
    spec = recorded_spec(path.name, gpu, **choices)
    precision = "bf16" if spec.param_bytes == 2 else "fp32"
    task = workload_in(path)
    try:
        # one rank's batch, seed 0: only shapes count
        recording = _recorded(task, "auto", precision, spec.checkpointing, 1, 0, on_card=True)
    except ModelError as error:
        raise ModelError(f"{path.name}: {error}") from error
    except (Exception, SystemExit) as error:  # of the model's own code, which may raise anything
        raise ModelError(
            f"a micro-batch of {path.name} could not be recorded: {where_in(path.resolve(), error)}"
        ) from error
    return recorded_plan(spec, recording)


def recording_on_gpus(of: RunSpec, gpus: int) -> MicroBatch:
    """Return the first micro-batch of one of `gpus` ranks of a run, without the scratch memory of a CPU."""
    return _recorded(workload_of(of), of.units, of.precision, of.checkpoint, gpus, of.seed, on_card=True)


def recording_of(spec: RunSpec) -> MicroBatch:
    """Record the first micro-batch of a run, in its units and precision; raises what the model's own code raises."""
    return _recorded(workload_of(spec), spec.units, spec.precision, spec.checkpoint, spec.world_size, spec.seed)


def recording_or_why(spec: RunSpec) -> MicroBatch | str:
    """Return the same, or one sentence on what the model's own code raised."""
    try:
        return recording_of(spec)
    except (Exception, SystemExit) as error:  # of the model's own code, which may raise anything; its ranks say where
        return f"its micro-batch could not be recorded: {headline(error)}"


def unit_classes(spec: RunSpec) -> tuple[str, ...]:
    """Return the names of the classes of the run's units; () where all is one unit. Raises as above."""
    task = workload_of(spec)
    found = units_of(Sharding(units=spec.units), task.build("meta", spec.seed), task)
    return tuple(dict.fromkeys(type(module).__name__ for module in found.modules))


def own_step_of(spec: RunSpec) -> OwnStep | None:
    """Return the step of the optimizer that a run's model brings in place of the run's; None where it brings none."""
    workload = workload_of(spec)
    # a model without optimizer(parameters) is stepped by the run's
    brings = isinstance(workload, Workload) and "optimizer" in workload.functions
    return own_step(workload, spec.seed) if brings else None


@lru_cache(maxsize=16)
def _recorded(
    task: Task, units: str, precision: str, checkpoint: str, world_size: int, seed: int, on_card: bool = False
) -> MicroBatch:
    def chosen(model: nn.Module) -> Any:
        return as_argument(units_of(Sharding(units=units), model, task).modules)

    choices = RecordChoices(
        chosen, precision == "bf16", checkpoint, world_size, seed, on_card, matrices=partial(matrices_of, task)
    )
    return record_micro_batch(task, choices)


def steady_work(spec: RunSpec) -> StepWork:
    """Return what a step of the run computes and sends on the steady card; raises what the model's own code raises."""
    return recorded_work(plan_of(spec), recording_of(spec), efficiency=1.0).shared(streams=False)
