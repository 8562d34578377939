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
    Kind.OPERATOR: OPERATOR, Kind.KERNEL: KERNEL, Kind.COMM: COMMUNICATION,
    Kind.COPY: COPY, Kind.DEVICE_COPY: COPY,
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """All named work of the profiled steps of a trace (all of it where it marks none), one element each.

    `rows` are rows of `found`. `own_ns` is the time without what ran inside (operators nest; work of a device does
    not). `unit` indexes `units`. `operator` is the row of the operator itself, or of the one that launched the work; -1
    for none. `communicates`: operators that copy for a collective. `steps`: how many there are.
    """

    found: Events
    rows: np.ndarray
    kind: np.ndarray
    unit: np.ndarray
    units: Sequence[str]
    own_ns: np.ndarray
    operator: np.ndarray
    communicates: np.ndarray
    steps: int

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
        calls = self.found.launched_by[self.rows]
        begun = np.where(calls >= 0, calls, self.rows)
        return Modules(self.found).at(self.found.start[begun], self.found.thread[begun])

    @cached_property
    def shapes(self) -> list[str]:
        """What each element's operator was given, as JSON; "" where the trace does not say."""
        return [self.found.shapes.get(row, "") for row in self.operator.tolist()]


def work_in(trace: Work | str | Path, comm_patterns: Sequence[str] = (), shapes: bool = False) -> Work:
    """The named work of a trace, given as its file or as what has been read of it. Raises TraceError."""
    return trace if isinstance(trace, Work) else work_of(read_events(trace, comm_patterns, shapes=shapes))


def work_of(found: Events) -> Work:
    """The named work of events that have been read; TraceError where there is none."""
    rows = found.rows(*_KIND_OF)
    kinds = np.array([KINDS.index(_KIND_OF[kind]) if kind in _KIND_OF else -1 for kind in Kind])[found.kind[rows]]
    counts = (kinds > 0) | np.isin(found.thread[rows], found.compute_threads)
    rows, kinds = rows[counts], kinds[counts]
    if not len(rows):
        raise TraceError(f"{found.path} has no operators and no work of a device, so there is nothing to list.")
    launched = found.of_launch(found.start, rows)
    begun = np.where((kinds > 0) & known(launched), launched, found.start[rows])
    steps = pairs([step[1:] for step in found.steps])
    kept = covered(steps + [0, 1], begun) if len(steps) else np.ones(len(rows), dtype=bool)  # their ends count, too
    operators = rows[kinds == 0]
    own, around = _nested(found, operators, found.launched_by[rows[kinds > 0]])
    own_ns = found.end[rows] - found.start[rows]
    own_ns[kinds == 0] = [own[row] for row in operators.tolist()]
    operator = np.where(kinds == 0, rows, [around.get(call, -1) for call in found.launched_by[rows].tolist()])
    numbers: dict[str, int] = {}
    units = Segments(found, found.steps).units_at(begun[kept])
    unit = np.array([numbers.setdefault(each, len(numbers)) for each in units], dtype=np.int64)
    return Work(
        found, rows[kept], kinds[kept], unit, list(numbers), own_ns[kept], operator[kept],
        _communicates(found, rows[kept]), max(1, len(steps)),
    )  # fmt: skip


def _communicates(found: Events, rows: np.ndarray) -> np.ndarray:
    """Which rows are operators that begin where their thread copies for a collective."""
    apart: np.ndarray = np.zeros(len(rows), dtype=bool)
    for thread, spans in communicating(found).items():
        own = (found.thread[rows] == thread) & (found.kind[rows] == Kind.OPERATOR)
        apart[own] = covered(spans, found.start[rows[own]])
    return apart


def _nested(found: Events, operators: np.ndarray, calls: np.ndarray) -> tuple[dict[int, int], dict[int, int]]:
    """(ns of each operator without the operators inside it, the innermost operator around each launching call)."""
    rows = np.concatenate([operators, np.unique(calls[calls >= 0])])
    order = np.lexsort((-found.end[rows], found.start[rows], found.thread[rows]))
    columns = (each[rows[order]].tolist() for each in (found.thread, found.start, found.end))
    own: dict[int, int] = {}
    around: dict[int, int] = {}
    stack: list[tuple[int, int, int]] = []  # row, thread, end
    for row, computes, thread, start, end in zip(rows[order].tolist(), (order < len(operators)).tolist(), *columns):
        while stack and (stack[-1][1] != thread or stack[-1][2] <= start):
            stack.pop()
        if not computes:
            around[row] = stack[-1][0] if stack else -1
            continue
        if stack:
            own[stack[-1][0]] -= min(end, stack[-1][2]) - start
        own[row] = end - start
        stack.append((row, thread, end))
    return own, around


# ---- what an operator does, from what it was given


@lru_cache(maxsize=4096)
def flops_of(name: str, shapes: str) -> int:
    """Floating-point operations of one call; 0 for what is not counted.

    >>> flops_of("aten::mm", "[[[4, 8], [8, 2]], null]")
    128
    """
    count = _COUNTED.get(name.removeprefix("aten::"))
    try:
        return count(*json.loads(shapes)[::2]) if count and shapes else 0
    except (IndexError, TypeError, ValueError):  # shapes of another form than the operator's own
        return 0


@lru_cache(maxsize=4096)
def bytes_of(name: str, shapes: str) -> int:
    """Bytes of the tensors that one call was given; 0 where it reads none of them.

    >>> bytes_of("aten::relu", '[[[4, 8]], ["float"]]'), bytes_of("aten::view", '[[[4, 8]], ["float"]]')
    (128, 0)
    """
    reads = shapes and name.removeprefix("aten::") not in _READ_NOTHING
    dims, types, *_ = json.loads(shapes) if reads else ([], [])
    return sum(map(tensor_bytes, dims or [], types or []))


def _product(a: list[int], b: list[int]) -> int:
    return 2 * math.prod(a) * b[-1]


def _convolution(given: list[list[int]], values: list[str] | None = None) -> int:
    """2 N K C/groups R S P Q: of an input of [N, C, H, W] and a weight of [K, C/groups, R, S]. How large the output is
    (P, Q) follows from stride and padding, where the trace says these; else it is as large as the input.
    """
    (batch, _, *space), (_, _, *kernel) = given[:2]
    padding, stride, dilation = (_numbers(text, len(space)) for text in _geometry(values))
    if padding and stride and dilation:
        reach = [wide * (size - 1) + 1 for wide, size in zip(dilation, kernel)]
        space = [(size + 2 * pad - whole) // step + 1 for size, pad, whole, step in zip(space, padding, reach, stride)]
    return 2 * batch * math.prod(given[1]) * math.prod(space)


def _geometry(values: list[str] | None) -> list[str]:
    """Padding, stride and dilation, as cuDNN's, MIOpen's and oneDNN's operators are given them."""
    listed = [text for text in values or () if isinstance(text, str) and text.startswith("[")]
    return listed[:3] if len(listed) >= 3 else ["", "", ""]


def _numbers(text: str, many: int) -> list[int]:
    found = [int(number) for number in re.findall(r"\d+", text)]
    return found * many if len(found) == 1 else found if len(found) == many else []


def _convolution_backward(given: list[list[int]]) -> int:
    """The gradients of the input and of the weight: two products of the forward's size."""
    grad_output, _, weight = given[:3]
    return 2 * 2 * grad_output[0] * math.prod(weight) * math.prod(grad_output[2:])


def _heads_last(query: list[int], key: list[int], value: list[int]) -> int:
    """Attention of tensors of [batch, sequence, heads, head size], as the kernels of FlashAttention take them."""
    batch, rows, heads, width = query
    return 2 * batch * heads * rows * key[1] * (width + value[-1])


def _attention(query: list[int], key: list[int], value: list[int]) -> int:
    return 2 * math.prod(query) * key[-2] + 2 * math.prod(query[:-1]) * key[-2] * value[-1]


def _attention_backward(given: list[list[int]]) -> int:
    """Five products where the forward has two: of the output's gradient, then query, key and value."""
    return 5 * _attention(*given[1:4]) // 2


_READ_NOTHING = {
    "view", "reshape", "transpose", "t", "slice", "split", "split_with_sizes", "select", "expand", "as_strided",
    "detach", "detach_", "unsqueeze", "squeeze", "chunk", "permute", "alias", "narrow", "resize_", "empty_like",
    "empty_strided", "unbind", "flatten", "linear", "matmul", "_unsafe_view", "view_as", "contiguous", "to", "_to_copy",
    "zero_", "fill_", "set_", "record_stream", "is_nonzero", "item",
}  # fmt: skip
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
