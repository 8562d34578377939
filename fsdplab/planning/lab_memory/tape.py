"""The operators of the lab's models as autograd on the CPU runs them, in bytes.

A forward makes results and notes on a tape what each operator saves for its backward; the backward goes the tape in
reverse. Counted are the allocations that PyTorch's profiler reports (torch 2.13, eager): results, saved tensors,
gradients, and the temporaries of composed operators. Not counted is the scratch memory of oneDNN's bf16 products (some
100 kB while one runs), whose size depends on the processor.

Letters: N tokens, C channels, b bytes of an element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from .held import Book, Held

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
