"""Stores shards away from the device that computes: in host memory, or in files on a local drive.

Two policies: PyTorch's `CPUOffloadPolicy`, and `NVMeOffloadPolicy`, ZeRO-Infinity's idea (Rajbhandari et al. 2021,
section 5): parameters at rest live in files, are read ahead of their gather and leave memory after it. Optimizer state
follows with `offload_optimizer`; gradients rest in host memory under both.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from fsdplab.engine import compat
from fsdplab.engine.core.buffers import ShardStorage
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.policy import Strategy
from fsdplab.engine.features import mapped

_ALIGNMENT = 64  # bytes: where a tensor may begin in a piece of memory


@dataclass  # not frozen, as PyTorch's policies are not
class NVMeOffloadPolicy(OffloadPolicy):
    """Keep shards in files without a name in `folder`, one a unit and rank: a folder of a local drive, the faster the
    better.

    With `keep_cached` the kernel may keep what it has room for in its page cache, which is faster while memory is
    plentiful; without it a shard that nobody uses takes no memory once four more have been let go.
    """

    folder: str | os.PathLike[str]
    keep_cached: bool = False


class HostStorage(ShardStorage):
    """Host memory, page-locked if `pin` and there is an accelerator to copy to.

    Shards and gradients are copied beside what computes, on one stream for each direction. The host waits for them in
    `await_copies` and in the `Pending` of `take` only: at the end of a backward, before an optimizer on the host reads
    gradients and writes to shards.
    """

    away = True
    keep_cached = False

    def __init__(self, pin: bool) -> None:
        super().__init__(torch.device("cpu"))
        self.pin = self.pin_gradients = pin and torch.accelerator.is_available()
        self._sent: torch.cuda.Event | None = None  # the last copy of a shard to a device
        if pin and not self.pin:
            warnings.warn(
                "pin_memory=True without an accelerator: nothing to copy to, so shards rest in ordinary memory; "
                "give CPUOffloadPolicy(pin_memory=False)",
                stacklevel=4,
            )

    def make(self, nbytes: int, unit: str) -> torch.Tensor:
        """Return zeroed bytes of host memory, [nbytes] (uint8)."""
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self.pin)

    def holds(
        self,
        tensor: torch.Tensor,  # any shape
    ) -> bool:
        """Whether `tensor` is where `make` would put it."""
        return tensor.device.type == "cpu"

    def send(
        self,
        write: Callable[[torch.Tensor], object],  # fills the tensor that it is given
        target: torch.Tensor,  # [shard_bytes] (uint8), on the device that computes
    ) -> Pending:
        """Have `write` fill `target` on the stream on which shards arrive: the copy hides behind what computes."""
        if not compat.has_streams(target.device):
            return super().send(write, target)
        stream = _arriving(target.device)
        # The target's memory may still be in use by what the computing stream was given before.
        stream.wait_stream(torch.cuda.current_stream(target.device))
        with torch.cuda.stream(stream):
            write(target)
            self._sent = sent = stream.record_event()
        # Waiting is for the stream that computes; the host goes on.
        return Pending(lambda: torch.cuda.current_stream(target.device).wait_event(sent), event=sent)

    def await_copies(self) -> None:
        """Wait for the last copy of a shard to the device, and with it for all before it."""
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None

    def take(
        self,
        gradients: Iterable[torch.Tensor],  # any shapes: this rank's rows of each average
    ) -> tuple[Iterable[torch.Tensor], Pending]:
        """Begin to copy gradients to host memory; return where each will be, and what the host waits for."""
        values = list(gradients)
        # What was computed on the host is there already: `cpu()` returns it as it is.
        if not values or not compat.has_streams(values[0].device):
            return super().take([value.cpu() for value in values])
        memory = partial(torch.empty, dtype=torch.uint8, pin_memory=self.pin_gradients)
        landings = end_to_end(values, memory)
        return landings, _leaving(values[0].device).copy(values, landings)


class FileStorage(HostStorage):
    """Files in `folder`; raises `OSError` with the remedy if none can be made there, and warns if it is memory.

    A gather that is about to read one file lets the next begin to come in: the one that followed last time.
    """

    def __init__(self, folder: str | os.PathLike[str], keep_cached: bool = False) -> None:
        super().__init__(pin=False)
        self.pin_gradients = torch.accelerator.is_available()
        self.folder, self.keep_cached = Path(folder), keep_cached
        # A folder that cannot be written to fails here, not in the first forward.
        mapped.zeros(self.folder, 1, "a trial")
        if mapped.is_in_memory(self.folder):
            warnings.warn(
                f"{self.folder} is a file system of memory (tmpfs): offload there spares none; name a folder on a drive"
                " in NVMeOffloadPolicy",
                stacklevel=4,
            )

    def make(self, nbytes: int, unit: str) -> torch.Tensor:
        """Return zeroed bytes of a new file, [nbytes] (uint8)."""
        return mapped.zeros(self.folder, nbytes, f"unit {unit!r}")

    def holds(
        self,
        tensor: torch.Tensor,  # any shape
    ) -> bool:
        """Whether `tensor` is mapped from a file."""
        return mapped.file_under(tensor) is not None

    def will_read(
        self,
        flat: torch.Tensor,  # [shard_bytes] (uint8), as `make` returned it
    ) -> None:
        """Begin to read the file under `flat`, and the one that followed it last time."""
        if flat.numel():
            mapped.bring_in(flat)
            mapped.bring_in_all(_order.next_after(flat.data_ptr()))

    def done_reading(
        self,
        flat: torch.Tensor,  # [shard_bytes] (uint8), as `make` returned it
    ) -> None:
        """Take the pages of `flat` out of memory."""
        mapped.let_go(flat, self.keep_cached)


class _Leaving:
    """Copies gradients from `device` to host memory on a stream of its own.

    The memory of what leaves is used again once the stream that computes has waited for the copy. It does so when the
    next gradients leave, so a backward holds those of two units.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._last: tuple[torch.cuda.Event, Sequence[torch.Tensor]] | None = None

    def copy(
        self,
        values: Sequence[torch.Tensor],  # any shapes, on the device
        landings: Sequence[torch.Tensor],  # of the shapes and dtypes of `values`, on the host
    ) -> Pending:
        """Begin to copy `values` into `landings`; the host waits for what is returned before it reads them."""
        current = torch.cuda.current_stream(self._device)
        # Once the last copy is waited for on that stream, the allocator may use its memory for what comes next.
        if self._last is not None:
            current.wait_event(self._last[0])
        # The reduction that makes `values` is on the current stream.
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(landings, values, non_blocking=True)
            arrived = self._stream.record_event()
        self._last = arrived, values

        def finish() -> None:  # keeps no values: what has left would stay until the end of the backward
            arrived.synchronize()
            if self._last is not None and self._last[0] is arrived:
                self._last = None

        return Pending(finish)


@cache
def _leaving(device: torch.device) -> _Leaving:
    """Return what copies gradients from `device`, one a device whatever storages the units have."""
    return _Leaving(device)


@cache
def _arriving(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which shards are copied to `device`."""
    return torch.cuda.Stream(device)


def end_to_end(
    values: Sequence[torch.Tensor],  # any shapes, any dtypes
    make: Callable[[int], torch.Tensor],  # from a number of bytes: [bytes] (uint8)
) -> list[torch.Tensor]:
    """Return tensors of the dtypes, shapes and order of `values`, in one piece of memory."""
    # Each rounded up to 64 bytes: 100 and 20 bytes begin at 0 and 128, in a piece of 192.
    sizes = [-(-value.nbytes // _ALIGNMENT) * _ALIGNMENT for value in values]
    piece = make(sum(sizes))
    return [_view(piece, start, value) for start, value in zip(accumulate(sizes, initial=0), values)]


def _view(
    piece: torch.Tensor,  # [bytes] (uint8)
    start: int,
    like: torch.Tensor,  # any shape, any dtype
) -> torch.Tensor:
    """Return the bytes of `piece` from `start` on, as a dense tensor with the dtype, shape and order of `like`."""
    # Dense, in the order of the dimensions of `like`, also where `like` has gaps.
    strides = torch.empty_like(like, device="meta").stride()
    return piece[start : start + like.nbytes].view(like.dtype).as_strided(like.shape, strides)


class _Order:
    """Which address was read after which two: a backward passes the units of the forward in the opposite order."""

    def __init__(self) -> None:
        self._followed: dict[tuple[int, int], int] = {}
        self._last = (0, 0)

    def next_after(self, address: int) -> int:
        """Note that `address` is read; return the one to expect after it, or 0."""
        # Two reads tell the direction: after 1, 2 comes 3 in a forward, after 3, 2 comes 1 in a backward.
        self._followed[self._last] = address
        self._last = (self._last[1], address)
        return self._followed.get(self._last, 0)


_order = _Order()  # of all units of this process, also where `fully_shard` gave each a storage of its own


def storage_of(policy: OffloadPolicy | None, device: torch.device, row: Strategy | None = None) -> ShardStorage:
    """Return the storage that `policy` asks for, for shards that are computed on `device`.

    Raises `ValueError` for a policy that nobody knows, and where `row` keeps parameters whole: then there is nothing at
    rest to offload.
    """
    if policy is None or type(policy) is OffloadPolicy:
        return ShardStorage(device)
    if row is not None and not row.shard_parameters:
        raise ValueError(
            f"offload_policy={policy!r} moves shards that rest, but {row.name} keeps parameters whole; use full_shard"
            " or shard_grad_op, or offload_optimizer(optimizer, policy) for the optimizer state alone"
        )
    return away_from(policy)


def away_from(policy: OffloadPolicy) -> HostStorage:
    """Return the storage of a policy that does offload; raises `ValueError` for any other."""
    if isinstance(policy, CPUOffloadPolicy):
        return HostStorage(policy.pin_memory)
    if isinstance(policy, NVMeOffloadPolicy):
        return FileStorage(policy.folder, policy.keep_cached)
    raise ValueError(f"unknown offload policy {policy!r}; expected CPUOffloadPolicy() or NVMeOffloadPolicy(folder)")
