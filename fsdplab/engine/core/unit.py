"""Decides when the parameters of a unit are unsharded, resharded and reduced, all together. No torch.

    start_unshard -> finish_unshard -> (forward)  -> reshard
    start_unshard -> finish_unshard -> (backward) -> collect_gradients -> reshard -> start_reduce -> finish_reduce

A unit decides and its `memory` acts: on tensors in training (memory.py), on byte counts in a plan
(planning/program). So what is planned is what is run.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

from fsdplab.engine.core.pending import Pending

if TYPE_CHECKING:
    import torch

# A gather that was given up goes from unsharding back to sharded.
SHARDED, UNSHARDING, UNSHARDED = "sharded", "unsharding", "unsharded"
_NEXT = {SHARDED: (UNSHARDING,), UNSHARDING: (UNSHARDED, SHARDED), UNSHARDED: (SHARDED,)}
TO_COME, RUNNING, DONE = "to come", "running", "done"  # how far a unit's backward is


@dataclass(frozen=True)
class ReduceOptions:
    """How the next reductions run.

    Without `all_reduce`, gradients are summed over the shards and kept; the next reduction that has it adds them.
    `hook` sees the reduced shard before the optimizer does. With `unused`, a parameter that has no gradient gets zeros,
    also where no rank has one.
    """

    divide: float = 1.0  # the sum over the ranks is divided by this: by 8 on 2 replicas x 4 shards
    all_reduce: bool = True
    hook: Callable[[torch.Tensor], None] | None = None
    unused: bool = False


class Memory(ABC):
    """What a unit acts on: its shards at rest, its unsharded parameters, its gradients."""

    name: str
    params: Sequence[object]  # a unit without any is never unsharded
    replacements = 0  # how often shards were replaced from outside
    remembers = False  # whether `changed` may be asked of the next gather, though it will be freed or written to

    @property
    @abstractmethod
    def keeps_whole(self) -> bool: ...  # whether the unsharded parameters are never freed
    @property
    @abstractmethod
    def keeps_gradients(self) -> bool: ...  # whether a reduction writes its result into the unsharded gradients
    @property
    @abstractmethod
    def hides_all_reduce(self) -> bool: ...  # whether the host issues a second collective once the first is complete

    @abstractmethod
    def changed(self) -> bool | torch.Tensor: ...  # whether the shards have other values than when they were unsharded
    @abstractmethod
    def gather(self, phase: str) -> Pending | None: ...  # begin to unshard; None: there is nothing to wait for
    @abstractmethod
    def free(self) -> None: ...  # the unsharded parameters, unless they are kept
    @abstractmethod
    def collect_gradients(self, keep: bool) -> None: ...  # that autograd has left, adding to earlier ones
    @abstractmethod
    def has_gradients(self, or_zeros: bool) -> bool: ...  # to reduce; `or_zeros`: a missing one counts as zeros
    @abstractmethod
    def reduce(self, options: ReduceOptions) -> Iterator[Pending]: ...  # collectives, each issued when it is taken
    @abstractmethod
    def forget_gradients(self) -> None: ...  # free them; a reduction under way keeps what it still reads

    # what only tensors need

    def take_over_replaced(self) -> bool:  # shards that were replaced from outside; whether there were any
        return False

    def has_new_gradients(self) -> bool:  # whether autograd has left any that were not collected
        return False

    def prepare(self) -> None: ...  # lay out the unsharded parameters; raises where the shards have no values yet
    def arrived(self) -> None: ...  # the gather is complete
    def abandoned(self) -> None: ...  # the gather was given up
    def show_unsharded(self) -> None: ...  # to the modules
    def show_shards(self, until_backward: bool) -> None: ...  # those over fewer ranks `until_backward`, if any
    def show_own_shards(self) -> None: ...  # instead of those over fewer ranks
    def await_peers(self) -> None: ...  # until other ranks have read the shards
    def await_copies(self) -> None: ...  # until gradients that were handed out may be read, and shards written to
    def abandon_gradients(self) -> None: ...  # all that were not handed out
    def moved(self, before: str, after: str, phase: str) -> None: ...  # the state of the parameters has changed


M = TypeVar("M", bound=Memory)


class Unit(Generic[M]):
    """Decides what happens to the parameters and gradients in `memory`.

    Gathers and reshards may be asked for in any state. A reduction is finished before the next one is started, which
    `StepOrder` (step.py) takes care of.
    """

    def __init__(
        self, memory: M, reshard_after_forward: int | None, reduce_options: ReduceOptions = ReduceOptions()
    ) -> None:
        self.memory = memory
        # what a user may change from step to step
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.keep_unsharded = False  # whether it stays unsharded after a forward that no backward follows
        self.ahead: dict[str, list[weakref.ref[Unit]]] = {}  # phase -> what the user wants unsharded behind this unit
        self.sync = True  # whether a backward ends in a reduction, or only adds to the unsharded gradients
        self.is_last_backward = True  # of the root: whether the optimizer steps after the next backward
        self.reduce_options = reduce_options
        self.in_flight = 1  # reductions that may be under way when the next begins
        # where it stands
        self.state = SHARDED  # of its parameters
        self.to_run: set[int] = set()  # its modules whose forward is to come, once the first of them has begun
        # Whether a module of it ran whose backward nothing will announce, or that has returned a parameter.
        self.hidden = False
        self.backward = DONE
        self._gathered = False  # whether it was unsharded since its shards last changed
        self._by_hand = False  # whether it was unsharded outside a forward: the next one uses that
        self._held = False  # whether somebody has unsharded it so, and nobody has resharded it since
        self._gathering: Pending | None = None
        self._reduction: Iterator[Pending] = iter(())
        self._collective: Pending | None = None  # of the reduction, under way

    @property
    def name(self) -> str:
        """What the root calls its modules, once there is a root."""
        return self.memory.name

    @property
    def stays_unsharded(self) -> bool:
        """Whether a forward that no backward follows leaves it unsharded, unless it reshards after every forward."""
        return self.keep_unsharded or self._held

    # ---- start_unshard, finish_unshard

    def may_be_current(self, accumulating: bool) -> bool:
        """Whether a root forward need not gather again if nobody wrote to the shards: what is still unsharded (several
        forwards before a backward; `reshard_after_backward=False`), or kept between micro-batches.
        """
        # Between micro-batches a unit is in the state sharded, but a strategy that keeps parameters whole (ZeRO-1,
        # ZeRO-2) has not freed them.
        kept = self.state is UNSHARDED or accumulating and self.state is SHARDED and self.memory.keeps_whole
        return kept and self._gathered and not self._by_hand

    def begin_forward(self, is_current: bool) -> None:
        """A root forward begins: what was unsharded before is out of date, unless the user unsharded it by hand, or it
        `is_current`: it may be, and no rank has other shards since.
        """
        self.to_run = set()
        # `model.unshard()` came before this forward, which uses what that gathers.
        if self._by_hand:
            self._by_hand = False
            return
        if self.state is UNSHARDED and is_current:
            return
        self.abandon_unshard()
        self.reshard("forward")
        # Kept whole and still current: then `start_unshard` issues no all-gather.
        self._gathered = self._gathered and is_current
        self.take_over_replaced()

    def take_over_replaced(self) -> None:
        """Take over shards that were replaced from outside (`to_empty`, `to`, an assigned state dict)."""
        if self.state is SHARDED and self.memory.take_over_replaced():
            self._gathered = False

    def unshard_by_hand(self, afresh: bool) -> None:
        """Begin to unshard outside a forward; the next forward uses it. `afresh`: a step that raised may have left the
        unit unsharded, or a gather under way, from before somebody wrote to the shards.
        """
        if afresh and not self._by_hand or self._gathering is not None and self._gathering.lost:
            self.abandon_unshard()
            self.reshard("forward")
        self.take_over_replaced()
        if self.state is SHARDED:
            self._gathered = False
            self._by_hand = True
            self.start_unshard("forward")
        self._held = True

    def start_unshard(self, phase: str) -> None:
        """Issue the all-gather and return at once; nothing happens if that is under way or done."""
        if self.state is not SHARDED or not self.memory.params:
            return
        self.memory.prepare()
        self._move(UNSHARDING, phase)
        # The whole is still there: `finish_unshard` only shows it to the modules.
        if self._gathered and self.memory.keeps_whole:
            return
        try:
            self._gathering = self.memory.gather(phase)
        except BaseException:  # what could not begin is not under way
            self._free(phase)
            raise

    def finish_unshard(self, phase: str) -> None:
        """Wait for the all-gather and show the unsharded parameters to the modules."""
        if self.state is not UNSHARDING:
            return
        # None where nothing was gathered: the whole was kept, or the shards are views of it.
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            self.memory.arrived()
        self.memory.show_unsharded()
        self._gathered = True
        self._move(UNSHARDED, phase)

    # ---- reshard

    def reshard(self, phase: str, until_backward: bool = False) -> None:
        """Show the shards again and free the unsharded parameters, where the strategy frees them. `until_backward`: a
        unit that keeps shards over fewer ranks from its forward to its backward shows those.
        """
        # A unit that was prefetched and never ran: its gather is waited for, then freed.
        self.finish_unshard(phase)
        if self.state is UNSHARDED:
            self.memory.show_shards(until_backward)
            self._free(phase)
        # The modules may still show the shards over fewer ranks that the last forward left.
        elif not until_backward:
            self.memory.show_own_shards()

    def reshard_by_hand(self) -> None:
        """Reshard, and wait until peers have read: whoever asked for the shards may write to them."""
        self.reshard("forward")
        self.memory.await_peers()
        self.memory.await_copies()

    def abandon_unshard(self) -> None:
        """Give up a gather that is under way: a step that raised has left it behind."""
        if self.state is not UNSHARDING:
            return
        if self._gathering is not None:
            self._gathering.abandon()
            self._gathering = None
        self.memory.abandoned()
        self._gathered = False
        self._free("forward")

    def _free(self, phase: str) -> None:
        """Free the unsharded parameters, where the strategy frees them, and note that they are sharded."""
        self._by_hand = self._held = False
        self.memory.free()
        self._move(SHARDED, phase)

    # ---- collect_gradients, start_reduce, finish_reduce

    def collect_gradients(self) -> None:
        """Take the gradients that autograd has left, adding them to those of earlier micro-batches."""
        # Kept whole: those of micro-batches that do not reduce, and those of strategies that shard no gradients
        # (ZeRO-1).
        self.memory.collect_gradients(keep=not self.sync or self.memory.keeps_gradients)

    def check_unannounced(self) -> None:
        """Raise where a backward that came through no output has computed gradients while a gather was under way."""
        if self.state is UNSHARDING and self.memory.has_new_gradients():
            raise RuntimeError(
                f"a backward reached the parameters of unit {self.name!r} through none of the outputs of its forward,"
                " so they were not gathered; let the forward return the tensors that the loss is computed from"
            )

    def check_collected(self) -> None:
        """Raise where gradients lie on the unsharded parameters that no backward has collected: they train nothing.

        Pipelines leave gradients there between micro-batches and collect them by hand, while nothing is synchronised.
        """
        if self.sync and self.memory.has_new_gradients():
            self.refuse_uncollected()

    def refuse_uncollected(self) -> NoReturn:
        """Raise for gradients that lie on the unsharded parameters outside of a backward."""
        raise RuntimeError(
            f"gradients lie on the unsharded parameters of unit {self.name!r} that no backward of the model has"
            " collected, so they would train nothing; run loss.backward() after a forward of the model and assign"
            " no .grad between the two, or call reset_iter_state() on the root to drop them"
        )

    def start_reduce(self) -> None:
        """Begin to average the collected gradients over the ranks; nothing begins where there is none."""
        options = self.reduce_options
        if self.memory.has_gradients(or_zeros=options.unused and self._gathered):
            self._reduction = self.memory.reduce(options)
            # `reduce` is a generator: this packs the gradients and issues the first collective. `finish_reduce` goes on
            # with it.
            self._collective = next(self._reduction)
            # What is packed need not be kept: it is freed while the collective is under way.
            if not self.memory.keeps_gradients:
                self.memory.forget_gradients()

    def finish_reduce(self) -> bool:
        """Wait for the collective under way and issue the next; True if it was the last, so the optimizer may read."""
        if self._collective is not None:
            self._collective.wait()
            # Issues the all-reduce over the replicas, if there is one; after the last collective, hands the averages
            # out.
            self._collective = next(self._reduction, None)
        return self._collective is None

    def end_backward(self) -> None:
        """Every reduction is complete: gradients may be read, and those that were reduced need not be kept."""
        self.memory.await_copies()
        if self.sync:
            self.memory.forget_gradients()

    def abandon_gradients(self) -> None:
        """Forget what a backward that raised has left behind."""
        self.memory.await_copies()
        if self._collective is not None:
            self._collective.abandon()
        self._reduction, self._collective = iter(()), None
        self.memory.abandon_gradients()

    def _move(self, state: str, phase: str) -> None:
        """Note that the parameters are in another state; raise where it cannot follow the last."""
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"unit {self.name!r} cannot go from {self.state} to {state} in {phase}")
        before, self.state = self.state, state
        self.memory.moved(before, state, phase)
