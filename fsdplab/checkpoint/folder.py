"""A folder of checkpoints for a job that may be killed at any moment: saved while training goes on, and found again.

    checkpoints = CheckpointFolder("checkpoints", keep=2)
    step = checkpoints.load(model, optimizer)  # 0 where there is none
    ...
    checkpoints.save(model, optimizer, step)  # returns when the state is copied
    ...
    checkpoints.close()

A save copies the state to host memory and writes it in a thread (`torch.distributed.checkpoint.async_save`) to a hidden
folder `.step-00000050.<8 hex digits>`. When the files of every rank and their manifest are written, rank 0 renames it
to `step-00000050`, and only then removes the oldest ones. So a folder `step-N` is complete, whatever is killed and
when, and there is always one. Hidden folders are what killed jobs left; the next job removes them. All ranks must see
one file system, and one job at a time may use the folder.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from fsdplab.checkpoint.files import CheckpointDamaged, on_each_rank, write_manifest
from fsdplab.checkpoint.state import load, states_of

_NAME = re.compile(r"step-(\d{8,})")
_HIDDEN = re.compile(r"\.step-\d{8,}\.[0-9a-f]{8}")


class CheckpointNotSaved(RuntimeError):
    """A save that failed, on all ranks; what was published before it is still there."""


def published(folder: str | Path) -> dict[int, Path]:
    """The complete checkpoints in a folder: step -> path, the oldest first."""
    found = Path(folder).iterdir() if Path(folder).is_dir() else ()
    steps = {int(name[1]): path for path in found if (name := _NAME.fullmatch(path.name))}
    return dict(sorted(steps.items()))


class CheckpointFolder:
    """The checkpoints of one job. All ranks make it, and call each method, in the same order.

    `keep` is how many checkpoints stay (at least 1); the disk needs room for one more. Making it removes what killed
    jobs left unfinished.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep must be 1 or more checkpoints, got {keep}")
        self.folder, self.keep = Path(folder), keep
        # collectives of the thread that writes must not mix with those of training
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._first = self._group is None or dist.get_rank() == 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._pending: tuple[int, Future[None]] | None = None
        # a rank of a killed job that still writes must not find our unfinished folder
        self._token = self._on_first(self._prepare)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load the newest complete checkpoint, whatever number of ranks saved it; returns its step, 0 without one.

        A damaged one is left out with a warning; raises `CheckpointDamaged` where all are damaged, and `ValueError` for
        another model or optimizer.
        """
        self.wait()
        damaged = None
        for step, path in reversed(self._on_first(partial(published, self.folder)).items()):
            try:
                load(model, optimizer, path, require_manifest=True)
                return step
            except CheckpointDamaged as error:
                damaged = error
                if self._first:
                    warnings.warn(f"{path} is left out: {error}", stacklevel=2)
        if damaged is not None:
            raise damaged
        return 0

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Copy the state now, and publish it as `step` while training goes on; waits for the save before.

        Does nothing where `step` is published already. If the save before failed, a warning says so.
        """
        try:
            self.wait()
        except CheckpointNotSaved as error:
            if self._first:
                warnings.warn(f"{error}; the next save tries again", stacklevel=2)
        if self._on_first(lambda: step in published(self.folder)):
            return
        name = f"step-{step:08d}"
        unfinished = self.folder / f".{name}.{self._token}"
        writer = dcp.FileSystemWriter(str(unfinished), overwrite=False)
        written = dcp.async_save(states_of(model, optimizer), storage_writer=writer, process_group=self._group)
        self._pending = step, self._thread.submit(self._publish, written, unfinished, self.folder / name)

    def wait(self) -> None:
        """Return when the last save is published; raises `CheckpointNotSaved` with the reason if it failed."""
        if self._pending is None:
            return
        (step, saved), self._pending = self._pending, None
        try:
            saved.result()
        except (CheckpointException, OSError, RuntimeError) as error:
            reason = _first_failure(error)
            raise CheckpointNotSaved(
                f"the checkpoint of step {step} was not saved ({type(reason).__name__}: {reason}); those before it are"
                f" still in {self.folder}"
            ) from error

    def close(self) -> None:
        """Wait for the last save, as `wait` does, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    # ---- what one rank does for all

    def _on_first(self, action: Any) -> Any:
        """What `action` returns on rank 0, on all ranks."""
        return on_each_rank(lambda: action() if self._first else None, self._group)[0]

    def _prepare(self) -> str:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if _HIDDEN.fullmatch(path.name):
                shutil.rmtree(path)
        return os.urandom(4).hex()

    # ---- in the thread

    def _publish(self, written: Future[Any], unfinished: Path, path: Path) -> None:
        try:
            written.result()
            write_manifest(unfinished, self._group)
            self._on_first(partial(self._rename, unfinished, path))
        except BaseException:  # DCP's own is no Exception
            if self._first:
                shutil.rmtree(unfinished, ignore_errors=True)  # which gives a full disk its room back
            raise

    def _rename(self, unfinished: Path, path: Path) -> None:
        _to_disk(unfinished)
        unfinished.rename(path)
        _to_disk(self.folder)
        for old in list(published(self.folder).values())[: -self.keep]:
            hidden = old.with_name(f".{old.name}.{self._token}")  # so that no half of a checkpoint bears its name
            old.rename(hidden)
            shutil.rmtree(hidden)


def _to_disk(folder: Path) -> None:
    """Make the names in a folder survive a loss of power."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _first_failure(error: BaseException) -> BaseException:
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
