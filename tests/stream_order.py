"""Checks that accesses to memory from several streams are ordered: a happens-before check of a run, operator by
operator.

A stream runs its operators in order; other streams may run theirs at the same time, unless an event orders them. Two
accesses to the same bytes, one of which writes, must be ordered. So must the life of memory, by the rule of PyTorch's
caching allocator: a block belongs to the stream that was current when it was allocated, and once it is freed that
stream may be given it again at once, while the stream's earlier operators are still to run. So an allocation counts as
a write on that stream, and so does its end. A check by this rule does not depend on the addresses that an allocator
happens to choose.

What waits for what is kept by PyTorch's own sanitizer (`torch.cuda._sanitizer.StreamSynchronizations`); it begins anew
with each allocation, sees no end of one, looks at first bytes only, and takes collectives for readers.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.cuda._sanitizer import StreamSynchronizations, zip_arguments
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

HOST = -1  # what the host does itself counts as one more stream
_PAGE = 256  # bytes that are looked at together
_TOUCH_NOTHING = {
    "aten::set_", "aten::resize_", "aten::_unsafe_view", "aten::detach", "aten::empty", "aten::empty_like",
    "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided", "aten::record_stream", "aten::is_pinned",
}  # fmt: skip


@dataclass(frozen=True)
class Access:
    """The operator `what` on a stream; numbers rise in the order of launches."""

    stream: int
    number: int
    what: str


@dataclass
class _Page:
    write: Access
    reads: dict[int, Access] = field(default_factory=dict)  # by stream, since the write


@dataclass
class _Block:
    """Memory from its allocation to its end; a page is as the allocation left it until somebody touches it."""

    allocation: Access
    stop: int
    pages: dict[int, _Page] = field(default_factory=dict)


class Order:
    """Accesses so far, and in `conflicts` the pairs that are not ordered."""

    def __init__(self) -> None:
        self.syncs = StreamSynchronizations()
        self.conflicts: list[str] = []
        self._number = self._host = 0
        self._blocks: dict[int, _Block] = {}
        self._starts: list[int] = []
        self.syncs._ensure_stream_exists(HOST)

    def allocated(self, start: int, stream: int, stop: int) -> None:
        """A block of the addresses [start, stop) was given out to `stream`."""
        if start not in self._blocks:
            insort(self._starts, start)
        self._blocks[start] = _Block(self._begin(stream, "its allocation"), stop)

    def holds(self, address: int) -> bool:
        """Whether a block that is known lies there."""
        at = bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._blocks[self._starts[at]].stop

    def reaches(self, start: int, stop: int) -> None:
        """The block at `start`, if it is known, reaches to `stop` at least."""
        if start in self._blocks:
            self._blocks[start].stop = max(self._blocks[start].stop, stop)

    def forget(self, start: int) -> _Block | None:
        """The block at `start` is gone, and whoever has it next may use it at once."""
        block = self._blocks.pop(start, None)
        if block is not None:
            self._starts.remove(start)
        return block

    def freed(self, start: int) -> None:
        """The block at `start` was given back."""
        block = self.forget(start)
        if block is None:
            return
        end = self._begin(block.allocation.stream, "its end")
        for page in block.pages.values():
            self._write(page, end)

    def access(self, stream: int, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor], what: str) -> None:
        """An operator on `stream` reads and writes tensors."""
        access = self._begin(stream, what)
        for tensor in writes:
            for page in self._pages(tensor, access):
                self._write(page, access)
        for tensor in reads:
            for page in self._pages(tensor, access):
                self._read(page, access)

    def _begin(self, stream: int, what: str) -> Access:
        self._number += 1
        self.syncs.update_seq_num(stream, self._number)
        if stream == HOST:
            self._host = self._number
        else:  # the host launches an operator after what it has done itself
            self.syncs.current_sync_states[stream][HOST] = self._host
        return Access(stream, self._number, what)

    def _pages(self, tensor: torch.Tensor, access: Access) -> Iterator[_Page]:
        start, stop = extent(tensor)
        if not self.holds(start):  # from before the check began
            self.allocated(start, access.stream, stop)
        block = self._blocks[self._starts[bisect_right(self._starts, start) - 1]]
        for number in range(start // _PAGE, -(-stop // _PAGE)):
            if number not in block.pages:
                block.pages[number] = _Page(block.allocation)
            yield block.pages[number]

    def _read(self, page: _Page, access: Access) -> None:
        page.reads[access.stream] = access
        self._compare(page.write, access)

    def _write(self, page: _Page, access: Access) -> None:
        before = [page.write, *page.reads.values()]
        page.write, page.reads = access, {}
        for each in before:
            self._compare(each, access)

    def _compare(self, before: Access, after: Access) -> None:
        if before is after or self.syncs.is_ordered_after(after.stream, before.number, before.stream):
            return
        text = f"{after.what} on stream {after.stream} is not ordered after {before.what} on stream {before.stream}"
        if text not in self.conflicts:
            self.conflicts.append(text)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the byte after its last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def touched(operator: Any, args: tuple, kwargs: dict, output: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operator reads and those that it writes, by its schema.

    The schemas of collectives mark no writes; each writes its first argument. A view reads nothing, and an operator
    that makes empty memory writes nothing.
    """
    schema = operator._schema
    if schema.name in _TOUCH_NOTHING:
        return [], []
    reads, writes = [], []
    for position, (argument, value) in enumerate(zip_arguments(schema, args, kwargs)):
        alias = argument.alias_info
        if alias is not None and alias.is_write or schema.name.startswith("c10d::") and position == 0:
            writes += tensors_of(value)
        elif alias is None:
            reads += tensors_of(value)
    for result, value in zip(schema.returns, output if len(schema.returns) > 1 else (output,)):
        if result.alias_info is None and not schema.name.startswith("c10d::"):
            writes += tensors_of(value)
    return reads, writes


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The plain tensors in nested arguments that have memory; of a DTensor what this rank holds."""
    found = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
    plain = [each._local_tensor if isinstance(each, DTensor) else each for each in found]
    return [each for each in plain if not each.is_meta and each.numel() and each.untyped_storage().nbytes()]
