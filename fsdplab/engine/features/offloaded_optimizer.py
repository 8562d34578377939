"""Steps an optimizer whose state rests elsewhere, part by part, while the next part's state is on its way.

`offload_optimizer` makes any of PyTorch's elementwise optimizers one, in place, as `fully_shard` does with modules:
learning rate schedulers, gradient scalers, state dicts and checkpoints see the optimizer that they know. The rest is
the order of one step, that of DeepSpeed's pipelined swapper (ZeRO-Infinity, section 5.2.2):

    for each part (parameters of at most `part_bytes` with their state):
        begin to bring in the part that comes `ahead` parts later -> wait for this part -> step on it -> begin to put it
        away
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdplab.engine import compat
from fsdplab.engine.features import mapped
from fsdplab.engine.features.matrix_optimizer import MatrixOptimizer
from fsdplab.engine.features.offload import HostStorage, away_from, end_to_end

_classes: dict[type, type] = {}


def offload_optimizer(
    optimizer: Optimizer, policy: OffloadPolicy, *, ahead: int = 1, part_bytes: int = 64 << 20
) -> Optimizer:
    """Keep the state of `optimizer` where `policy` says, between steps; returns `optimizer`, whose class becomes
    `Offloaded<Name>`. Every result stays equal to the last bit.

    `part_bytes` bounds parameters and state that are stepped on at once (one larger parameter is a part of its own);
    `ahead` parts are brought in before their turn. Call it before a scheduler is built. Raises `ValueError` for
    optimizers whose parameters do not step independently, and for an optimizer that something has already wrapped.
    """
    _check(optimizer, ahead, part_bytes)
    storage = away_from(policy)
    original = type(optimizer)
    name = f"Offloaded{original.__name__}"
    made = type(name, (OffloadedOptimizer, original), {"__module__": original.__module__})
    optimizer.__class__ = _classes.setdefault(original, made)  # one class for all optimizers of a kind
    optimizer._offloading = _Offloading(storage, ahead, part_bytes)
    optimizer._patch_step_function()  # step hooks run once a step, not once a part
    optimizer._put_all_away()
    return optimizer


def _check(optimizer: Optimizer, ahead: int, part_bytes: int) -> None:
    """Raise for optimizers that cannot step part by part, and for wrong sizes."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"offload_optimizer needs a torch.optim.Optimizer, got {name}")
    if isinstance(optimizer, OffloadedOptimizer):
        raise ValueError(f"{name}: its state is offloaded already; call offload_optimizer once")
    if isinstance(optimizer, MatrixOptimizer):
        raise ValueError(
            f"{name} exchanges matrices in buckets, not part by part; keep its momentum on the device, or offload the"
            " model's shards (CPUOffloadPolicy)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS steps on all parameters together, so its state cannot leave part by part; use AdamW or SGD"
        )
    if "step" in vars(optimizer):
        raise ValueError(
            f"{name}.step was replaced (by a scheduler?); call offload_optimizer before you build the scheduler"
        )
    if ahead < 0 or part_bytes < 1:
        raise ValueError(f"ahead must be 0 or more parts and part_bytes 1 or more, got {ahead} and {part_bytes}")


@dataclass
class _Part:
    """Parameters of one group that step together; on a device, `arrived` says when their state is there."""

    group: dict[str, Any]
    params: list[nn.Parameter]
    arrived: torch.cuda.Event | None = None


@dataclass(frozen=True)
class _Item:
    """One tensor of the state of one parameter."""

    param: nn.Parameter
    key: str
    value: torch.Tensor

    @property
    def local(self) -> torch.Tensor:
        """What this rank holds of it."""
        return compat.local_of(self.value)


@dataclass
class _Offloading:
    """Where the state rests, how much of it comes at once, and the host memory of what is on a device now."""

    storage: HostStorage
    ahead: int
    part_bytes: int
    resting: dict[tuple[nn.Parameter, str], torch.Tensor] = field(default_factory=dict)
    lift: _Lift | None = None


class OffloadedOptimizer(Optimizer):
    """What an optimizer becomes when its state is offloaded: itself, plus this way to step."""

    _offloading: _Offloading
    param_groups: list[dict[str, Any]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of the original optimizer, part by part; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # With ahead=1 and three parts: bring in 1 and 2, step on 1, bring in 3, step on 2, step on 3.
        parts = list(self._parts())
        begun = 0  # how many parts are here, or on their way
        for index, part in enumerate(parts):
            # Those not begun yet, up to `ahead` parts behind this one.
            for following in parts[begun : index + 1 + self._offloading.ahead]:
                self._bring_in(following)
                begun += 1
            self._step_on(part)
            self._put_away(part)
        if self._offloading.lift is not None:
            self._offloading.lift.finish()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as the original does; then put away what was loaded."""
        super().load_state_dict(state_dict)
        self._put_all_away()

    def _put_all_away(self) -> None:
        """Move the state of all parameters to where it rests."""
        for part in self._parts(all_of_them=True):
            self._put_away(part)
        if self._offloading.lift is not None:
            self._offloading.lift.finish()

    def _parts(self, all_of_them: bool = False) -> Iterator[_Part]:
        """Yield the parameters that have a gradient, or all, in parts of bounded size."""
        for group in self.param_groups:
            params: list[nn.Parameter] = []
            part_bytes = 0
            for param in group["params"]:
                if param.grad is None and not all_of_them:
                    continue
                nbytes = self._bytes_of(param)
                # Full. A parameter that is larger than a part is a part of its own.
                if params and part_bytes + nbytes > self._offloading.part_bytes:
                    yield _Part(group, params)
                    params, part_bytes = [], 0
                params.append(param)
                part_bytes += nbytes
            if params:
                yield _Part(group, params)

    def _bytes_of(self, param: nn.Parameter) -> int:
        """Return the bytes of a parameter and of its state; before the first step as many as Adam would have."""
        nbytes = compat.local_of(param).nbytes
        items = self._items([param])
        # The parameter and two moments of its size.
        if not items:
            return 3 * nbytes
        return nbytes + sum(item.local.nbytes for item in items)

    def _items(self, params: Sequence[nn.Parameter]) -> list[_Item]:
        """Return the state of `params` that has rows here; counters stay where they are."""
        items = []
        for param in params:
            for key, value in self.state.get(param, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and compat.local_of(value).nbytes:
                    items.append(_Item(param, key, value))
        return items

    def _step_on(self, part: _Part) -> None:
        """Make the original step, which sees `part` and nothing else."""
        everything, params = self.param_groups, part.group["params"]
        options = {key: value for key, value in part.group.items() if key != "params"}  # learning rate and so on
        step = super().step.__func__
        if getattr(step, "hooked", False):  # the hooks belong to the whole step
            step = step.__wrapped__
        if part.arrived is not None:  # the device waits, not the host
            torch.cuda.current_stream(part.params[0].device).wait_event(part.arrived)
        # The step sees one group with the parameters of this part; options that it reads are those of the group.
        try:
            self.param_groups, part.group["params"] = [part.group], part.params
            step(self)
        finally:
            self.param_groups, part.group["params"] = everything, params
        changed = [key for key, value in options.items() if part.group[key] is not value]
        if changed:
            raise RuntimeError(
                f"{type(self).__name__} changes {changed[0]!r} of its param_groups when it steps, so it cannot step"
                " part by part; this step is half done: start again without offload_optimizer"
            )

    def _bring_in(self, part: _Part) -> None:
        """Begin to read what `part` needs, and to copy state that rests on the host to parameters on a device."""
        items = self._items(part.params)
        for param in part.params:
            mapped.bring_in(compat.local_of(param))
        for item in items:
            mapped.bring_in(item.local)
        away = [item for item in items if item.local.device != item.param.device]
        if not away:
            return
        lift = self._lift_to(part.params[0].device)
        copies, part.arrived = lift.bring([item.local for item in away])
        for item, copy in zip(away, copies):
            self._offloading.resting[item.param, item.key] = item.local  # where it goes back to after the step
            self.state[item.param][item.key] = _like(item.value, copy)

    def _put_away(self, part: _Part) -> None:
        """Begin to write what `part` changed, and move state that is new, or on a device, to where it rests."""
        storage = self._offloading.storage
        # State that is new (of a first step or a state dict), or was copied to the device for this step.
        leaving = [item for item in self._items(part.params) if not storage.holds(item.local)]
        rests = self._rests_of(leaving)
        if leaving and leaving[0].local.device.type == "cuda":
            lift = self._lift_to(leaving[0].local.device)
            lift.put_away([item.local for item in leaving], rests)
        else:
            for item, rest in zip(leaving, rests):
                rest.copy_(item.local)
        for item, rest in zip(leaving, rests):
            self.state[item.param][item.key] = _like(item.value, rest)
        for param in part.params:
            mapped.let_go(compat.local_of(param), storage.keep_cached)
        for item in self._items(part.params):  # again: the state is where it rests now
            mapped.let_go(item.local, storage.keep_cached)

    def _rests_of(self, items: Sequence[_Item]) -> list[torch.Tensor]:
        """Return where each of `items` rests: where it came from, or new memory, one piece for all that are new."""
        known = [self._offloading.resting.pop((item.param, item.key), None) for item in items]
        new = [item.local for item, rest in zip(items, known) if rest is None]
        if not new:
            return known

        def memory(nbytes: int) -> torch.Tensor:
            return self._offloading.storage.make(nbytes, "optimizer state")

        made = iter(end_to_end(new, memory))
        return [next(made) if rest is None else rest for rest in known]

    def _lift_to(self, device: torch.device) -> _Lift:
        """Return what copies to and from `device`."""
        if self._offloading.lift is None:
            self._offloading.lift = _Lift(device, self._offloading.ahead)
        return self._offloading.lift


class _Lift:
    """Copies between a device and host memory on a stream of its own, ordered by events.

    What leaves is kept until its copy has ended, so its memory is not used again before; the host waits only when more
    than `ahead` parts are still leaving.
    """

    def __init__(self, device: torch.device, ahead: int) -> None:
        self._device = device
        self._ahead = ahead
        self._stream = torch.cuda.Stream(device)
        # The values of each part that is leaving, and the event that says that they have left.
        self._leaving: deque[tuple[torch.cuda.Event, list[torch.Tensor]]] = deque()

    def bring(
        self,
        rests: Sequence[torch.Tensor],  # any shapes, on the host
    ) -> tuple[list[torch.Tensor], torch.cuda.Event]:
        """Begin to copy `rests` to the device; return the copies, and what says that they are complete."""
        with torch.cuda.stream(self._stream):
            copies = [rest.to(self._device, non_blocking=True) for rest in rests]
            return copies, self._stream.record_event()

    def put_away(
        self,
        values: list[torch.Tensor],  # any shapes, on the device
        rests: Sequence[torch.Tensor],  # of the shapes of `values`, on the host
    ) -> None:
        """Copy `values` to `rests` once the device's present work is done."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for value, rest in zip(values, rests):
                rest.copy_(value, non_blocking=True)
            self._leaving.append((self._stream.record_event(), values))
        while len(self._leaving) > self._ahead:
            self._leaving[0][0].synchronize()  # while its values are kept: their copies may not have ended
            self._leaving.popleft()

    def finish(self) -> None:
        """Return once everything has left: the host may read it."""
        self._stream.synchronize()
        self._leaving.clear()


def _like(
    value: torch.Tensor,  # any shape: a state as the optimizer has it
    local: torch.Tensor,  # any shape: what this rank holds of it
) -> torch.Tensor:
    """Return `local` as a DTensor where `value` is one."""
    if isinstance(value, DTensor):
        return compat.dtensor_of(local, value._spec)
    return local
