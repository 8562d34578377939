"""A model of one's own, recorded for a plan: a Python file with model(), batch(at), loss(model, batch) and units."""

from __future__ import annotations

import hashlib
import importlib.util
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fsdplab.planning.lab_memory import MicroBatch
from fsdplab.planning.recorded_plan import RecordedPlan, recorded_spec
from fsdplab.sessions.micro_batch import RecordChoices, record_micro_batch
from fsdplab.workloads.errors import ModelError
from fsdplab.workloads.workload import At

NEEDED = ("model", "batch", "loss")


def plan_of_file(model: str, gpu: str, **choices: Any) -> RecordedPlan:
    """The plan of a step of the model in a file; ModelError, HardwareError or PlanError in one line."""
    path = Path(model).expanduser()
    if not path.is_file():
        raise ModelError(
            f"there is no file {model}; expected a Python file with model(), batch(at), loss(model, batch)"
        )
    spec = recorded_spec(path.name, gpu, **choices)
    digest = hashlib.blake2b(path.read_bytes()).hexdigest()
    return RecordedPlan(spec, _recorded(path.resolve(), digest, spec.param_bytes == 2, spec.checkpointing))


@lru_cache(maxsize=16)
def _recorded(path: Path, digest: str, low_precision: bool, checkpoint: str) -> MicroBatch:
    """Kept for a file's content: other choices of a plan only play it."""
    workload = _File(path)
    choices = RecordChoices(workload.units, low_precision=low_precision, checkpoint=checkpoint, on_card=True)
    return record_micro_batch(workload, choices)


class _File:
    """The functions of a file, as what is recorded."""

    def __init__(self, path: Path) -> None:
        self._module = _imported(path)
        missing = [name for name in NEEDED if not callable(getattr(self._module, name, None))]
        if missing:
            raise ModelError(f"{path.name} has no function {missing[0]}; expected {', '.join(NEEDED)}")

    def build(self, device: torch.device | str, seed: int) -> nn.Module:
        """`model()` on `device`, from one seed; torch's generators stay as they were."""
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(seed)
            return self._module.model()

    def batch(self, at: At) -> Any:
        """The file's own."""
        return self._module.batch(at)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The file's own."""
        return self._module.loss(model, batch)

    def units(self, model: nn.Module) -> Any:
        """The classes that the file names; else every child of a ModuleList, or none."""
        given = getattr(self._module, "units", None)
        if given is not None:
            return tuple(given)
        return "auto" if any(isinstance(each, nn.ModuleList) for each in model.modules()) else "root"


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path.name} is no Python file; expected one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
