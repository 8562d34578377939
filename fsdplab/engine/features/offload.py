"""Where slices rest when they do not rest on the device that computes: host memory, or files on a local drive.

Two policies: PyTorch's `CPUOffloadPolicy`, and `NVMeOffloadPolicy`, ZeRO-Infinity's idea (Rajbhandari et al. 2021,
section 5): parameters at rest live in files, are read ahead of their gather and leave memory after it. Optimizer state
follows with `offload_optimizer`; gradients rest in host memory under both.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.policy import Strategy
from fsdplab.engine.core.shard_storage import ShardStorage
from fsdplab.engine.features import mapped


@dataclass  # not frozen, as PyTorch's policies are not
class NVMeOffloadPolicy(OffloadPolicy):
    """Keep slices in files without a name in `folder`, one a unit and rank: a folder of a local drive, the faster the
    better.

    With `keep_cached` the kernel may keep what it has room for in its page cache, which is faster while memory is
    plentiful; without it a slice that nobody uses takes no memory at all.
    """

    folder: str | os.PathLike[str]
    keep_cached: bool = False


class HostStorage(ShardStorage):
    """Host memory, page-locked if `pin` and there is an accelerator to copy to."""

    away = True
    keep_cached = False

    def __init__(self, pin: bool) -> None:
        super().__init__(torch.device("cpu"))
        self.pin = pin and torch.accelerator.is_available()
        if pin and not self.pin:
            warnings.warn(
                "pin_memory=True without an accelerator: nothing to copy to, so slices rest in ordinary memory; "
                "give CPUOffloadPolicy(pin_memory=False)",
                stacklevel=4,
            )

    def make(self, nbytes: int, unit: str) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self.pin)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is where `make` would put it."""
        return tensor.device.type == "cpu"

    def begin_take(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        if gradient.device.type == "cpu":
            return gradient, Pending(lambda: None)
        landing = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=torch.accelerator.is_available())
        landing.copy_(gradient, non_blocking=True)
        arrived = torch.Event(gradient.device)
        arrived.record()
        return landing, Pending(arrived.synchronize, gradient)


class FileStorage(HostStorage):
    """Files in `folder`; raises `OSError` with the remedy if none can be made there, and warns if it is memory.

    A gather that is about to read one file lets the next begin to come in: the one that followed last time.
    """

    def __init__(self, folder: str | os.PathLike[str], keep_cached: bool = False) -> None:
        super().__init__(pin=False)
        self.folder, self.keep_cached = Path(folder), keep_cached
        mapped.zeros(self.folder, 1, "a trial")
        if mapped.is_in_memory(self.folder):
            warnings.warn(
                f"{self.folder} is a file system of memory (tmpfs): offload there spares none; name a folder on a drive"
                " in NVMeOffloadPolicy",
                stacklevel=4,
            )

    def make(self, nbytes: int, unit: str) -> torch.Tensor:
        return mapped.zeros(self.folder, nbytes, f"unit {unit!r}")

    def holds(self, tensor: torch.Tensor) -> bool:
        return mapped.file_under(tensor) is not None

    def will_read(self, flat: torch.Tensor) -> None:
        if flat.numel():
            mapped.bring_in(flat)
            mapped.bring_in_all(_order.next_after(flat.data_ptr()))

    def done_reading(self, flat: torch.Tensor) -> None:
        mapped.let_go(flat, self.keep_cached)


class _Order:
    """Which address was read after which two: a backward passes the same units as the forward,
    in the opposite order.
    """

    def __init__(self) -> None:
        self._followed: dict[tuple[int, int], int] = {}
        self._last = (0, 0)

    def next_after(self, address: int) -> int:
        """Note that `address` is read; the one to expect after it, or 0."""
        self._followed[self._last] = address
        self._last = (self._last[1], address)
        return self._followed.get(self._last, 0)


_order = _Order()  # of all units of this process, also where `fully_shard` gave each a storage of its own


def storage_of(policy: OffloadPolicy | None, device: torch.device, row: Strategy | None = None) -> ShardStorage:
    """The storage that `policy` asks for, for slices that are computed on `device`.

    Raises `ValueError` for a policy that nobody knows, and where `row` keeps parameters whole: then there is nothing at
    rest to offload.
    """
    if policy is None or type(policy) is OffloadPolicy:
        return ShardStorage(device)
    if row is not None and not row.shard_parameters:
        raise ValueError(
            f"offload_policy={policy!r} moves slices that rest, but {row.name} keeps parameters whole; use full_shard"
            " or shard_grad_op, or offload_optimizer(optimizer, policy) for the optimizer state alone"
        )
    return away_from(policy)


def away_from(policy: OffloadPolicy) -> HostStorage:
    """The storage of a policy that does offload; raises `ValueError` for any other."""
    if isinstance(policy, CPUOffloadPolicy):
        return HostStorage(policy.pin_memory)
    if isinstance(policy, NVMeOffloadPolicy):
        return FileStorage(policy.folder, policy.keep_cached)
    raise ValueError(f"unknown offload policy {policy!r}; expected CPUOffloadPolicy() or NVMeOffloadPolicy(folder)")
