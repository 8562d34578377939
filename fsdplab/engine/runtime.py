"""One per root: it applies the schedule to the units, bounds what is in flight, and knows when a step's phases end."""

from __future__ import annotations

from torch.autograd import Variable

from . import events
from .schedule import Schedule
from .unit import Unit


class Runtime:
    """Drives `units` (name -> unit, in the order of the module tree) through forwards and backwards."""

    def __init__(self, units: dict[str, Unit], prefetch: int) -> None:
        self.units = units
        self.schedule = Schedule(prefetch)
        self.is_last_backward = True
        self._forward_root: Unit | None = None
        self._reducing: list[Unit] = []
        self._in_backward: set[str] = set()
        self._after_backward: set[str] = set()
        self._callback_queued = False
        self._accumulating = False

    # ---- forward

    def before_forward(self, unit: Unit) -> None:
        """Have `unit` gathered, and the next ones on their way."""
        if self._forward_root is None or self._forward_root is unit:
            self._begin_forward(unit)
        with events.span("pre_forward", unit.name):
            unit.start_unshard("forward")
            unit.finish_unshard("forward")
            for name in self.schedule.before_forward(unit.name):
                self.units[name].start_unshard("forward")

    def _begin_forward(self, unit: Unit) -> None:
        self._forward_root = unit
        self._callback_queued = False
        self._in_backward.clear()
        self.schedule.begin()
        with events.span("root_pre_forward"):
            for each in self.units.values():
                each.reshard("forward")
                each.settle()
                each.forget_low_precision()
                each.stale |= not self._accumulating

    def after_forward(self, unit: Unit, will_backward: bool) -> None:
        """Drop `unit` where its strategy drops it; after the root, drop whatever no backward will come for."""
        self.schedule.after_forward(unit.name)
        with events.span("post_forward", unit.name):
            if unit.reshard_after_forward or not will_backward:
                unit.reshard("forward")
        if self._forward_root is unit:
            self._forward_root = None
            if not will_backward:
                self._drop_everything("forward")

    # ---- backward

    def recomputes(self, unit: Unit) -> bool:
        """Whether a forward of `unit` now is activation checkpointing's second one, inside its backward."""
        return unit.name in self._in_backward

    def before_backward(self, unit: Unit) -> None:
        """Have `unit` gathered again, and the next ones on their way."""
        self._queue_callback()
        if unit.name in self._in_backward:
            return
        self._in_backward.add(unit.name)
        with events.span("pre_backward", unit.name):
            unit.start_unshard("backward")
            unit.finish_unshard("backward")
            for name in self.schedule.before_backward(unit.name):
                with events.span("backward_prefetch", f"{name} for {unit.name}"):
                    self.units[name].start_unshard("backward")

    def after_backward(self, unit: Unit) -> None:
        """Collect the gradients of `unit`, drop it, and start to reduce."""
        self._in_backward.discard(unit.name)
        self._after_backward.add(unit.name)
        with events.span("post_backward", unit.name):
            unit.collect_gradients()
            unit.reshard("backward")
            if not unit.sync:
                return
            self._advance_reductions()
            unit.start_reduce()
            self._reducing.append(unit)

    def _advance_reductions(self) -> None:
        """Complete a stage of every reduction in flight: each had the backward of one unit to hide behind."""
        self._reducing = [unit for unit in self._reducing if not unit.finish_reduce()]

    def _queue_callback(self) -> None:
        if not self._callback_queued:
            self._callback_queued = True
            self._after_backward.clear()
            Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        """Complete units whose inputs carry no gradient or that were unused, then wait for every reduction."""
        with events.span("root_post_backward_callback"):
            for unit in reversed(self.units.values()):
                if unit.name not in self._after_backward:
                    self.after_backward(unit)
            while self._reducing:
                self._advance_reductions()
            self._drop_everything("backward")
            for unit in self.units.values():
                unit.forget_low_precision()
                if unit.sync:
                    unit.forget_whole_gradients()
        self._accumulating = not self.is_last_backward or not all(unit.sync for unit in self.units.values())
        self._callback_queued = False

    def _drop_everything(self, phase: str) -> None:
        for unit in self.units.values():
            unit.reshard(phase)
