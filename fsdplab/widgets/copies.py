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
    if isinstance(run, PlanSpec):
        found = of_plan(run)
        return replace(found, units=_units_of(run.of), program=()) if isinstance(run, OwnPlan) else found
    units = _units_of(run)
    return Sharded(
        run.strategy, run.world_size, units, run.shard_size, run.precision, run.checkpoint, run.prefetch,
        run.optimizer, run.device_type, run.offload != "none",
        program=() if run.own_model else of_the_lab(run.model, units),
    )  # fmt: skip


def _units_of(run: RunSpec) -> tuple[str, ...]:
    if run.units == "model":
        return ()
    if run.own_model:
        return recorded_model().unit_classes(run)
    if run.units == "linear":
        return ("torch.nn.Linear",)
    return (BLOCKS["llama" in run.model][0],)


def command(run: Run) -> str:
    """The command that runs or plans the same; of a workload of a notebook the call."""
    if isinstance(run, PlanSpec):
        own = run.of if isinstance(run, OwnPlan) else None
        if own and (kind_of(own.model) != FILE or own.units != "auto"):
            return "# fsdplab plan reads a Python file, in the units that it names or that are found in it"
        flags = {"--model": own.model if own else run.model.name, "--gpu": run.gpu.name.lower().split()[0]}
        flags |= {flag_of(name): getattr(run, name) for name in _PLANNED if not (own and name in _OF_THE_FILE)}
        return _line(f"fsdplab plan --strategy {run.strategy}", flags)
    changed = {each.name: value for each in fields(run) if (value := getattr(run, each.name)) != each.default}
    chosen = {name: value for name, value in changed.items() if name not in _NO_FLAGS} | {"profile": run.profile}
    if kind_of(run.model) == VALUE:
        del chosen["model"]
        settings = {"strategy": run.strategy, **chosen}
        return f"fsdplab.run(work, {', '.join(f'{name}={value!r}' for name, value in settings.items())})"
    given = {"--as" if name == "as_model" else f"--{name.replace('_', '-')}": each for name, each in chosen.items()}
    return _line(f"fsdplab run {run.strategy}", given)


def _line(begin: str, flags: Mapping[str, Any]) -> str:
    return " ".join([begin, *(f"{flag} {shlex.quote(str(value))}" for flag, value in flags.items())])
