"""Finds the memory that a step of a user's own optimizer holds: one is taken on tensors without values.

On the meta device every operator of a looped optimizer runs, and its counts of steps are real; a fused one has kernels
for devices alone, so it steps fake tensors of the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdplab.planning.lab_memory.step import Allocate, Event, Free
from fsdplab.sessions.launch.stacks import headline
from fsdplab.sessions.micro_batch import StorageLog, unlogged, without_values
from fsdplab.workloads.own.value import Workload

WHOLE = (
    "an optimizer that steps whole matrices sends them in ways of its own: give --optimizer muon to have it predicted"
)


@dataclass(frozen=True)
class OwnStep:
    """Bytes of state an element that is trained, on average, and of temporaries at the fullest moment of a step over
    whole parameters; `why_not`: what is not known of a rank that has shards.
    """

    state_bytes: float = 0.0
    scratch: int = 0
    why_not: str = ""


@lru_cache(maxsize=16)
def own_step(task: Workload, seed: int) -> OwnStep:
    """Return the step of the workload's own optimizer on its whole model."""
    try:
        return _stepped(task, task.build("meta", seed))
    except Exception:  # of the optimizer's own code, which may refuse this device; below it has another, or tells why
        pass
    try:
        with unlogged(), FakeTensorMode(allow_non_fake_inputs=True):
            return _stepped(task, without_values(task.build("meta", seed)))
    except Exception as error:  # or needs values
        return OwnStep(why_not=f"a step of its optimizer could not be recorded: {headline(error)}")


def _stepped(task: Workload, model: nn.Module) -> OwnStep:
    """Take two steps, of which the first makes the state and the second shows the temporaries."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = task.optimizer(parameters)
    assert optimizer is not None, "asked of a workload with an optimizer"
    if isinstance(optimizer, torch.optim.Muon):
        return OwnStep(why_not=WHOLE)
    events: list[Event] = []
    for _ in range(2):
        # the events of the second step stay: the first one's hold the new state too
        events = _step(optimizer, parameters)
    nbytes = 0
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if not isinstance(value, Tensor) or value.numel() <= 1:  # a count of steps
                continue
            if value.numel() != parameter.numel():
                return OwnStep(
                    why_not=f"its optimizer keeps state of shape {list(value.shape)}, not a value an element, so a"
                    " shard's is not known before it steps"
                )
            nbytes += value.numel() * value.element_size()
    elements = sum(parameter.numel() for parameter in parameters)
    # AdamW keeps two float32 values an element: 8.0 bytes
    return OwnStep(nbytes / elements, _most(events))


def _step(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> list[Event]:
    """Return the storages that a step begins and ends."""
    log = StorageLog(with_scratch=False)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                # state of the step before is no temporary of this one
                log.know(value)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
        log.know(parameter)
        log.know(parameter.grad)
    with log:
        optimizer.step()
    return log.events()


def _most(events: Sequence[Event]) -> int:
    """Return the bytes that are alive at the fullest moment."""
    alive: dict[int, int] = {}
    most = 0
    for event in events:
        if isinstance(event, Allocate):
            alive[event.storage] = event.nbytes
        elif isinstance(event, Free):
            alive.pop(event.storage, None)
        most = max(most, sum(alive.values()))
    return most
