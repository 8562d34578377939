"""One per root: it applies the schedule to the units, bounds what is in flight, and knows when a step's phases end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import Variable

from fsdplab.engine import compat, events
from fsdplab.engine.core.schedule import Schedule
from fsdplab.engine.core.unit import Unit

RUNNING, DONE = "running", "done"


class Runtime:
    """Drives `units` (name -> unit, in the order of the module tree) through forwards and backwards."""

    def __init__(self, units: dict[str, Unit], prefetch: int) -> None:
        self.units = units
        self.root = next(iter(units.values()))
        self.schedule = Schedule(prefetch)
        self.is_last_backward = True
        self.post_optimizer_event: torch.Event | None = None
        self.passes = 0  # root forwards begun or ended: what ran in another one does not count in this one
        self._forward_root: Unit | None = None
        self._entered: list[Unit] = []  # units whose forward has begun and not ended
        self._reducing: list[Unit] = []  # whose first collective is under way, oldest first
        self._replicating: list[Unit] = []  # whose second is: the all-reduce over the replicas of hybrid_shard
        self._backward_of: dict[str, str] = {}  # unit -> how far its backward has come in this pass; absent: not begun
        self._callback_queued = False
        self._accumulating = False
        self.raised: Unit | None = None  # whose forward an exception has left last

    # ---- forward

    @compat.outside_transforms
    def before_forward(self, unit: Unit) -> None:
        """Have `unit` gathered, and the next ones on their way."""
        again = compat.inside_backward()  # activation checkpointing computes a larger region a second time
        if not again and (self._forward_root in (None, unit) or unit is self.root):
            self._begin_forward(unit)
        self._entered.append(unit)
        with events.span("pre_forward", unit.name):
            unit.start_unshard("forward")
            unit.finish_unshard("forward")
            for each in [] if again else self._ahead(unit, "forward", self.schedule.before_forward(unit.name)):
                each.start_unshard("forward")

    def _ahead(self, unit: Unit, phase: str, scheduled: Sequence[str]) -> Sequence[Unit]:
        """What to gather behind `unit`: what the user listed for it, else what the schedule says."""
        listed = [each for reference in unit.ahead.get(phase, ()) if (each := reference()) is not None]
        return listed or [self.units[name] for name in scheduled]

    def _begin_forward(self, unit: Unit) -> None:
        if self._callback_queued:
            self._abandon_backward()
        self._forward_root, self._entered, self.raised = unit, [], None
        self.passes += 1
        self.schedule.begin()
        if self.post_optimizer_event is not None:
            self.post_optimizer_event.wait()
            self.post_optimizer_event = None
        with events.span("root_pre_forward"):
            for each in self.units.values():
                each.begin_forward(self._accumulating)

    @property
    def left_unfinished(self) -> bool:
        """Whether a step has ended in an exception, and neither `reset` nor another forward came since."""
        return self.raised is self._forward_root is not None or self._callback_queued and not compat.inside_backward()

    def reset(self) -> None:
        """Forget a forward or a backward that raised: nothing in flight, nothing gathered, no gradients accumulated."""
        unfinished = self._forward_root is not None or self._callback_queued
        self._abandon_backward()
        self._forward_root, self._accumulating, self.raised = None, False, None
        self.passes += 1
        for unit in self.units.values():
            unit.abandon_unshard()
        for transport in dict.fromkeys(each for unit in self.units.values() for each in unit.transports()):
            transport.leave_step(unfinished)
        for unit in self.units.values():
            unit.reshard_by_hand()

    def _abandon_backward(self) -> None:
        """The last backward ended in an exception: its gradients are lost, those handed out before it are kept."""
        self._callback_queued = False
        self._backward_of.clear()
        self._reducing.clear()
        self._replicating.clear()
        for unit in self.units.values():
            unit.abandon_gradients()

    @compat.outside_transforms
    def after_forward(self, unit: Unit, will_backward: bool, hidden: bool = False) -> None:
        """Drop `unit` where its strategy drops it; after the root, drop whatever no backward will come for.

        One whose results are `hidden` (written to a list, say, instead of returned) stays: nothing will announce its
        backward.
        """
        if compat.inside_backward():
            return
        self._end_forward(unit, will_backward, hidden)
        if self._forward_root is unit:
            while self._entered:  # units of which some modules were left out
                self._end_forward(self._entered[-1], will_backward)
            self.passes += 1
            if not will_backward:
                self._drop_everything("forward")
                self._settle_storage()
            self._settle()
            self._forward_root = None

    def _end_forward(self, unit: Unit, will_backward: bool, hidden: bool = False) -> None:
        if unit in self._entered:
            self._entered.remove(unit)
        self.schedule.after_forward(unit.name)
        with events.span("post_forward", unit.name):
            if unit.reshard_after_forward and not hidden or not (will_backward or unit.keep_unsharded):
                unit.reshard_until_backward() if will_backward else unit.reshard("forward")

    # ---- backward

    def recomputes(self, unit: Unit) -> bool:
        """Whether a forward of `unit` now is activation checkpointing's second one, inside its backward."""
        return compat.inside_backward() and self._backward_of.get(unit.name) is RUNNING

    @compat.outside_transforms
    def gather_again(self, unit: Unit) -> None:
        """A forward is computed again inside the backward of `unit`; an earlier backward may have dropped it."""
        unit.start_unshard("backward")
        unit.finish_unshard("backward")

    @compat.outside_transforms
    def before_backward(self, unit: Unit) -> None:
        """Have `unit` gathered again, and the next ones on their way; a unit may run twice in a forward, and then has
        two backwards.
        """
        self._queue_callback()
        if self._backward_of.get(unit.name) is RUNNING:
            return
        self._backward_of[unit.name] = RUNNING
        with events.span("pre_backward", unit.name):
            self._gather_for_backward(unit)
            unit.finish_unshard("backward")
            for each in self._ahead(unit, "backward", self.schedule.before_backward(unit.name)):
                with events.span("backward_prefetch", f"{each.name} for {unit.name}"):
                    self._gather_for_backward(each)

    def before_backward_of_base(self, unit: Unit) -> None:
        """As `before_backward`, for the base of an output that is a view: it may come after the view's backward."""
        if not self._callback_queued or self._backward_of.get(unit.name) is not DONE:
            self.before_backward(unit)

    def _gather_for_backward(self, unit: Unit) -> None:
        if unit.unshard_in_backward:
            unit.start_unshard("backward")

    @compat.outside_transforms
    @torch.no_grad()  # a backward with create_graph=True records what its hooks do
    def after_backward(self, unit: Unit) -> None:
        """Collect the gradients of `unit`, drop it, and start to reduce."""
        if compat.inside_backward():
            self._queue_callback()
        if self._backward_of.get(unit.name) is None:
            unit.check_unannounced()
        self._backward_of[unit.name] = DONE
        with events.span("post_backward", unit.name):
            if unit in self._reducing or unit in self._replicating:
                self._finish_reductions()  # it has run twice, and reduces for the second time
            unit.collect_gradients()
            if unit.reshard_after_backward:
                unit.reshard("backward")
            if not unit.sync:
                return
            self._make_room(self._most_under_way(unit))
            unit.start_reduce()
            self._reducing.append(unit)

    def _most_under_way(self, unit: Unit) -> int:
        """How many reductions of the first kind may be; the largest number that any unit was given, as in FSDP2.

        Where the host begins the all-reduces over replicas, no more than half of the units: the other half of the
        backward is for those to hide behind.
        """
        most = max(each.in_flight for each in self.units.values())
        on_host = unit.config.shard and unit.config.replicate and unit.config.device.type == "cpu"
        return min(most, max(1, len(self.units) // 2)) if on_host else most

    def _make_room(self, most: int) -> None:
        """Wait for the oldest reductions until fewer than `most` are under way; those over replicas go on with their
        all-reduce, which has the backward of another `most` units to hide behind.
        """
        while len(self._reducing) >= most:
            oldest = self._reducing.pop(0)
            if not oldest.finish_reduce():
                while len(self._replicating) >= most:
                    self._replicating.pop(0).finish_reduce()
                self._replicating.append(oldest)

    def _finish_reductions(self) -> None:
        self._make_room(1)
        while self._replicating:
            self._replicating.pop(0).finish_reduce()

    def _queue_callback(self) -> None:
        if not self._callback_queued:
            self._callback_queued = True
            self._backward_of.clear()
            Variable._execution_engine.queue_callback(self.end_backward)

    @torch.no_grad()
    def end_backward(self) -> None:
        """Complete units whose inputs carry no gradient or that were unused, then wait for every reduction."""
        with events.span("root_post_backward_callback"):
            for unit in reversed(self.units.values()):
                if self._backward_of.get(unit.name) is not DONE:
                    self.after_backward(unit)
            self._finish_reductions()
            self._drop_everything("backward")
            self._settle()
            self._settle_storage()
            for unit in self.units.values():
                unit.await_gradients()
                if unit.sync:
                    unit.forget_whole_gradients()
        self._accumulating = not self.is_last_backward or not all(unit.sync for unit in self.units.values())
        self._callback_queued = False

    def _settle(self) -> None:
        """Peers have read what this rank published: the optimizer, or whoever comes next, may write to the slices."""
        for transport in {unit.config.shard for unit in self.units.values() if unit.config.shard is not None}:
            transport.settle()

    def _settle_storage(self) -> None:
        """The same for what copies slices from the host: between forward and backward nobody writes to them."""
        for storage in {unit.config.storage for unit in self.units.values()}:
            storage.settle()

    def _drop_everything(self, phase: str) -> None:
        for unit in self.units.values():
            if not unit.keep_unsharded if phase == "forward" else unit.reshard_after_backward:
                unit.reshard(phase)
