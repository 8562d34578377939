"""The named work of one trace: operators of the host, and what its device did, each with its step, unit and shapes.

Work of a device belongs to the step and the unit that launched it, and has the shapes of the operator around its
launch; an operator belongs to those around its start. Floating-point operations are counted for matrix products,
attention and convolutions, as `torch.utils.flop_counter` does: they are nearly all of a transformer's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fsdplab.profiling.intervals import covered, pairs
from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.profiling.traces.collectives import communicating
from fsdplab.profiling.traces.event_kinds import Kind
from fsdplab.profiling.traces.event_reader import CONVOLUTIONS, read_events
from fsdplab.profiling.traces.events import Events, known
from fsdplab.profiling.traces.modules import Modules
from fsdplab.profiling.traces.segments import Segments
from fsdplab.profiling.traces.tensor_types import tensor_bytes

OPERATOR, KERNEL, COMMUNICATION, COPY = "operator", "kernel", "communication", "copy"
KINDS = (OPERATOR, KERNEL, COMMUNICATION, COPY)
_KIND_OF = {
    Kind.OPERATOR: OPERATOR,
    Kind.KERNEL: KERNEL,
    Kind.COMM: COMMUNICATION,
    Kind.COPY: COPY,
    Kind.DEVICE_COPY: COPY,
}


@dataclass(frozen=True)
class Work:
    """All named work of the profiled steps of a trace (all of it where it marks none), one element each."""

    found: Events
    rows: np.ndarray  # of each element, in `found`
    kind: np.ndarray  # of each element, a position in `KINDS`
    unit: np.ndarray  # of each element, a position in `units`
    units: Sequence[str]
    own_ns: np.ndarray  # without what ran inside: operators nest, work of a device does not
    operator: np.ndarray  # the row of the operator itself, or of the one that launched the work; -1 for none
    communicates: np.ndarray  # operators that copy for a collective
    steps: int  # how many there are

    def of_kind(self, *kinds: str) -> np.ndarray:
        """Which elements are of these kinds."""
        return np.isin(self.kind, [KINDS.index(kind) for kind in kinds])

    @property
    def computes(self) -> str:
        """The kind of work that computes: kernels where there is a device."""
        return KERNEL if self.of_kind(KERNEL).any() else OPERATOR

    @cached_property
    def modules(self) -> list[str]:
        """Each element's unit; of a trace whose engine marks none, its module of the model, where the trace says."""
        if any(self.units):
            return [self.units[unit] for unit in self.unit.tolist()]
        # a kernel is of the module that launched it, an operator of the one in which it began
        calls = self.found.launched_by[self.rows]
        begun = np.where(calls >= 0, calls, self.rows)
        return Modules(self.found).at(self.found.start[begun], self.found.thread[begun])

    @cached_property
    def shapes(self) -> list[str]:
        """What each element's operator was given, as JSON; "" where the trace does not say."""
        return [self.found.shapes.get(row, "") for row in self.operator.tolist()]


def work_in(trace: Work | str | Path, comm_patterns: Sequence[str] = (), shapes: bool = False) -> Work:
    """The named work of a trace, given as its file or as what has been read of it. Raises TraceError."""
    if isinstance(trace, Work):
        return trace
    events = read_events(trace, comm_patterns, shapes=shapes)
    return work_of(events)


def work_of(events: Events) -> Work:
    """The named work of events that have been read; TraceError where there is none."""
    rows, kinds = _rows_of_work(events)
    if not len(rows):
        raise TraceError(f"{events.path} has no operators and no work of a device, so there is nothing to list.")
    is_operator = kinds == 0
    # when each began for the host: an operator at its start, a kernel at its launch, where the trace shows it
    launched = events.of_launch(events.start, rows)
    begun = np.where(~is_operator & known(launched), launched, events.start[rows])

    # operators call operators: each one's own time, and the operator that launched each kernel
    operators = rows[is_operator]
    nesting = _nested(events, operators, events.launched_by[rows[~is_operator]])
    own_ns = events.end[rows] - events.start[rows]
    own_ns[is_operator] = [nesting.own_ns[row] for row in operators.tolist()]
    launching = [nesting.around.get(call, -1) for call in events.launched_by[rows].tolist()]
    operator = np.where(is_operator, rows, launching)  # an operator is its own

    # what began in a step, by the unit of its beginning
    steps = pairs([(window.start, window.end) for window in events.steps])
    is_kept: np.ndarray = np.ones(len(rows), dtype=bool)
    if len(steps):
        is_kept = covered(steps + [0, 1], begun)  # their ends count, too
    # each unit by a number, as they are met: of a, b, a these are 0, 1, 0
    segments = Segments(events, events.steps)
    numbers: dict[str, int] = {}
    unit_numbers: list[int] = []
    for name in segments.units_at(begun[is_kept]):
        unit_numbers.append(numbers.setdefault(name, len(numbers)))
    return Work(
        found=events,
        rows=rows[is_kept],
        kind=kinds[is_kept],
        unit=np.array(unit_numbers, dtype=np.int64),
        units=list(numbers),
        own_ns=own_ns[is_kept],
        operator=operator[is_kept],
        communicates=_communicates(events, rows[is_kept]),
        steps=max(1, len(steps)),
    )


def _rows_of_work(events: Events) -> tuple[np.ndarray, np.ndarray]:
    """(rows of operators and of a device's work, the position of each one's kind in `KINDS`)."""
    # of each kind of event the position of the kind of work, so that one look-up serves all rows
    positions: np.ndarray = np.full(len(Kind), -1)
    for kind, name in _KIND_OF.items():
        positions[kind] = KINDS.index(name)
    rows = events.rows(*_KIND_OF)
    kinds = positions[events.kind[rows]]
    is_of_device = kinds > 0
    on_compute_thread = np.isin(events.thread[rows], events.compute_threads)  # gloo's threads run operators, too
    counts = is_of_device | on_compute_thread
    return rows[counts], kinds[counts]


def _communicates(events: Events, rows: np.ndarray) -> np.ndarray:
    """Which rows are operators that begin where their thread copies for a collective."""
    communicates: np.ndarray = np.zeros(len(rows), dtype=bool)
    is_operator = events.kind[rows] == Kind.OPERATOR
    for thread, spans in communicating(events).items():
        of_thread = is_operator & (events.thread[rows] == thread)
        communicates[of_thread] = covered(spans, events.start[rows[of_thread]])
    return communicates


class _Nesting(NamedTuple):
    """How operators lie inside each other, by their rows: the time of each without the operators inside it, and the
    innermost operator around each launching call (-1 for none).
    """

    own_ns: dict[int, int]
    around: dict[int, int]


def _nested(
    events: Events,
    operators: np.ndarray,  # rows of the events
    calls: np.ndarray,  # rows of launching calls, -1 among them for work whose launch is not known
) -> _Nesting:
    """Walk through operators and launching calls, thread after thread and the outer one first.

    An addmm from 0 to 100 with a copy inside it from 20 to 50, in which a kernel is launched at 30: the addmm's own
    time is 70, the copy's 30, and the copy is around the launch.
    """
    rows = np.concatenate([operators, np.unique(calls[calls >= 0])])
    order = np.lexsort((-events.end[rows], events.start[rows], events.thread[rows]))
    in_order = rows[order]
    is_operator = order < len(operators)
    nesting = _Nesting({}, {})
    own_ns, around = nesting
    open_operators: list[tuple[int, int, int]] = []  # row, thread, end; the innermost one last
    columns = zip(
        in_order.tolist(),
        is_operator.tolist(),
        events.thread[in_order].tolist(),
        events.start[in_order].tolist(),
        events.end[in_order].tolist(),
    )
    for row, opens, thread, start, end in columns:
        # what is of another thread, or has ended, holds neither this one nor any that follows
        while open_operators:
            _, open_thread, open_end = open_operators[-1]
            if open_thread == thread and open_end > start:
                break
            open_operators.pop()
        outer, outer_end = -1, start
        if open_operators:
            outer, _, outer_end = open_operators[-1]
        if not opens:  # a launching call, inside which nothing is looked for
            around[row] = outer
            continue
        if outer >= 0:  # what of it lies inside the outer one is not the outer one's own
            own_ns[outer] -= min(end, outer_end) - start
        own_ns[row] = end - start
        open_operators.append((row, thread, end))
    return nesting


# ---- what an operator does, from what it was given


@lru_cache(maxsize=4096)
def flops_of(name: str, shapes: str) -> int:
    """Floating-point operations of one call; 0 for what is not counted.

    >>> flops_of("aten::mm", "[[[4, 8], [8, 2]], null]")
    128
    """
    count = _COUNTED.get(name.removeprefix("aten::"))
    if count is None or not shapes:
        return 0
    try:
        # dimensions, types, and of a convolution the values of its arguments: without the types
        dims_and_values = json.loads(shapes)[::2]
        return count(*dims_and_values)
    except (IndexError, TypeError, ValueError):  # shapes of another form than the operator's own
        return 0


@lru_cache(maxsize=4096)
def bytes_of(name: str, shapes: str) -> int:
    """Bytes of the tensors that one call was given; 0 where it reads none of them.

    >>> bytes_of("aten::relu", '[[[4, 8]], ["float"]]'), bytes_of("aten::view", '[[[4, 8]], ["float"]]')
    (128, 0)
    """
    if not shapes or name.removeprefix("aten::") in _READ_NOTHING:
        return 0
    dims, types, *_ = json.loads(shapes)
    return sum(map(tensor_bytes, dims or [], types or []))


def _product(a: list[int], b: list[int]) -> int:
    """2 M K N: of matrices of [M, K] and [K, N]; a batch of them has one more dimension."""
    return 2 * math.prod(a) * b[-1]


def _convolution(given: list[list[int]], values: list[str] | None = None) -> int:
    """2 N K C/groups R S P Q: of an input of [N, C, H, W] and a weight of [K, C/groups, R, S]. How large the output is
    (P, Q) follows from stride and padding, where the trace says these; else it is as large as the input.
    """
    image, weight = given[:2]
    batch, _, *space = image
    _, _, *kernel = weight
    padding, stride, dilation = [_numbers(text, len(space)) for text in _geometry(values)]
    output = space
    if padding and stride and dilation:
        output = []
        for size, width, pad, step, apart in zip(space, kernel, padding, stride, dilation):
            # of an image 32 wide, padded by 1 on both sides, a kernel of 3 reaches over 3: at a stride of 2 it fits
            # (34 - 3) // 2 + 1 = 16 times
            reach = apart * (width - 1) + 1
            output.append((size + 2 * pad - reach) // step + 1)
    return 2 * batch * math.prod(weight) * math.prod(output)


def _geometry(values: list[str] | None) -> list[str]:
    """Padding, stride and dilation, as cuDNN's, MIOpen's and oneDNN's operators are given them."""
    listed = []
    for text in values or ():
        if isinstance(text, str) and text.startswith("["):  # other arguments are numbers and truth values
            listed.append(text)
    if len(listed) < 3:
        return ["", "", ""]
    return listed[:3]


def _numbers(text: str, many: int) -> list[int]:
    """So many numbers of a text, one for each dimension or one for all; [] where it has another number of them."""
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    if len(numbers) == 1:
        return numbers * many
    if len(numbers) != many:
        return []
    return numbers


def _convolution_backward(given: list[list[int]]) -> int:
    """The gradients of the input and of the weight: two products of the forward's size."""
    grad_output, _, weight = given[:3]
    batch = grad_output[0]
    space = grad_output[2:]
    of_forward = 2 * batch * math.prod(weight) * math.prod(space)
    return 2 * of_forward


def _heads_last(query: list[int], key: list[int], value: list[int]) -> int:
    """Attention of tensors of [batch, sequence, heads, head size], as the kernels of FlashAttention take them."""
    batch, rows, heads, width = query
    keys = key[1]
    # each of the scores is a sum over the head's width, and a factor of each of the value's columns
    scores = batch * heads * rows * keys
    return 2 * scores * (width + value[-1])


def _attention(query: list[int], key: list[int], value: list[int]) -> int:
    """Attention of tensors of [batch, heads, sequence, head size]: query times key, and the scores times value."""
    keys = key[-2]
    of_scores = 2 * math.prod(query) * keys
    of_output = 2 * math.prod(query[:-1]) * keys * value[-1]  # a score for each query and key, times the value
    return of_scores + of_output


def _attention_backward(given: list[list[int]]) -> int:
    """Five products where the forward has two: of the output's gradient, then query, key and value."""
    return 5 * _attention(*given[1:4]) // 2


_READ_NOTHING = {
    *("view", "reshape", "transpose", "t", "slice", "split", "split_with_sizes", "select", "expand", "as_strided"),
    *("detach", "detach_", "unsqueeze", "squeeze", "chunk", "permute", "alias", "narrow", "unbind", "flatten"),
    *("view_as", "_unsafe_view", "resize_", "empty_like", "empty_strided", "zero_", "fill_", "set_"),
    *("linear", "matmul", "contiguous", "to", "_to_copy"),  # what these call reads
    *("record_stream", "is_nonzero", "item"),
}
_COUNTED: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("mm", "bmm", "_scaled_mm"), lambda given, *_: _product(given[0], given[1])),
    **dict.fromkeys(("addmm", "baddbmm", "_addmm_activation"), lambda given, *_: _product(given[1], given[2])),
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    "convolution_backward": lambda given, *_: _convolution_backward(given),
}
for _name in ("_flash_attention", "_efficient_attention", "flash_attn::_flash_attn"):
    _COUNTED[f"{_name}_forward"] = lambda given, *_: _heads_last(*given[:3])
    _COUNTED[f"{_name}_backward"] = lambda given, *_: 5 * _heads_last(*given[1:4]) // 2
for _name in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"):
    _COUNTED[f"_scaled_dot_product_{_name}"] = lambda given, *_: _attention(*given[:3])
    _COUNTED[f"_scaled_dot_product_{_name}_backward"] = lambda given, *_: _attention_backward(given)
