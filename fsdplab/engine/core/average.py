"""Turns the sum of all ranks' gradients into their average, and tells which parameters no rank has a gradient of.

A rank sends negative zeros for a gradient that it lacks. They change no sum, and a sum of nothing else is -0.0. Each
parameter has one element in each shard, its mark, where a gradient that is there is never sent as -0.0. So the mark of
a sum is -0.0 only where every rank lacks the gradient: adding does not round a sum to zero (floats underflow
gradually). Multiplying, dividing and casting may round a small negative number to -0.0, so marks are carried past them.

Two parameters, `a` and `b`, of two elements each, on two ranks; the first element of each is its mark:

                           a              b
    gradients, rank 0  (-0.0,  3.0)     none            the gradient of a begins with -0.0 by chance
    gradients, rank 1   none            none
    sent by rank 0     ( 0.0,  3.0)   (-0.0, -0.0)      0.0 is added to the mark of a: -0.0 + 0.0 = 0.0
    sent by rank 1     (-0.0, -0.0)   (-0.0, -0.0)
    sum                ( 0.0,  3.0)   (-0.0, -0.0)      0.0 + -0.0 = 0.0, but -0.0 + -0.0 = -0.0
    average            ( 0.0,  1.5)   (-0.0, -0.0)

The mark of `a` is 0.0: some rank has its gradient, so both ranks get (0.0, 1.5). The mark of `b` is -0.0: no rank has
one, so `b.grad` stays None and its optimizer state is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fsdplab.engine.core.layout import Layout


class Marks:
    """The marks of some parameters: in every row [..., elements] of a tensor, `places` (int64) along the elements."""

    def __init__(
        self,
        places: torch.Tensor,  # [marks] (int64), each an index of an element in a shard
    ) -> None:
        self.places = places
        self._to_add: dict[tuple[bool, ...], torch.Tensor] = {}

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> Marks:
        """Mark the first element that each shard reserves for a parameter; one without elements has no mark."""
        firsts = [slot.offset // slot.itemsize for slot in layout.slots if slot.chunk_bytes]
        return cls(_filled(torch.empty(len(firsts), dtype=torch.int64, device=device), firsts))

    def to_add(
        self,
        missing: Sequence[bool],  # for each mark, whether this rank lacks the gradient
        like: torch.Tensor,  # any shape, of the dtype and on the device of what is sent
    ) -> torch.Tensor | float:
        """Return what a rank adds to its marks: -0.0 where its gradient is missing, 0.0 for the others."""
        if not any(missing):
            return 0.0
        key = tuple(missing)
        if key not in self._to_add:  # the same parameters are missing at most steps
            signs = [-0.0 if is_missing else 0.0 for is_missing in key]
            self._to_add[key] = _filled(like.new_empty(len(key)), signs)
        return self._to_add[key]

    def put(
        self,
        tensor: torch.Tensor,  # [..., elements], changed in place
        marks: torch.Tensor | float,  # [marks], or one number for all of them
    ) -> None:
        """Add `marks`, zeros of either sign, in place: 0.0 turns -0.0 into 0.0, and nothing else changes a value."""
        # [..., marks] are read out of [..., elements], added to and written back.
        tensor.index_copy_(-1, self.places, tensor.index_select(-1, self.places).add_(marks))

    def found_in(
        self,
        *terms: torch.Tensor,  # [..., elements] each, of equal shapes
    ) -> torch.Tensor:
        """Return what `put` adds to carry the marks of the sum of `terms` elsewhere: zeros of the same signs."""
        marks, *others = [term.index_select(-1, self.places) for term in terms]
        for other in others:
            marks = marks + other
        # Marks of a sum (0.3, -0.0, 0.0) become (0.0, -0.0, 0.0), which change no value where they are added.
        return marks.masked_fill_(marks != 0, 0.0)

    def missing(
        self,
        total: torch.Tensor,  # [shard elements], the sum of all ranks or their average
    ) -> torch.Tensor:
        """Return whether no rank has a gradient, for each parameter (bool); nothing waits for the device."""
        marks = total.index_select(-1, self.places)
        # 0.0 and -0.0 are equal, and differ in the sign bit.
        return (marks == 0) & marks.signbit()

    def within(self, first: int, count: int) -> tuple[Marks, torch.Tensor]:
        """Return the marks among `count` elements from `first` on, and which of all they are (bool)."""
        inside = (self.places >= first) & (self.places < first + count)
        return Marks(self.places[inside] - first), inside


def _filled(
    tensor: torch.Tensor,  # [values], written in place
    values: Sequence[float],
) -> torch.Tensor:
    """Fill `tensor` with `values` from the host, without waiting for the device as a copy would."""
    for place, value in zip(tensor, values):
        place.fill_(value)
    return tensor


@dataclass(frozen=True)
class Average:
    """How transports turn a sum into an average: divided by `factor`, with the marks in their places.

    `given` is what this rank adds to its marks as it packs: 0.0, or a tensor that is -0.0 for parameters that it lacks.
    Without `keeps` nobody looks at this rank's part of the sum, and its marks may be lost.
    """

    factor: float
    marks: Marks | None = None
    given: torch.Tensor | float = 0.0
    keeps: bool = False

    def mark(
        self,
        packed: torch.Tensor,  # [ranks, shard elements], or [elements] of what one rank is sent; marked in place
    ) -> None:
        """Mark gradients that were packed, and scaled, into `packed`: a row for each shard."""
        if self.marks is not None:
            self.marks.put(packed, self.given)

    def sum_up(
        self,
        terms: Sequence[torch.Tensor],  # [elements] each, to be added in this order
        output: torch.Tensor,  # [elements], the average; may be the first of `terms`
    ) -> None:
        """Leave the average of `terms` in `output`, which may be the first of them: added in that order, low precisions
        in float32. To divide by a power of two is exact before a sum too, and takes no pass of its own there.
        """
        first, *others = terms
        # bfloat16 and float16 are added up in float32, whole numbers as they are.
        wide = torch.promote_types(output.dtype, torch.float32) if output.is_floating_point() else output.dtype
        # Terms are scaled while they are added, where that has the same bits as dividing the sum.
        if others and wide is output.dtype is others[0].dtype and output.is_floating_point() and self._is_power_of_two:
            self.carry(terms, output, lambda: _add_scaled(terms, 1.0 / self.factor, output))
            return
        total = output if wide == output.dtype else torch.empty_like(output, dtype=wide)
        if total is not first:
            total.copy_(first)
        for other in others:
            total.add_(other)
        self.finish(total, output)

    @property
    def _is_power_of_two(self) -> bool:
        """Whether to divide by the factor rounds nothing."""
        # 8 is 0.5 x 2^4: only powers of two have the mantissa 0.5.
        return math.frexp(self.factor)[0] == 0.5

    def finish(
        self,
        total: torch.Tensor,  # [elements], the sum of all ranks; divided in place
        output: torch.Tensor,  # [elements], may be the same memory, or of another dtype
    ) -> None:
        """Leave the average of `total`, a whole sum, in `output`, which may be the same memory."""

        def scale() -> None:
            if self.factor != 1.0:
                total.div_(self.factor)
            if total is not output:
                output.copy_(total)

        if self.factor == 1.0:  # no sum is small enough for a cast to round it to zero
            scale()
        else:
            self.carry([total], output, scale)

    def finish_once(
        self,
        total: torch.Tensor,  # [elements], the sum of all ranks; divided in place
    ) -> Callable[[], object]:
        """Return what divides `total` when it is first called: a wait that is repeated must not divide twice."""
        if self.factor == 1.0:
            return lambda: None
        left: float | None = self.factor
        marks: torch.Tensor | None = None  # of the sum, which the division may round

        def finish() -> None:
            nonlocal left, marks
            if self.marks is not None and self.keeps and marks is None:
                marks = self.marks.found_in(total)
            factor, left = left, None  # an interrupt comes before this or after the division, with no call in between
            if factor is not None:
                total.div_(factor)
            if self.marks is not None and marks is not None:
                self.marks.put(total, marks)

        return finish

    def carry(
        self,
        terms: Sequence[torch.Tensor],  # [elements] each, whose sum has the marks
        target: torch.Tensor,  # [elements], what `scale` fills; may be one of `terms`
        scale: Callable[[], object],
    ) -> None:
        """Run `scale`, which fills `target` from the sum of `terms` and may round; marks that are kept are not lost."""
        if self.marks is None or not self.keeps:
            scale()
            return
        # Before the sum is scaled: in float32 -1.4e-45 / 2 is -0.0, which would count as missing.
        found = self.marks.found_in(*terms)
        scale()
        self.marks.put(target, found)

    def keeping(self) -> Average:
        """Return the same for what is not a whole sum yet: other ranks may look at its marks."""
        return replace(self, keeps=True)

    def after(self, factor: float) -> Average:
        """Return what is left to do once this rank has divided by `factor` before the sum."""
        return replace(self, factor=self.factor / factor)

    def of_part(self, first: int, count: int) -> Average:
        """Return the same for `count` elements from `first` on, whose sum this rank makes for all."""
        if self.marks is None:
            return self
        marks, inside = self.marks.within(first, count)
        given = self.given if isinstance(self.given, float) else self.given[inside]
        return replace(self, marks=marks, given=given).keeping()


def _add_scaled(
    terms: Sequence[torch.Tensor],  # [elements] each
    scale: float,
    output: torch.Tensor,  # [elements], may be the first of `terms`
) -> None:
    """Leave `scale * terms[0] + scale * terms[1] + ...` of two terms or more in `output`; the first two in one pass."""
    first, second, *others = (term.view(1, -1) for term in terms)
    total = output.view(1, -1)
    # the outer product with one number is the sum of two scaled vectors (axpby), which torch has no other name for
    torch.addr(first, first.new_ones(1), second[0], beta=scale, alpha=scale, out=total)
    for other in others:
        total.add_(other, alpha=scale)


def half(divide: float) -> float:
    """Return a power of two near the square root of `divide`: half of the division, exact in any precision."""
    # 64 gives 8; 6 gives 2, which leaves 3 for after the sum.
    return 2.0 ** round(math.log2(max(divide, 1.0)) / 2)
