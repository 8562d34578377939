"""A run of the lab as text to copy: PyTorch code, Accelerate's configuration, and a command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from fsdplab.planning.copy_as import BLOCKS, Sharded, accelerate_yaml, of_plan, of_the_lab, pytorch
from fsdplab.planning.plan_spec import PlanSpec, flag_of
from fsdplab.sessions.own_plan import OwnPlan
from fsdplab.sessions.spec import RunSpec
from fsdplab.workloads.own.sources import FILE, VALUE, kind_of

from .choices import Run
from .outcomes import recorded_model

_NO_FLAGS = ("strategy", "engine", "text", "device", "start", "time_limit", "memory", "warmup", "learning_rate")
_PLANNED = ("gpus", "gpus_per_node", "seq", "micro_batch", "param_dtype", "checkpointing", "prefetch", "optimizer")
_OF_THE_FILE = ("seq", "micro_batch")  # of a model of one's own


def copies(run: Run) -> dict[str, str]:
    """Title -> text of each form.

    >>> copies(RunSpec(model="gpt-tiny", prefetch=2))["Command line"]
    'fsdplab run full_shard --model gpt-tiny --prefetch 2 --profile 0'
    """
    what = sharded_of(run)
    return {"PyTorch": pytorch(what), "Accelerate": accelerate_yaml(what), "Command line": command(run)}


def sharded_of(run: Run) -> Sharded:
    """What of a run its engine's code depends on."""
    if isinstance(run, OwnPlan):
        return replace(of_plan(run), units=_units_of(run.of), program=())
    if isinstance(run, PlanSpec):
        return of_plan(run)
    units = _units_of(run)
    program = () if run.own_model else of_the_lab(run.model, units)
    return Sharded(
        strategy=run.strategy,
        ranks=run.world_size,
        units=units,
        shard_size=run.shard_size,
        precision=run.precision,
        checkpoint=run.checkpoint,
        prefetch=run.prefetch,
        optimizer=run.optimizer,
        device=run.device_type,
        offload=run.offload != "none",
        program=program,
    )


def _units_of(run: RunSpec) -> tuple[str, ...]:
    # the model itself is the unit: no class inside of it is wrapped
    if run.units == "model":
        return ()
    if run.own_model:
        return recorded_model().unit_classes(run)
    if run.units == "linear":
        return ("torch.nn.Linear",)
    # the block of this package's Llama, else that of its GPT
    return (BLOCKS["llama" in run.model][0],)


def command(run: Run) -> str:
    """The command that runs or plans the same; of a workload of a notebook the call."""
    return _plan_command(run) if isinstance(run, PlanSpec) else _run_command(run)


def _plan_command(plan: PlanSpec) -> str:
    names = [*_PLANNED]
    if isinstance(plan, OwnPlan):
        own = plan.of
        if kind_of(own.model) != FILE or own.units != "auto":
            return "# fsdplab plan reads a Python file, in the units that it names or that are found in it"
        model = own.model
        names = [name for name in names if name not in _OF_THE_FILE]
    else:
        model = plan.model.name
    gpu = plan.gpu.name.lower().split()[0]
    flags = {"--model": model, "--gpu": gpu}
    for name in names:
        flags[flag_of(name)] = getattr(plan, name)
    return _line(f"fsdplab plan --strategy {plan.strategy}", flags)


def _run_command(run: RunSpec) -> str:
    chosen: dict[str, Any] = {}
    for each in fields(run):
        value = getattr(run, each.name)
        if value != each.default and each.name not in _NO_FLAGS:
            chosen[each.name] = value
    chosen["profile"] = run.profile  # also at its default: a profiled run shows more than a fast one
    # a Workload exists in the notebook only, where no command line reaches it
    if kind_of(run.model) == VALUE:
        del chosen["model"]
        settings = {"strategy": run.strategy, **chosen}
        arguments = [f"{name}={value!r}" for name, value in settings.items()]
        return f"fsdplab.run(work, {', '.join(arguments)})"
    flags = {_run_flag(name): value for name, value in chosen.items()}
    return _line(f"fsdplab run {run.strategy}", flags)


def _run_flag(name: str) -> str:
    return "--as" if name == "as_model" else f"--{name.replace('_', '-')}"


def _line(begin: str, flags: Mapping[str, Any]) -> str:
    parts = [f"{flag} {shlex.quote(str(value))}" for flag, value in flags.items()]
    return " ".join([begin, *parts])
