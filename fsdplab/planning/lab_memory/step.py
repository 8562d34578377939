"""One step of the lab's engine in bytes: the engine's own order (`engine/core/step.py`), over a tape of operators.

Two steps are played. The first makes what lives on (the buffers of the transports, the order of the units), as the
first warm-up step of a run does; the second is the one whose memory a run measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from fsdplab.engine.core.step import Schedule, StepOrder
from fsdplab.planning.program import Sharing, begin_micro_batch, units_over
from fsdplab.workloads.shapes import ModelShape, Parameter

from .held import Book, Bytes, Held
from .tape import WHAT, Edge, Tape, Value
from .transformer import block, embedded, loss
from .unit_buffers import MASTER, Transports, UnitBuffers

ROOT = "root"
_RANDOM_STATE = 5056  # bytes: checkpointing keeps the generator's state for each region
_ENOUGH = 3  # micro-batches: those between the first and the last are alike


@dataclass(frozen=True)
class LabRun:
    """What a run of the lab's engine between CPU ranks is made of, as far as its memory goes."""

    shape: ModelShape
    strategy: str
    shards: int
    replicas: int
    itemsize: int  # of what computes
    batch: int
    sequence: int
    micro_batches: int = 1
    prefetch: int = 1
    checkpoint: str = "none"
    units: str = "block"  # or linear, or model
    offloads: bool = False
    foreach: bool = False


def memory_of_step(run: LabRun) -> Bytes:
    """Bytes by category at the peak of the second step, on rank 0, whose slices are largest."""
    return _Play(run).peak()


def unit_parameters(run: LabRun) -> dict[str, list[Parameter]]:
    """The units of a run, the root first, and their parameters."""
    shape = run.shape
    placed = [each if "." in each.name else replace(each, name=f"{each.name}.weight") for each in shape.root]
    for layer in range(shape.layers):
        placed += [replace(each, name=f"blocks.{layer}.{each.name}") for each in shape.block]
    found: dict[str, list[Parameter]] = {}
    for each in placed:
        found.setdefault(unit_of(run, each.name), []).append(each)
    return {ROOT: found.pop(ROOT), **found}


def unit_of(run: LabRun, parameter: str) -> str:
    """The unit that owns a parameter (`blocks.3.up.weight`)."""
    if run.units == "model":
        return ROOT
    if run.units == "linear":
        owner = parameter.removesuffix(".weight").removesuffix(".bias")
        linear = owner == "head" and not run.shape.tied or parameter.startswith("blocks.") and "norm" not in owner
        return owner if linear else ROOT
    return ".".join(parameter.split(".")[:2]) if parameter.startswith("blocks.") else ROOT


class _Play:
    """The units, the tape and what is alive."""

    def __init__(self, run: LabRun) -> None:
        self.run, self.book = run, Book()
        casts = run.itemsize != MASTER
        self.sharing = Sharing.of(run.strategy, run.shards, run.replicas, casts=casts, offloads=run.offloads)
        transports = Transports(self.book)
        self.units = {
            name: UnitBuffers(name, own, self.sharing, run.shards, run.replicas, run.itemsize, self.book, transports)
            for name, own in unit_parameters(run).items()
        }
        self.order = StepOrder(units_over(self.units, self.sharing), Schedule(run.prefetch))
        for unit in self.units.values():
            unit.place_at_rest()

    def peak(self) -> Bytes:
        alive = [self._batches(), self._tables()]
        self._step()
        alive.append(self._optimizer_state())
        self.book.begin()
        self._step()
        del alive
        return self.book.peak

    def _batches(self) -> Held:
        """Tokens and targets of a step, 64 bits each: read before it begins."""
        run = self.run
        return self.book.hold(2 * 8 * run.batch * run.sequence * run.micro_batches, WHAT)

    def _tables(self) -> Held:
        """The rotary tables, for every position that the model knows."""
        shape = self.run.shape
        return self.book.hold(0 if shape.positions else 2 * 4 * shape.context * (shape.head_width // 2), "other")

    def _optimizer_state(self) -> Held:
        """Two moments of every element that this rank updates, and a count of steps a parameter."""
        own = sum(unit.own_elements for unit in self.units.values())
        counts = sum(unit.parameters for unit in self.units.values())
        return self.book.hold(0 if self.run.offloads else 2 * MASTER * own + 4 * counts, "optimizer_state")

    # ---- a step

    def _step(self) -> None:
        count = min(self.run.micro_batches, _ENOUGH)
        for number in range(count):
            self._micro_batch(last=number == count - 1)
        if self.run.foreach:
            self.book.hold(MASTER * sum(unit.own_elements for unit in self.units.values()), "other")
        for unit in self.units.values():
            unit.step()

    def _micro_batch(self, last: bool) -> None:
        begin_micro_batch(self.order, self.sharing, last)
        tape = Tape(self.book, self.run.batch * self.run.sequence, self.run.itemsize, self._gradient)
        if self.run.units == "linear":
            tape.around_product = partial(self._around_product, tape)
        loss(tape, self._forward(tape))
        self.order.begin_backward()
        tape.backward()
        self.order.end_backward()

    def _forward(self, tape: Tape) -> Value:
        run, shape = self.run, self.run.shape
        with self._forward_of(tape, ROOT):
            x = embedded(tape, shape, run.sequence)
            for layer in range(shape.layers):
                x = self._block(tape, x, f"blocks.{layer}.")
            norm = tape.layer_norm if shape.norm_bias else tape.rms_norm
            head = "token_embedding" if shape.tied else "head"
            return tape.linear(norm(x, "final_norm"), shape.vocabulary, head, False)

    def _block(self, tape: Tape, x: Value, prefix: str) -> Value:
        run = self.run
        if run.units != "block":
            return block(tape, x, run.shape, run.sequence, prefix)
        with self._forward_of(tape, unit_of(run, f"{prefix}up.weight")):
            if run.checkpoint != "none":
                return self._checkpointed(tape, x, prefix)
            return block(tape, x, run.shape, run.sequence, prefix)

    @contextmanager
    def _forward_of(self, tape: Tape, name: str) -> Iterator[None]:
        """A unit's forward: what autograd calls in training before and behind it, and on the tape before and behind its
        backward; that of the root ends with the whole backward.
        """
        unit = self.order.units[name]
        if name != ROOT:
            tape.then(partial(self.order.after_backward, unit))
        self.order.before_forward(unit)
        yield
        tape.then(partial(self.order.before_backward, unit))
        self.order.after_forward(unit, will_backward=True)

    def _checkpointed(self, tape: Tape, x: Value, prefix: str) -> Value:
        """A block whose forward is computed again in its backward, but for what selective checkpointing saves."""
        run = self.run
        kept: dict[str, Held] | None = {} if run.checkpoint == "selective" else None
        make = partial(Tape, self.book, tape.tokens, tape.itemsize, self._gradient, kept_products=kept)
        saved = [x.held, self.book.hold(_RANDOM_STATE, WHAT)]
        y = block(make(keeps=False), x, run.shape, run.sequence, prefix)
        result, read, width = Value(y.held, y.width), x.edge, x.width

        def again(ours: Edge) -> None:
            inner, begin = make(again=True), Value(saved[0], width)
            end = block(inner, begin, run.shape, run.sequence, prefix)
            end.edge.add(ours.take(), ours.owned, self.book)
            inner.backward()
            saved.clear()
            read.add(begin.edge.take(), True, self.book)

        tape.then(partial(again, result.edge))
        return result

    def _around_product(self, tape: Tape, name: str) -> AbstractContextManager[None]:
        """Around a linear layer, which may be a unit."""
        unit = unit_of(self.run, f"{name}.weight")
        return nullcontext() if unit == ROOT else self._forward_of(tape, unit)

    def _gradient(self, name: str, nbytes: int) -> None:
        self.units[unit_of(self.run, name)].gradient(name, nbytes)
