"""A preset of the lab on a tape of its operators: what a recording of it (step.py) shows, without torch and in
milliseconds.

The tape has the operators of the lab's models as autograd on the CPU runs them, in bytes. A forward makes results and
notes on the tape what each operator saves for its backward; the backward goes the tape in reverse. Counted are the
allocations that PyTorch's profiler reports (torch 2.13, eager): results, saved tensors, gradients, and the temporaries
of composed operators. Not counted is the scratch memory of oneDNN's bf16 products (some 100 kB while one runs), whose
size depends on the processor.

Letters: N tokens, C channels, b bytes of an element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from fsdplab.engine.core.step import StepOrder
from fsdplab.workloads.shapes import ModelShape, Parameter

from .step import MASTER, Book, Bytes, Held, StepChoices, Stored, UnitBuffers, peak_of_step

WHAT = "activations"
OnGradient = Callable[[str, int], None]  # a parameter's name and the bytes of its gradient
Given = list[tuple["Edge", Held, bool]]  # what a backward hands on: to whom, what, and whether nobody else holds it


class Edge:
    """Where the gradient of one result is summed."""

    __slots__ = ("gradient", "owned")

    def __init__(self) -> None:
        self.gradient: Held | None = None
        self.owned = False

    def add(self, gradient: Held, owned: bool, book: Book) -> None:
        """Sum: in place where one of the two is nobody else's (autograd's InputBuffer), else in a third storage."""
        if self.gradient is None or (owned and not self.owned):
            self.gradient, self.owned = gradient, owned
        elif not self.owned:
            self.gradient, self.owned = book.hold(gradient.nbytes, WHAT), True

    def take(self) -> Held:
        """The sum, for the one operator that made the result."""
        assert self.gradient is not None, "a backward came to a result that nobody used"
        gradient, self.gradient = self.gradient, None
        return gradient


@dataclass(frozen=True)
class Value:
    """A result of the forward: its storage, its channels a token, and where its gradient is summed."""

    held: Held
    width: int
    edge: Edge = field(default_factory=Edge)


@dataclass
class Node:
    """An operator of the backward; what it saved goes when it has run."""

    edge: Edge
    run: Callable[[Held], Given]
    saved: tuple[Held, ...]


class Tape:
    """Runs operators over N tokens of b bytes an element.

    Without `keeps` nothing is saved, as in a forward that will be computed again. `kept_products` holds then what
    selective checkpointing saves all the same (every other matrix product, and attention); on a tape that computes
    again they are taken from there. `again` marks such a tape: it ends before the last product.
    """

    def __init__(
        self, book: Book, tokens: int, itemsize: int, on_gradient: OnGradient, *, keeps: bool = True,
        kept_products: dict[str, Held] | None = None, again: bool = False,
    ) -> None:  # fmt: skip
        self.book, self.tokens, self.itemsize, self.on_gradient = book, tokens, itemsize, on_gradient
        self.keeps, self.kept_products, self.again = keeps, kept_products, again
        self._nodes: list[Node | Callable[[], None]] = []
        self._products = 0
        self.around_product: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()

    # ---- the tape itself

    def backward(self) -> None:
        """Run the backward of all that was noted, the last first."""
        while self._nodes:
            node = self._nodes.pop()
            if not isinstance(node, Node):
                node()
                continue
            given = node.run(node.edge.take())
            node.saved = ()
            for edge, gradient, owned in given:
                edge.add(gradient, owned, self.book)
            del given, node
            edge, gradient = None, None  # type: ignore[assignment]  # the loop's names hold bytes too

    def then(self, action: Callable[[], None]) -> None:
        """Have `action` run when the backward comes to this place."""
        if self.keeps:
            self._nodes.append(action)

    def note(self, result: Value, run: Callable[[Held], Given], *saved: Held) -> None:
        """Note the backward of the operator that made `result`."""
        if self.keeps:
            self._nodes.append(Node(result.edge, run, saved))

    def hold(self, channels: float, itemsize: int | None = None) -> Held:
        """A tensor of so many channels a token."""
        return self.book.hold(int(self.tokens * channels) * (itemsize or self.itemsize), WHAT)

    def value(self, channels: int, itemsize: int | None = None) -> Value:
        """A new result."""
        return Value(self.hold(channels, itemsize), channels)

    def gradients(
        self, *of: tuple[Edge, float, int | None], beside: Sequence[float] = (), parameters: Mapping[str, int] = {},
    ) -> Callable[[Held], Given]:  # fmt: skip
        """A backward that makes new gradients, each of so many channels, and those of parameters, of so many bytes;
        `beside` them all there are tensors of so many channels in float32, until it ends.
        """

        def run(_: Held) -> Given:
            given = [(edge, self.hold(channels, itemsize), True) for edge, channels, itemsize in of]
            temporary = [self.hold(channels, 4) for channels in beside]
            for name, nbytes in parameters.items():
                self.on_gradient(name, nbytes)
            del temporary
            return given

        return run

    # ---- operators

    def linear(self, x: Value, width: int, name: str, bias: bool, last: bool = False) -> Value:
        """A product with a weight of C x width; it saves what it reads."""
        with self.around_product(name):
            y = self._product(width, name, last)
            weights = {f"{name}.weight": x.width * width * self.itemsize}
            weights |= {f"{name}.bias": width * self.itemsize} if bias else {}
            made = self.gradients((x.edge, x.width, None), parameters=weights)

            def run(gradient: Held) -> Given:  # a view of two dimensions as three: never summed in place
                return [(edge, held, False) for edge, held, _ in made(gradient)]

            self.note(y, run, x.held)
        return y

    def _product(self, width: int, name: str, last: bool) -> Value:
        self._products += 1
        if self.again and last:
            return Value(self.book.hold(0, WHAT), width)
        kept = self.kept_products
        if kept is None:
            return self.value(width)
        if self.again:
            return Value(kept.pop(name), width) if name in kept else self.value(width)
        y = self.value(width)
        if self._products % 2:
            kept[name] = y.held
        return y

    def add(self, a: Value, b: Value, last: bool = False) -> Value:
        """A sum of two of equal size; it saves nothing, and hands its gradient on to both."""
        y = Value(self.book.hold(0, WHAT), a.width) if self.again and last else self.value(a.width)
        first, second = a.edge, b.edge  # not the values: they would keep their storages
        self.note(y, lambda gradient: [(first, gradient, False), (second, gradient, False)])
        return y

    def pointwise(self, x: Value) -> Value:
        """GELU or SiLU: one result, what it reads is saved."""
        return self._noted(self.value(x.width), [x], saved=[x])

    def times(self, a: Value, b: Value) -> Value:
        """A product element by element; both factors are saved."""
        return self._noted(self.value(a.width), [a, b], saved=[a, b])

    def _noted(
        self, y: Value, of: Sequence[Value], itemsize: int | None = None, saved: Sequence[Value] = (),
        beside: Sequence[float] = (), parameters: Mapping[str, int] = {},
    ) -> Value:  # fmt: skip
        """The result of an operator whose backward makes new gradients of what it reads."""
        gradients = self.gradients(
            *((each.edge, each.width, itemsize) for each in of), beside=beside, parameters=parameters
        )
        self.note(y, gradients, *(each.held for each in saved))
        return y

    def layer_norm(self, x: Value, name: str) -> Value:
        """LayerNorm: saves what it reads, a mean and a deviation a token."""
        y, nbytes = self.value(x.width), x.width * self.itemsize
        made = self.gradients((x.edge, x.width, None), parameters={f"{name}.weight": nbytes, f"{name}.bias": nbytes})

        def run(gradient: Held) -> Given:
            given = made(gradient)
            self.book.hold(2 * nbytes, WHAT)  # the sums of one thread
            return given

        self.note(y, run, x.held, self.hold(1), self.hold(1))
        return y

    def rms_norm(self, x: Value, name: str) -> Value:
        """RMSNorm as PyTorch composes it on the CPU, in float32: square, mean, root, two products."""
        wide = self.cast(x, 4)
        root = self._inverse_root(wide)
        normed = self._noted(self.value(x.width, 4), [wide, root], 4, [wide, root], beside=[x.width])
        weight = {f"{name}.weight": x.width * self.itemsize}
        weighted = self._noted(self.value(x.width, 4), [normed], 4, [normed], beside=[x.width], parameters=weight)
        return self.cast(weighted, self.itemsize)

    def _inverse_root(self, x: Value) -> Value:
        square = self.hold(x.width, 4)
        mean = self.hold(1, 4)
        y = self.value(1, 4)
        del square, mean
        return self._noted(y, [x], 4, [x, y], beside=3 * [x.width])

    def cast(self, x: Value, itemsize: int) -> Value:
        """A copy in another dtype; the value itself where it has that."""
        before = x.held.nbytes // max(1, self.tokens * x.width)
        return x if before == itemsize else self._noted(self.value(x.width, itemsize), [x], before)

    def rotary(self, x: Value) -> Value:
        """Turn pairs of channels: products with float32 tables, of half the channels each."""
        half, halves = x.width / 2, []
        for _ in range(2):
            first, second = self.hold(half, 4), self.hold(half, 4)
            halves.append(self.hold(half, 4))
            del first, second
        turned = self.value(x.width, 4)
        halves.clear()
        return self.cast(self._noted(turned, [x], 4, beside=[half, half]), self.itemsize)

    def attention(self, q: Value, k: Value, v: Value, heads: int, sequence: int, head_width: int) -> Value:
        """Flash attention on one thread: saves what it reads, its result, and a log-sum-exp a head in float32."""
        rows, columns = attention_tile(sequence)
        statistics: Held | None = None
        if self.again and self.kept_products and "attention" in self.kept_products:
            y = Value(self.kept_products.pop("attention"), q.width)
            statistics = self.kept_products.pop("statistics")
        else:
            y = self.value(q.width)
            statistics = self.hold(heads, 4)
            self.book.hold(rows * (columns + 2 + head_width) * 4, WHAT)
        if self.kept_products is not None and not self.again:
            self.kept_products |= {"attention": y.held, "statistics": statistics}
        made = self.gradients(*((each.edge, each.width, None) for each in (q, k, v)))

        def run(gradient: Held) -> Given:
            given = made(gradient)
            self.book.hold(2 * rows * columns * 4, WHAT)
            return given

        self.note(y, run, q.held, k.held, v.held, y.held, statistics)
        return y

    def clone(self, x: Value) -> Value:
        """A copy in another order of dimensions; its backward is a view."""
        y, edge = self.value(x.width), x.edge
        self.note(y, lambda gradient: [(edge, gradient, False)])
        return y

    def reordered(self, x: Value) -> Value:
        """A view whose gradient must be copied into the order of dimensions that a product reads."""
        return self._noted(Value(x.held, x.width), [x])


def attention_tile(sequence: int) -> tuple[int, int]:
    """Rows and columns of scores that a thread holds at once (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp)."""
    rows = 256 if sequence >= 768 else 64 if sequence >= 192 else 32
    return min(rows, sequence), min(512, sequence)


# ---- a run of a preset


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
    return tape.add(x, _feed_forward(tape, norm(x, f"{prefix}feed_forward_norm"), shape, prefix), last=True)


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


def _feed_forward(tape: Tape, x: Value, shape: ModelShape, prefix: str) -> Value:
    first = "gate" if shape.gated else "up"
    inner = tape.pointwise(tape.linear(x, shape.ffn, f"{prefix}{first}", shape.ffn_bias))
    if shape.gated:
        inner = tape.times(inner, tape.linear(x, shape.ffn, f"{prefix}up", shape.ffn_bias))
    return tape.linear(inner, shape.width, f"{prefix}down", shape.ffn_bias, last=True)


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
