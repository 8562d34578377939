"""Writes the row of each step of one rank as soon as its times are known.

On a GPU the host runs ahead, so a step's time is that between two events on the device, and its loss is copied to the
host beside the step's other work. Both are read once the second event has passed, which is asked and never waited for.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fsdplab.common.files import lock, unlock, write_whole
from fsdplab.recording.settings import Settings
from fsdplab.records import RecordError

_WRAPPERS = 4  # around a model, with the model itself
_APART_S = 0.02  # shorter steps than this are written several at once


@dataclass(frozen=True)
class Place:
    """Which rank this is, of how many, of how many on its node, and its device."""

    rank: int
    world_size: int
    of_a_node: int
    device: torch.device


@dataclass
class Taken:
    """What hooks have noted of a step: its losses, seconds in data loaders, tokens, and a module that was evaluated.

    `scaled`: what a GradScaler returned last, and what it had been given; `scaler`: the last one that scaled anything.
    `first_losses`: those of the first step, as
    long as it may still go on. `activities`: what else the loop did (activities.py), by name: how often, nanoseconds,
    bytes; `noted_ns` of all of them together; `is_busy` inside of one that holds others, `evaluates_since` while the
    model is set to evaluate. `cpu_s`: CPU time of all threads. `clipped`: the lists of parameters, by their ids, whose
    gradients were clipped.
    """

    losses: list[torch.Tensor | float] = field(default_factory=list)
    first_losses: list[torch.Tensor | float] = field(default_factory=list)
    loading_s: float = 0.0
    tokens: int | None = None
    evaluated: torch.nn.Module | None = None
    scaled: tuple[Any, Any] | None = None
    scaler: Any = None
    activities: dict[str, list[int]] = field(default_factory=dict)
    noted_ns: int = 0
    cpu_s: float | None = None
    is_busy: bool = False
    evaluates_since: int | None = None
    clipped: set[tuple[int, ...]] = field(default_factory=set)

    def may_begin(self) -> bool:
        """Return whether an activity that begins now is inside no other one, and is of the loop's own thread."""
        self.end_evaluation()
        return not self.is_busy and self.evaluates_since is None and is_main_thread()

    def end_evaluation(self, trains: bool = False) -> None:
        """Note the evaluation if the model trains again, which some trainers say without a call of `train`."""
        if self.evaluates_since is None or self.evaluated is None:
            return
        outermost = islice(
            self.evaluated.modules(), _WRAPPERS
        )  # of a wrapper around it nobody says that it trains again
        if trains or any(each.training for each in outermost):
            self.note("evaluation", time.perf_counter_ns() - self.evaluates_since)
            self.evaluates_since = None

    def note(self, name: str, took_ns: int, nbytes: int = 0) -> None:
        """Note an activity that has ended."""
        found = self.activities.setdefault(name, [0, 0, 0])
        found[0] += 1
        found[1] += took_ns
        found[2] += nbytes
        self.noted_ns += took_ns

    def note_loss(self, loss: torch.Tensor) -> None:
        """`backward` is called of this tensor; one that a GradScaler has scaled counts as it was before."""
        if self.scaled is not None and loss is self.scaled[0]:
            loss = self.scaled[1]
        self.scaled = None
        # backward of a vector is no loss of a step
        if loss.numel() == 1:
            # on a GPU the copy is asked for and not waited for
            self.losses.append(loss.item() if loss.device.type == "cpu" else loss.detach().to("cpu", non_blocking=True))


@dataclass
class _Step:
    """A step whose row is not written yet: `mark` is the device's event at its end, None on a CPU."""

    number: int
    seconds: float | None
    taken: Taken
    mark: torch.cuda.Event | None


class StepRows:
    """Appends a row a step to the rank's file, which is this process's alone."""

    def __init__(self, settings: Settings, place: Place, file: int) -> None:
        self.settings, self.place, self._file = settings, place, file
        self._waiting: deque[_Step] = deque()
        self._last_mark: torch.cuda.Event | None = None
        self._written_at = 0.0
        atexit.register(self.write)  # what a job that is not killed has not written

    @classmethod
    def claimed(cls, settings: Settings, place: Place) -> StepRows | None:
        """Return the rank's rows; None, and a note, where another process has been this rank."""
        path = settings.mailbox.of(place.rank, "steps")
        _make_ranks_folder(settings)
        try:
            # O_EXCL: the first process that creates the file is this rank
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o666)
        except FileExistsError:
            note(settings, place.rank, "a second process took steps as this rank; the first one is recorded")
            return None
        with suppress(OSError):  # a file system without locks
            lock(file)  # until the recording ends, however it does
        about = {"world_size": place.world_size, "device": place.device.type}
        settings.mailbox.of(place.rank, "about").write_text(json.dumps(about) + "\n")
        return cls(settings, place, file)

    def add(self, step: int, seconds: float | None, taken: Taken) -> None:
        """Add a step that has ended after `seconds` of the host's time, None where it is not timed."""
        mark = None
        if self.place.device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._waiting.append(_Step(step, seconds, taken, mark))
        if time.perf_counter() - self._written_at > _APART_S:
            self.write()

    def write(self, at_the_end: bool = False) -> None:
        """Write the rows of all steps that the device has ended."""
        lines = []
        # in order: a step whose event has not passed keeps back those behind it
        while self._waiting and (self._waiting[0].mark is None or at_the_end or self._waiting[0].mark.query()):
            lines.append(json.dumps(self._row(self._waiting.popleft())) + "\n")
        os.write(self._file, "".join(lines).encode())
        self._written_at = time.perf_counter()

    def _row(self, step: _Step) -> list[Any]:
        """Return the values of `COLUMNS`."""
        seconds, loading_s = step.seconds, None if step.seconds is None else step.taken.loading_s
        if step.mark is not None:  # what the loader took is hidden behind the device's work, as far as it can be
            if seconds is not None and self._last_mark is not None:
                # milliseconds between two ends of steps on the device
                seconds = self._last_mark.elapsed_time(step.mark) / 1e3
            self._last_mark, loading_s = step.mark, None
        losses = [float(each) for each in (*step.taken.first_losses, *step.taken.losses)]
        # of several micro-batches: loops divide each loss by their number, so the sum is the mean
        loss = sum(losses) if losses else None
        taken = step.taken
        return [step.number, loss, seconds, taken.tokens, loading_s, taken.cpu_s, taken.activities]

    def note(self, words: str) -> None:
        """Something that the record must say of this rank."""
        note(self.settings, self.place.rank, words)

    def close(self) -> None:
        """Write what is left; no more rows follow."""
        if self._waiting and self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)
        self.write(at_the_end=True)
        atexit.unregister(self.write)
        with suppress(OSError):
            unlock(self._file)
        os.close(self._file)


def _make_ranks_folder(settings: Settings) -> None:
    """For ranks that no launcher has started; RecordError where their folder holds a record already."""
    if (Path(settings.folder) / "run.json").exists():
        raise RecordError(f"{settings.folder} holds an earlier record, which stays; give another folder")
    settings.mailbox.folder.mkdir(parents=True, exist_ok=True)
    if not settings.file.exists():
        write_whole(settings.file, settings.as_text() + "\n")


def note(settings: Settings, rank: int, words: str) -> None:
    """Append a sentence to a rank's notes."""
    with settings.mailbox.of(rank, "notes").open("a") as file:
        file.write(json.dumps({"words": words}) + "\n")


def resident_bytes(device: torch.device) -> int:
    """What the device's allocator holds, or on a CPU what the process does; 0 where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        # the second number: pages that are resident
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):  # not Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def is_main_thread() -> bool:
    """Return whether the loop itself calls, and not a thread that saves a checkpoint beside it."""
    return threading.current_thread() is threading.main_thread()
