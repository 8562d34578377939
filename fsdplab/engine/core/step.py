"""Orders a step: what is unsharded, resharded and reduced as forwards and backwards begin and end. No torch.

In training autograd calls these methods (hooks.py), in a plan a list of units does (planning/program).

The order of forwards is learnt: the first forward unshards every unit on demand, later ones `depth` units ahead as long
as they follow that order. The order of backwards is the reverse of that in which forwards ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from fsdplab.engine.core.unit import DONE, RUNNING, TO_COME, Unit

Span = Callable[..., AbstractContextManager]  # (label, unit) -> a named range of the profiler


class Schedule:
    """The order of units, and which of them to unshard next.

    >>> plan = Schedule(depth=1)
    >>> for _ in range(2):
    ...     plan.begin()
    ...     ahead = [plan.before_forward(u) for u in ("root", "a", "b")]
    ...     for u in ("a", "b", "root"): plan.after_forward(u)
    >>> ahead, plan.before_backward("root"), plan.before_backward("b"), plan.before_backward("a")
    ([['a'], ['b'], []], ['b'], ['a'], [])
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._learned: list[str] = []  # the order in which the last root forward entered its units
        self._entered: list[str] = []  # by this forward, so far
        self._ended: list[str] = []  # forwards whose backward is to come, in the order in which they ended

    def begin(self) -> None:
        """Begin a new root forward, in which units are expected in the order of the last one."""
        if self._entered:
            self._learned = self._entered
        self._entered, self._ended = [], []

    def before_forward(self, unit: str) -> Sequence[str]:
        """Note that `unit` begins; return the units to gather behind its forward."""
        self._entered.append(unit)
        position = len(self._entered)
        # The first forward, or one that takes another way: a guess could gather a unit that does not run.
        if self._learned[:position] != self._entered:
            return []
        return self._learned[position : position + self.depth]

    def after_forward(self, unit: str) -> None:
        """Note that the forward of `unit` ended."""
        self._ended.append(unit)

    def before_backward(self, unit: str) -> Sequence[str]:
        """Return the units to gather behind the backward of `unit`, nearest first."""
        if unit in self._ended:
            # Its last forward, and those that ended after it, have had their backwards.
            while self._ended.pop() != unit:
                pass
        if self.depth == 0:
            return []
        # The last `depth` of them, the last one first: of [a, b, c] with depth 2, [c, b].
        return self._ended[: -self.depth - 1 : -1]


class StepOrder:
    """Leads the `units` of one root (name -> unit, in the order of the module tree) through forwards and backwards."""

    def __init__(self, units: dict[str, Unit], schedule: Schedule, span: Span = lambda *_: nullcontext()) -> None:
        self.units, self.root, self.schedule, self._span = units, next(iter(units.values())), schedule, span
        self.has_run = False  # whether a root forward has begun
        self.forward_of: Unit | None = None  # the outermost unit whose forward runs
        self.in_backward = False
        self._entered: list[Unit] = []  # units whose forward has begun and not ended
        self._reducing: tuple[list[Unit], ...] = ([], [])  # by the collective under way, first or second; oldest first
        self._accumulating = False
        self._find_most_in_flight()

    # ---- forward

    def before_forward(self, unit: Unit) -> None:
        """Have `unit` unsharded, and the next ones on their way."""
        # The outermost unit begins a forward of the root. One that is still noted as running has raised.
        if self.forward_of in (None, unit) or unit is self.root:
            self._begin_forward(unit)
        self._entered.append(unit)
        with self._span("pre_forward", unit.name):
            unit.start_unshard("forward")
            unit.finish_unshard("forward")
            # Issued before `unit` computes, so that these all-gathers hide behind its forward.
            for following in self._ahead(unit, "forward", self.schedule.before_forward(unit.name)):
                following.start_unshard("forward")

    def _ahead(self, unit: Unit, phase: str, scheduled: Sequence[str]) -> Sequence[Unit]:
        """Return the units to unshard behind `unit`: those that the user listed for it, else the `scheduled` ones."""
        listed = [reference() for reference in unit.ahead.get(phase, ())]
        alive = [listed_unit for listed_unit in listed if listed_unit is not None]
        return alive or [self.units[name] for name in scheduled]

    def _begin_forward(self, outermost: Unit) -> None:
        """Begin the forward of the root, or of the outermost unit that runs: all units start from their shards, except
        those that need not be gathered again.
        """
        if self.in_backward:  # it raised
            self.abandon_backward()
        self.has_run, self.forward_of, self._entered = True, outermost, []
        self.schedule.begin()
        announced = self._another_backward_comes
        with self._span("root_pre_forward"):
            candidates = [unit for unit in self.units.values() if unit.may_be_current(self._accumulating)]
            # All candidates at once: in training the ranks exchange one flag for each.
            current = self._unchanged(candidates)
            for unit in self.units.values():
                unit.check_collected()
                unit.memory.remembers = announced
                unit.begin_forward(unit in current)

    def _unchanged(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Return those of `units` of which no rank has other shards than those that were gathered."""
        return [unit for unit in units if not unit.memory.changed()]

    @property
    def _another_backward_comes(self) -> bool:
        """Whether the user has said so; it may be wrong, so nobody rests on it without looking at the shards."""
        return not self.root.is_last_backward or not all(unit.sync for unit in self.units.values())

    def after_forward(self, unit: Unit, will_backward: bool) -> None:
        """Reshard `unit` where its strategy says so; after the root, every unit that no backward will come for."""
        self._end_forward(unit, will_backward)
        if self.forward_of is not unit:
            return
        while self._entered:  # units of which some modules were left out
            self._end_forward(self._entered[-1], will_backward)
        for other in self.units.values():
            other.to_run = set()
            if not will_backward:
                # Evaluation: no backward will reshard what was prefetched, or stays unsharded after its forward.
                if not other.stays_unsharded:
                    other.reshard("forward")
                other.memory.await_copies()
        self._await_peers()
        self.forward_of = None

    def _end_forward(self, unit: Unit, will_backward: bool) -> None:
        """Note that the forward of `unit` ended, and reshard it unless it stays unsharded until its backward."""
        if unit in self._entered:
            self._entered.remove(unit)
        self.schedule.after_forward(unit.name)
        with self._span("post_forward", unit.name):
            may_reshard = unit.reshard_after_forward
            nobody_needs_it = not will_backward and not unit.stays_unsharded
            if (may_reshard or nobody_needs_it) and not unit.hidden:
                unit.reshard("forward", until_backward=will_backward)

    # ---- backward

    def begin_backward(self) -> bool:
        """Begin a backward, unless one runs; return whether it began: then `end_backward` must be called after it."""
        if self.in_backward:
            return False
        self.in_backward = True
        self._find_most_in_flight()
        for unit in self.units.values():
            unit.backward = TO_COME
        return True

    def _find_most_in_flight(self) -> None:
        """Allow as many reductions under way as any unit was given, as FSDP2 does."""
        self._most = max(unit.in_flight for unit in self.units.values())

    def before_backward(self, unit: Unit) -> None:
        """Have `unit` unsharded again, and the next ones on their way.

        A unit that ran twice in a forward has two backwards.
        """
        # Each output of a unit has a hook; the first that runs does this for all.
        if unit.backward is RUNNING:
            return
        unit.backward = RUNNING
        with self._span("pre_backward", unit.name):
            self._unshard_for_backward(unit)
            unit.finish_unshard("backward")
            for following in self._ahead(unit, "backward", self.schedule.before_backward(unit.name)):
                with self._span("backward_prefetch", f"{following.name} for {unit.name}"):
                    self._unshard_for_backward(following)

    def _unshard_for_backward(self, unit: Unit) -> None:
        """Begin to unshard `unit`, unless the user has switched that off."""
        if unit.unshard_in_backward:
            unit.start_unshard("backward")

    def after_backward(self, unit: Unit) -> None:
        """Collect the gradients of `unit`, reshard it, and begin to reduce."""
        if unit.backward is TO_COME:
            unit.check_unannounced()
        unit.backward = DONE
        with self._span("post_backward", unit.name):
            if any(unit in queue for queue in self._reducing):
                self._finish_reductions()  # it has run twice, and reduces for the second time
            unit.collect_gradients()
            if unit.reshard_after_backward:
                unit.reshard("backward")
            if unit.sync:
                # With one in flight, the reduction of block 5 ends here, after the whole backward of block 4: then
                # gradients of two units at most take memory.
                self._make_room(self._most_beside(unit))
                unit.start_reduce()
                self._reducing[0].append(unit)

    def _most_beside(self, unit: Unit) -> int:
        """Return how many reductions may be under way beside that of `unit`.

        Where the host issues second collectives, half of the units at most: the other half of the backward is for the
        second collectives to hide behind.
        """
        if not unit.memory.hides_all_reduce:
            return self._most
        return min(self._most, max(1, len(self.units) // 2))

    def _make_room(self, most: int, number: int = 0) -> None:
        """Wait for the oldest reductions until fewer than `most` have their collective of this `number` under way.

        One that goes on with a second collective has the backward of another `most` units to hide that behind.
        """
        queue = self._reducing[number]
        while len(queue) >= most:
            oldest = queue.pop(0)
            # Its reduce-scatter is complete, and its all-reduce over the replicas is under way now.
            if not oldest.finish_reduce():
                self._make_room(most, number + 1)
                self._reducing[number + 1].append(oldest)

    def _finish_reductions(self) -> None:
        """Wait for all reductions: the first collective of each, then the second."""
        for number in range(len(self._reducing)):
            self._make_room(1, number)

    def end_backward(self) -> None:
        """Complete units that were unused or whose inputs need no gradient, then wait for every reduction."""
        with self._span("root_post_backward_callback"):
            # In the reverse order of the module tree, which is the same on all ranks, as collectives must be.
            for unit in reversed(self.units.values()):
                if unit.backward is not DONE:
                    self.after_backward(unit)
            self._finish_reductions()
            for unit in self.units.values():
                # What was unsharded again after its own backward had ended, by a prefetch for example.
                if unit.reshard_after_backward:
                    unit.reshard("backward")
            self._await_peers()
            self._hand_out_undecided()
            for unit in self.units.values():
                unit.end_backward()
        self._accumulating = self._another_backward_comes
        self.in_backward = False

    def _hand_out_undecided(self) -> None:
        """Hand out averages of parameters that only other ranks may have gradients of: a plan has no such ones."""

    def finalize_backward(self) -> None:
        """Reduce what was accumulated, and reshard, as a backward that reaches no unit does."""
        self.in_backward = False
        self.begin_backward()
        self.end_backward()

    def _await_peers(self) -> None:
        """Wait until peers have read what this rank published: then the optimizer may write to the shards."""
        for unit in self.units.values():
            unit.memory.await_peers()

    # ---- steps that raised

    def abandon_backward(self) -> None:
        """Forget a backward that raised: its gradients are lost, those that were handed out before it are kept."""
        self.in_backward = False
        for queue in self._reducing:
            queue.clear()
        for unit in self.units.values():
            unit.backward = DONE
            unit.abandon_gradients()

    def reset(self) -> None:
        """Forget a forward or a backward that raised: nothing under way or unsharded, no gradients accumulated."""
        self.abandon_backward()
        self.forward_of, self._accumulating = None, False
        for unit in self.units.values():
            unit.to_run = set()
            unit.abandon_unshard()
