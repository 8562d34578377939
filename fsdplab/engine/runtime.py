"""One per root: it applies the schedule to the units, bounds what is in flight, and knows when a step's phases end."""

from __future__ import annotations

from torch.autograd import Variable

from . import compat, events
from .schedule import Schedule
from .unit import Unit


class Runtime:
    """Drives `units` (name -> unit, in the order of the module tree) through forwards and backwards."""

    def __init__(self, units: dict[str, Unit], prefetch: int) -> None:
        self.units = units
        self.root = next(iter(units.values()))
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
        again = compat.inside_backward()  # activation checkpointing computes a larger region a second time
        if not again and (self._forward_root in (None, unit) or unit is self.root):
            self._begin_forward(unit)
        with events.span("pre_forward", unit.name):
            unit.start_unshard("forward")
            unit.finish_unshard("forward")
            for name in [] if again else self.schedule.before_forward(unit.name):
                self.units[name].start_unshard("forward")

    def _begin_forward(self, unit: Unit) -> None:
        if self._callback_queued:
            self._abandon_backward()
        self._forward_root = unit
        self.schedule.begin()
        with events.span("root_pre_forward"):
            for each in self.units.values():
                each.begin_forward(self._accumulating)

    def _abandon_backward(self) -> None:
        """The last backward ended in an exception: its gradients are lost, those handed out before it are kept."""
        self._callback_queued = False
        self._in_backward.clear()
        self._reducing.clear()
        for unit in self.units.values():
            unit.abandon_gradients()

    def after_forward(self, unit: Unit, will_backward: bool) -> None:
        """Drop `unit` where its strategy drops it; after the root, drop whatever no backward will come for."""
        if compat.inside_backward():
            return
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
        return compat.inside_backward() and unit.name in self._in_backward

    def before_backward(self, unit: Unit) -> None:
        """Have `unit` gathered again, and the next ones on their way."""
        self._queue_callback()
        if unit.name in self._in_backward:
            return
        self._in_backward.add(unit.name)
        self._after_backward.discard(unit.name)  # it may have run twice in the forward
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
            while unit in self._reducing:
                self._advance_reductions()
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
                if unit.sync:
                    unit.forget_whole_gradients()
        self._accumulating = not self.is_last_backward or not all(unit.sync for unit in self.units.values())
        self._callback_queued = False

    def _drop_everything(self, phase: str) -> None:
        for unit in self.units.values():
            unit.reshard(phase)
            unit.forget_low_precision()
