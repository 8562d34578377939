"""A preset of the lab on a tape of its operators: what a recording of it (micro_batch.py) shows, without torch and in
milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from fsdplab.engine.core.step import StepOrder
from fsdplab.workloads.shapes import ModelShape, Parameter

from .held import Book, Bytes, Held
from .step import StepChoices, peak_of_step
from .tape import WHAT, Edge, Given, Tape, Value
from .unit_buffers import MASTER, Stored, UnitBuffers

ROOT = "root"
_RANDOM_STATE = 5056  # bytes: checkpointing keeps the generator's state for each region


@dataclass(frozen=True, kw_only=True)
class LabRun(StepChoices):
    """What a run of a preset is made of, as far as its memory goes."""

    shape: ModelShape
    batch: int
    sequence: int
    checkpoint: str = "none"
    units: str = "block"  # or linear, or model


def memory_of_step(run: LabRun) -> Bytes:
    """Bytes by category at the peak of the second step, on rank 0, whose shards are largest."""
    return peak_of_step(run, _OnTape(run))


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


class _OnTape:
    """A preset as `Computing`."""

    def __init__(self, run: LabRun) -> None:
        self.run, shape = run, run.shape
        self.units = {
            name: [Stored(each.name, each.shape, MASTER, run.itemsize) for each in own]
            for name, own in unit_parameters(run).items()
        }
        self.nbytes = 2 * 8 * run.batch * run.sequence  # tokens and targets, 64 bits each
        # the rotary tables, for every position that the model knows
        self.buffers = 0 if shape.positions else 2 * 4 * shape.context * (shape.head_width // 2)

    def play(self, order: StepOrder, units: Mapping[str, UnitBuffers], book: Book) -> None:
        self.order, self.buffers_of = order, units
        tape = Tape(book, self.run.batch * self.run.sequence, self.run.itemsize, self._gradient)
        if self.run.units == "linear":
            tape.around_product = partial(self._around_product, tape)
        loss(tape, self._forward(tape))
        order.begin_backward()
        tape.backward()
        order.end_backward()

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
        make = partial(Tape, tape.book, tape.tokens, tape.itemsize, self._gradient, kept_products=kept)
        saved = [x.held, tape.book.hold(_RANDOM_STATE, WHAT)]
        y = block(make(keeps=False), x, run.shape, run.sequence, prefix)
        result, read, width = Value(y.held, y.width), x.edge, x.width

        def again(ours: Edge) -> None:
            inner, begin = make(again=True), Value(saved[0], width)
            end = block(inner, begin, run.shape, run.sequence, prefix)
            end.edge.add(ours.take(), ours.owned, tape.book)
            inner.backward()
            saved.clear()
            read.add(begin.edge.take(), True, tape.book)

        tape.then(partial(again, result.edge))
        return result

    def _around_product(self, tape: Tape, name: str) -> AbstractContextManager[None]:
        """Around a linear layer, which may be a unit."""
        unit = unit_of(self.run, f"{name}.weight")
        return nullcontext() if unit == ROOT else self._forward_of(tape, unit)

    def _gradient(self, name: str, nbytes: int) -> None:
        self.buffers_of[unit_of(self.run, name)].gradient(name, nbytes)


# ---- the two families, in the order of workloads/gpt.py, llama.py and attention.py


def block(tape: Tape, x: Value, shape: ModelShape, sequence: int, prefix: str) -> Value:
    """One block: attention, then feed-forward, each added to what it reads. `prefix`: `blocks.3.`"""
    norm = tape.layer_norm if shape.norm_bias else tape.rms_norm
    x = tape.add(x, _attention(tape, norm(x, f"{prefix}attention_norm"), shape, sequence, prefix))
    feed = _gpt_feed_forward if not shape.gated else _llama_feed_forward
    return tape.add(x, feed(tape, norm(x, f"{prefix}feed_forward_norm"), shape, prefix), last=True)


def _attention(tape: Tape, x: Value, shape: ModelShape, sequence: int, prefix: str) -> Value:
    bias, turns = shape.qkv_bias, shape.positions == 0
    q = tape.linear(x, shape.query_width, f"{prefix}query", bias)
    k = tape.linear(x, shape.kv_width, f"{prefix}key", bias)
    v = tape.linear(x, shape.kv_width, f"{prefix}value", bias)
    if turns:
        q, k = tape.rotary(tape.reordered(q)), tape.rotary(tape.reordered(k))
    y = tape.attention(q, k, v, shape.heads, sequence, shape.head_width)
    if turns:  # its result lies head by head, as what it reads
        y = tape.clone(y)
    return tape.linear(y, shape.width, f"{prefix}output", shape.output_bias)


def _gpt_feed_forward(tape: Tape, x: Value, shape: ModelShape, prefix: str) -> Value:
    up = tape.linear(x, shape.ffn, f"{prefix}up", shape.ffn_bias)
    return tape.linear(tape.pointwise(up), shape.width, f"{prefix}down", shape.ffn_bias, last=True)


def _llama_feed_forward(tape: Tape, x: Value, shape: ModelShape, prefix: str) -> Value:
    gated = tape.times(
        tape.pointwise(tape.linear(x, shape.ffn, f"{prefix}gate", False)),
        tape.linear(x, shape.ffn, f"{prefix}up", False),
    )
    return tape.linear(gated, shape.width, f"{prefix}down", False, last=True)


def embedded(tape: Tape, shape: ModelShape, sequence: int) -> Value:
    """The embeddings of the tokens, and of their positions where those are learnt."""
    tokens, C, b = tape.value(shape.width), shape.width, tape.itemsize
    tape.note(tokens, tape.gradients(parameters={"token_embedding.weight": shape.vocabulary * C * b}))
    if not shape.positions:
        return tokens
    positions = Value(tape.book.hold(sequence * C * b, WHAT), C)
    indices = tape.book.hold(8 * sequence, WHAT)
    table = {"position_embedding.weight": shape.positions * C * b}
    tape.note(positions, tape.gradients(parameters=table), indices)
    y, first, second = tape.value(C), tokens.edge, positions.edge
    summed = sequence * C * b
    tape.note(y, lambda gradient: [(first, gradient, False), (second, tape.book.hold(summed, WHAT), True)])
    return y


def loss(tape: Tape, logits: Value) -> None:
    """Cross entropy in float32, and its backward as far as the logits' gradient."""
    wide = tape.cast(logits, 4)
    log_softmax = tape.value(logits.width, 4)
    edge, width = wide.edge, logits.width

    def run(_: Held) -> Given:
        picked = tape.hold(width, 4)
        gradient = tape.hold(width, 4)
        del picked
        return [(edge, gradient, True)]

    tape.note(log_softmax, run, log_softmax.held)
    log_softmax.edge.add(tape.book.hold(4, WHAT), True, tape.book)
