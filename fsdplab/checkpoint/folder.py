"""Keeps a folder of checkpoints for a job that may be killed at any moment: saves while training goes on, finds again.

    checkpoints = CheckpointFolder("checkpoints", keep=2, job={"batch_size": 16, "seed": 0})
    step = checkpoints.load(model, optimizer, extra={"scheduler": scheduler})  # 0 where there is none
    ...
    checkpoints.save(model, optimizer, step, extra={"scheduler": scheduler})  # returns when the state is copied
    ...
    checkpoints.save_last(model, optimizer, step, extra={"scheduler": scheduler})  # returns when it is on the disk
    checkpoints.close()

A save copies the state to host memory and writes it in a thread (`torch.distributed.checkpoint.async_save`) to a hidden
folder `.step-00000050.<8 hex digits>`. When the files of every rank and their manifest are written, rank 0 renames it
to `step-00000050`, and only then removes older ones. So a folder `step-N` is complete, whatever is killed and when.

The name says that a checkpoint is complete, not that it is good. Good are those whose checksums this job has verified,
or which it wrote itself, without a number that is not finite. The newest `keep` good ones stay, and what is newer; a
damaged one is renamed to `step-00000050.damaged.<8 hex digits>`, and removed when there are `keep` good ones or others
are set aside, so that the disk never holds more than with good ones alone.

With model and optimizer go the random states of every rank and a description of the job. Hidden folders are what killed
jobs left; the next job removes them. All ranks must see one file system, and one job at a time may use the folder.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from fsdplab.checkpoint import extra as extras
from fsdplab.checkpoint.files import CheckpointDamaged, on_each_rank, to_disk, write_manifest
from fsdplab.checkpoint.lock import FolderInUse, FolderLock
from fsdplab.checkpoint.state import CheckedCheckpoint, all_states
from fsdplab.common.files import is_full

_NAME = re.compile(r"step-(\d{8,})")
_HIDDEN = re.compile(r"\.(step-\d{8,}|room)\.[0-9a-f]{8}")
_DAMAGED = re.compile(r"step-(\d{8,})\.damaged\.[0-9a-f]{8}")
_RANDOM, _ABOUT = "random", "about"  # the extra states that every checkpoint of a folder has
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


class CheckpointNotSaved(RuntimeError):
    """A save that failed, on all ranks; what was published before it is still there."""


class NotFinite(ArithmeticError):
    """A loss, a weight or an optimizer state is NaN or infinite; nothing was saved."""


class AnotherJob(ValueError):
    """A checkpoint of a job whose settings differ; nothing has been loaded from it."""


def published(folder: str | Path) -> dict[int, Path]:
    """Return the complete checkpoints in a folder: step -> path, the oldest first."""
    place = Path(folder)
    if not place.is_dir():
        return {}
    steps = {}
    for path in place.iterdir():
        name = _NAME.fullmatch(path.name)
        if name:
            steps[int(name[1])] = path
    return dict(sorted(steps.items()))


class CheckpointFolder:
    """Keeps the checkpoints of one job. All ranks make it, and call each method, in the same order.

    `keep` is how many good checkpoints stay (at least 1); the disk needs room for one more. `job` holds settings that
    change what is trained, as JSON: `load` refuses a checkpoint that was saved with others. `allow_nan` lets a job go
    on after a number that is not finite. `patience_s` is how long a disk that is full is waited for where training
    cannot go on without it.

    Making it removes what killed jobs left unfinished. Raises `FolderInUse` where another job, which lives, uses the
    folder.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 2,
        job: Mapping[str, Any] | None = None,
        allow_nan: bool = False,
        patience_s: float = 600.0,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be 1 or more checkpoints, got {keep}")
        # absolute: the thread goes on writing there when the job has changed its working folder
        self.folder = Path(folder).absolute()
        self.keep, self.allow_nan, self.patience_s = keep, allow_nan, patience_s
        self.job = None if job is None else json.loads(json.dumps(job))
        # collectives of the thread that writes must not mix with those of training
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._first = self._group is None or dist.get_rank() == 0
        self._lock: FolderLock | None = None
        # a rank of a killed job that still writes must not find our unfinished folder
        self._token = ""
        self._with_patience(self._begin_folder, patience_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._pending: tuple[int, Future[None]] | None = None
        self._failures = 0  # of saves, one after the other
        self._is_finite = True  # as long as all numbers were
        self._good: set[int] = set()  # steps
        self._not_finite: set[int] = set()  # steps that were saved all the same

    def _begin_folder(self) -> None:
        try:
            self._token = self._on_first(self._prepare)
        except OSError as error:
            if not is_full(error):
                raise
            raise CheckpointNotSaved(f"{self.folder} has no room for its lock ({error.strerror}); make room") from error

    # ---- load

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        extra: extras.Extra | None = None,
        force: bool = False,
    ) -> int:
        """Load the newest good checkpoint, whatever number of ranks saved it; returns its step, 0 without one.

        Restores the objects of `extra` and, on as many ranks, each rank's random states. A damaged checkpoint is set
        aside with a warning; raises `CheckpointDamaged` where all are damaged. Raises `ValueError` for another model or
        optimizer, `AnotherJob` for one whose settings differ, or warns with `force`. Where the disk has no room for one
        more checkpoint, waits for it, and raises `CheckpointNotSaved` when patience ends.
        """
        self.wait()
        extra = _with_names_checked(extra)
        damaged: dict[Path, CheckpointDamaged] = {}
        for step, path in reversed(self._on_first(partial(published, self.folder)).items()):
            try:
                self._load_one(model, optimizer, step, path, extra, force)
            except CheckpointDamaged as error:
                damaged[path] = error
                continue
            # Set aside only now that a good one is loaded; earlier damaged ones make room for these.
            if damaged:
                self._on_first(lambda: self._remove(self._damaged_ones()))
            for newer, reason in damaged.items():
                aside = self._on_first(partial(self._set_aside, newer))
                self._warn(f"{newer} is left out, and renamed to {aside.name}: {reason}")
            (self._good if self._is_finite else self._not_finite).add(step)
            self._wait_for_room(path)
            return step
        if damaged:
            # none is renamed, so that the next start does not begin from nothing
            raise next(iter(damaged.values()))
        return 0

    def _load_one(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        step: int,
        path: Path,
        extra: dict[str, Any],
        force: bool,
    ) -> None:
        saved = CheckedCheckpoint(path, require_manifest=True)
        about = saved.value_of(_ABOUT) or {}
        # Somebody has renamed the folder: it does not hold the step that its name says.
        if about.get("step", step) != step:
            raise CheckpointDamaged(f"{path} holds step {about['step']}; give it the name of its step again")
        if not about.get("finite", True) and not self.allow_nan:
            raise CheckpointDamaged(f"{path} was saved after a number that was not finite; allow_nan loads it")
        self._check_job(path, about.get("job"), force)
        for name in sorted(extras.names_in(saved.metadata) - {*extra, _RANDOM, _ABOUT}):
            self._warn(f"{path} has the extra state {name!r}, which nobody asked for: it is not restored")
        # The random states of every rank, which `saved.load` gives back like any extra state.
        if saved.value_of(_RANDOM) is not None:
            extra = {**extra, _RANDOM: extras.random_states()}
        saved.load(model, optimizer, extra)
        self._is_finite = about.get("finite", True)

    def _check_job(self, path: Path, saved: dict[str, Any] | None, force: bool) -> None:
        if saved is None or self.job is None:
            return
        # A setting that only one of the two has differs too.
        differing = []
        for name in sorted({*saved, *self.job}):
            there, here = saved.get(name), self.job.get(name)
            if there != here and repr(there) != repr(here):  # NaN is no equal of itself
                differing.append(name)
        settings = [f"{name} is {saved.get(name)!r} in it and {self.job.get(name)!r} here" for name in differing[:5]]
        said = f"{path} is of another job: {', '.join(settings)}"

        def check() -> None:
            if differing and not force:
                raise AnotherJob(f"{said}; continue it as it was, give another folder, or load it with force")

        on_each_rank(check, self._group)  # the data may differ on one machine alone
        if differing:
            self._warn(f"{said}; it is continued all the same")

    # ---- save

    def save(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, extra: extras.Extra | None = None
    ) -> None:
        """Copy the state now, and publish it as `step` while training goes on; waits for the save before.

        Does nothing where this job has loaded or published `step`. If the save before failed, a warning says so; after
        a second failure in a row it returns only when the state is saved, as `save_last` does.

        Raises `NotFinite` for a weight or an optimizer state that is NaN or infinite (with `allow_nan`, warns).
        """
        try:
            self.wait()
        except CheckpointNotSaved as error:
            if self._failures > 1:
                self._warn(f"{error}; training waits until this one is saved")
                self.save_last(model, optimizer, step, extra=extra)
                return
            self._warn(f"{error}; the next save tries again")
        self._begin(model, optimizer, step, extra)

    def save_last(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        step: int,
        *,
        extra: extras.Extra | None = None,
        patience_s: float | None = None,
    ) -> None:
        """Save as `save` does, and return when it is published: for the end of a job, after which no save tries again.

        A save that fails is repeated until `patience_s` (by default, the folder's) is over; then raises
        `CheckpointNotSaved`.
        """
        try:
            self.wait()
        except CheckpointNotSaved as error:
            self._warn(str(error))

        def attempt() -> None:
            self._begin(model, optimizer, step, extra)
            self.wait()

        self._with_patience(attempt, self.patience_s if patience_s is None else patience_s)

    def check_loss(self, loss: float, step: int) -> None:
        """Raise `NotFinite`, which names the step, unless the loss, equal on all ranks, is a finite number.

        With `allow_nan`, a warning; what is saved afterwards is not counted as good.
        """
        if not math.isfinite(loss):
            self._found_not_finite(f"the loss of step {step} is {loss}")

    def wait(self) -> None:
        """Return when the last save is published; raises `CheckpointNotSaved` with the reason if it failed."""
        if self._pending is None:
            return
        # Forgotten first, so that a failure is reported once.
        (step, saved), self._pending = self._pending, None
        try:
            saved.result()
        except FolderInUse:
            raise  # which no further try mends
        except (CheckpointException, OSError, RuntimeError) as error:
            self._failures += 1
            reason = _first_failure(error)
            raise CheckpointNotSaved(
                f"the checkpoint of step {step} was not saved ({type(reason).__name__}: {reason}); those before it are"
                f" still in {self.folder}"
            ) from error
        self._failures = 0

    def close(self) -> None:
        """Wait for the last save, as `wait` does, end the thread, and leave the folder to the next job."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._lock is not None:
                self._lock.release()

    def _begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, extra: extras.Extra | None) -> None:
        if step in self._good | self._not_finite:
            return
        extra = _with_names_checked(extra)
        about = {"step": step, "job": self.job, "finite": self._is_finite}
        # Over the live memory; `async_save` returns when it has copied that to host memory.
        state = all_states(model, optimizer, {**extra, _RANDOM: extras.random_states(), _ABOUT: about})
        # Each rank looks at its shards, and all take the same decision.
        wrong = on_each_rank(lambda: _not_finite_in(state), self._group)
        if names := [name for each in wrong for name in each]:
            self._found_not_finite(f"before the save of step {step}, {names[0]!r} is not finite ({len(names)} in all)")
            state["extra"] |= extras.entries_of({_ABOUT: {**about, "finite": False}})
        name = f"step-{step:08d}"
        unfinished = self.folder / f".{name}.{self._token}"
        writer = dcp.FileSystemWriter(str(unfinished), overwrite=False)
        # Under a hidden name with this job's token: not a checkpoint yet, whatever happens from here on.
        written = dcp.async_save(state, storage_writer=writer, process_group=self._group)
        publish = partial(self._publish, written, unfinished, step, self._is_finite)
        self._pending = step, self._thread.submit(publish)

    def _found_not_finite(self, what: str) -> None:
        try:
            self.wait()  # for the last good one, since the job is about to end
        except CheckpointNotSaved as error:
            self._warn(str(error))
        if not self.allow_nan:
            raise NotFinite(
                f"{what}; nothing was saved after it, and the newest good checkpoint is still in {self.folder}: look at"
                " the data and the learning rate, or allow it (allow_nan)"
            )
        self._is_finite = False
        self._warn(f"{what}; training goes on, and what is saved from now on is not counted as good")

    # ---- patience

    def _with_patience(self, attempt: Callable[[], None], patience_s: float) -> None:
        """Try again, less and less often, as long as rank 0's clock allows."""
        deadline, pause_s = time.monotonic() + patience_s, _FIRST_PAUSE_S
        while True:
            try:
                return attempt()
            except CheckpointNotSaved as error:
                # Rank 0 decides, so that no rank tries again while another one raises.
                left_s = self._on_first(lambda: deadline - time.monotonic())
                if left_s <= 0:
                    raise
                pause_s = min(pause_s, left_s)
                self._warn(f"{error}; tries again in {pause_s:.0f} s")
            time.sleep(pause_s)
            # Pauses of 1, 2, 4, 8, 16, 30, 30 s, and so on.
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _wait_for_room(self, newest: Path) -> None:
        """Return when the disk has room for one more checkpoint like the newest."""

        def attempt() -> None:
            try:
                self._on_first(partial(self._try_room, newest))
            except OSError as error:
                raise CheckpointNotSaved(
                    f"{self.folder} has no room for one more checkpoint ({error.strerror}), so what is trained now"
                    " would be lost; make room"
                ) from error

        self._with_patience(attempt, self.patience_s)

    def _try_room(self, newest: Path) -> None:
        trial = self.folder / f".room.{self._token}"
        trial.mkdir()
        try:
            # Files of the sizes of the newest checkpoint are reserved, and removed again.
            for path in newest.iterdir():
                with (trial / path.name).open("wb") as file:
                    if size := path.stat().st_size:
                        _reserve(file.fileno(), size)
        finally:
            shutil.rmtree(trial, ignore_errors=True)

    # ---- what one rank does for all

    def _on_first(self, action: Any) -> Any:
        """Return what `action` returns on rank 0, on all ranks."""
        return on_each_rank(lambda: action() if self._first else None, self._group)[0]

    def _warn(self, text: str) -> None:
        if self._first:
            warnings.warn(text, stacklevel=3)

    def _prepare(self) -> str:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.folder)
        for path in self.folder.iterdir():
            # Left by a job that was killed: under the lock no other job is writing here.
            if _HIDDEN.fullmatch(path.name):
                shutil.rmtree(path)
        return os.urandom(4).hex()

    def _set_aside(self, path: Path) -> Path:
        return path.rename(path.with_name(f"{path.name}.damaged.{os.urandom(4).hex()}"))

    # ---- in the thread

    def _publish(self, written: Future[Any], unfinished: Path, step: int, is_finite: bool) -> None:
        try:
            # The files of all ranks, then their checksums, then the name that says that all of it is there.
            written.result()
            write_manifest(unfinished, self._group)
            self._on_first(partial(self._rename, unfinished, step))
        except BaseException:  # DCP's own is no Exception
            if self._first:
                shutil.rmtree(unfinished, ignore_errors=True)  # which gives a full disk its room back
            raise
        (self._good if is_finite else self._not_finite).add(step)
        self._on_first(partial(self._remove_old, step))

    def _rename(self, unfinished: Path, step: int) -> None:
        if self._lock is not None:
            self._lock.check()
        path = self.folder / f"step-{step:08d}"
        # The names in the folder reach the disk before its own does: a loss of power leaves no half under `step-N`.
        to_disk(unfinished)
        if path.exists():  # neither loaded nor written by this job
            self._set_aside(path)
        unfinished.rename(path)
        to_disk(self.folder)

    def _remove_old(self, step: int) -> None:
        """Remove what is older than the newest `keep` good ones, and all but the newest that is not finite."""
        present = published(self.folder)
        if step < max(present):
            self._warn(
                f"step {step} was saved, and {self.folder} has the newer step {max(present)}, which the next start"
                " loads; nothing was removed"
            )
            return
        # With keep=2 and good ones at 10, 20 and 30: 20 and 30 are kept, and 10 is old.
        kept = sorted(self._good & {*present})[-self.keep :]
        last_not_finite = max(self._not_finite, default=0)
        old = [path for at, path in present.items() if at in self._not_finite and at < last_not_finite]
        # Until there are `keep` good ones, nothing older is removed.
        if len(kept) == self.keep:
            old += [path for at, path in present.items() if at < kept[0] and path not in old]
            old += self._damaged_ones()
        self._remove(old)

    def _damaged_ones(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if _DAMAGED.fullmatch(path.name)]

    def _remove(self, paths: list[Path]) -> None:
        for path in paths:
            hidden = path.with_name(
                f".{path.name.partition('.')[0]}.{os.urandom(4).hex()}"
            )  # so that no half has its name
            try:
                path.rename(hidden)
                shutil.rmtree(hidden)
            except OSError as error:
                self._warn(f"{path} could not be removed ({error.strerror}); what was saved is saved")


def _with_names_checked(extra: extras.Extra | None) -> dict[str, Any]:
    for name in extra or {}:
        if name in (_RANDOM, _ABOUT):
            raise ValueError(f"the extra state {name!r} has a name that the folder uses itself; give it another one")
    return dict(extra or {})


def _not_finite_in(state: dict[str, Any]) -> list[str]:
    """Return the optimizer's weights and states of which this rank holds a number that is not finite."""
    trained = {name for group in state["optim"]["param_groups"] for name in group["params"]}
    tensors = {name: value for name, value in state["model"].items() if name in trained}
    for name, values in state["optim"]["state"].items():
        tensors |= {f"{name}.{key}": value for key, value in values.items()}
    wrong = []
    for name, value in tensors.items():
        local = value.to_local() if isinstance(value, DTensor) else value  # this rank's shard
        if isinstance(local, torch.Tensor) and local.is_floating_point() and not bool(local.isfinite().all()):
            wrong.append(name)
    return wrong


def _reserve(descriptor: int, size: int) -> None:
    """Take room on the disk, as a write of `size` bytes would; OSError where there is none."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.pwrite(descriptor, bytes(1), size - 1)


def _first_failure(error: BaseException) -> BaseException:
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
