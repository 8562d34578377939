"""Measured memory: the bytes live at every instant of one training step, by category, on CPU and CUDA, for any engine.

`MemoryRecorder` is put around one step. The total is what was alive when it began plus every allocator event since;
each shared arena counts once. Categories come from the engine's own tags (`TagLog`, `fsdplab.engine.events`), from the
objects that own the memory (parameters, gradients, optimizer state), from the profiler's ranges and from what
collectives were given, so other engines can be measured too: FSDP2 fully, DDP and FSDP1 but for unit names, DeepSpeed
but for the gradients that ZeRO-1 keeps between backward and step (`other`).

Not seen: the sockets' buffers inside gloo, memory of plain Python threads, numpy's memory, and on CUDA what libraries
take past torch's allocator. Temporaries of the optimizer's step are `other`: a fused optimizer has none, a looped one
up to three times its largest parameter, a foreach one as much as all its parameters. A graph that is still alive when
the step begins is `other` too.

Overhead, measured on a GPT of 19 M parameters (2 x 64 tokens, one thread): profiling makes the step 4 % longer, and
around it half a second goes into finding the living tensors and reading the trace. So do not use the step's time.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from fsdplab.engine.events import Event, Tag, subscribe
from fsdplab.profiling.memory.events_of_trace import read_trace
from fsdplab.profiling.memory.live_storages import Owners, WatchedStorages, address, alive_now, take_workspaces
from fsdplab.profiling.memory.timeline import AllocatorEvent, MemoryTimeline, build_timeline, without_kept
from fsdplab.profiling.profiler import activities_on, await_gloo_threads, save_trace


class TagLog(AbstractContextManager["TagLog"]):
    """The newest tag of every address, kept from before the model is built so that long-lived buffers have a name.

    >>> log = TagLog()
    >>> len(log.tags)
    0
    >>> log.close()
    """

    def __init__(self) -> None:
        self._newest: dict[int, Tag] = {}
        self._until_closed = ExitStack()
        self._until_closed.callback(subscribe(self._on_event))

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Tag):
            self._newest[event.pointer] = event

    @property
    def tags(self) -> list[Tag]:
        """One tag an address; an address that was freed since keeps its last one."""
        return list(self._newest.values())

    def close(self) -> None:
        """Stop recording; the tags stay."""
        self._until_closed.close()

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(kw_only=True, eq=False, repr=False)
class MemoryRecorder:
    """Measures the memory of the one step inside its `with`: forward, backward, optimizer step, zero_grad.

    `tags` is the log that was started before the model was built (lab engine); `ignore` lists tensors that are no part
    of training, such as the text that batches are cut from. With `save_trace` the profiler's trace of the step is
    written there (`unfinished` as of `saving.save_trace`). An exception inside the step passes through and leaves no
    timeline. No other `torch.profiler` may run.

    With `offloaded`, offloaded tensors do not count. A GPU's allocator never sees them. On CPU ranks this is emulated:
    parameters and optimizer state are left out from the beginning, a reduced gradient from the moment its parameter
    gets it. Memory in use counts, as on a card, except a card's staging copy of the slice that is being gathered in its
    own dtype: one unit's, at most.

    >>> model = torch.nn.Linear(1000, 10, bias=False)
    >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    >>> cpu = torch.device("cpu")
    >>> with MemoryRecorder(model=model, optimizer=optimizer, engine="torch-ddp", device=cpu) as recorder:
    ...     model(torch.ones(1, 1000)).sum().backward()
    ...     optimizer.step()
    >>> recorder.timeline.peak["sharded_parameters"]
    40000
    """

    model: torch.nn.Module
    optimizer: Any
    engine: str
    device: torch.device
    tags: TagLog | None = None
    ignore: Iterable[torch.Tensor] = ()
    offloaded: bool = False
    save_trace: Path | None = None
    unfinished: Path | None = None

    def __post_init__(self) -> None:
        self.device = _indexed(self.device)
        self._owners = Owners(self.model, self.optimizer, self.engine, self.device)
        self._heard: list[Tag] = []
        self._gradients: list[Tag] = []
        self._departures: list[AllocatorEvent] = []
        self._timeline: MemoryTimeline | None = None

    @property
    def timeline(self) -> MemoryTimeline:
        """The measured timeline; `RuntimeError` before the step has ended."""
        if self._timeline is None:
            after = "read recorder.timeline after its `with` block, and only if the step inside did not fail"
            raise RuntimeError(f"no timeline yet: {after}")
        return self._timeline

    def __enter__(self) -> MemoryRecorder:
        gc.collect()  # garbage in cycles is no memory of the step, and would be freed at any instant
        # an address that is the optimizer's by now was another buffer's when it was tagged
        state = self._owners.state_addresses()
        take_workspaces(self.device)  # so that those of the step are among its allocations
        old_tags = self.tags.tags if self.tags else []
        self._old_tags = [tag for tag in old_tags if tag.pointer not in state]
        resting = [*self.model.parameters(), *self._owners.state()] if self.offloaded else []
        self._storages = WatchedStorages(self.device, self._owners.categories(), [*self.ignore, *resting])
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._profile = profile(activities=activities_on(self.device), profile_memory=True, record_shapes=True)
        self._profile.start()
        self._until_end = self._watch()
        self._growth = ResidentGrowth()
        self._start_ns = time.time_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        measured = {"resident_growth": self._growth.stop(), **self._allocator_peaks()}
        self._note_gradients()
        self._storages.stop()
        self._until_end.close()
        tags = [*self._old_tags, *self._heard]
        if not self.offloaded:
            now = time.time_ns()
            tags += [Tag("optimizer_state", at, 0, now, "") for at in self._owners.state_addresses()]
        await_gloo_threads()
        self._profile.stop()
        # after an exception the profile is of half a step
        if kind is None and self.save_trace is not None:
            save_trace(self._profile, self.save_trace, self.unfinished)
        if kind is None:
            self._timeline = self._build(tags, measured)
        del self._profile

    # ---- while the step runs

    def _watch(self) -> ExitStack:
        """Listen to the engine, the optimizer and, where gradients are offloaded, to the parameters."""
        stack = ExitStack()
        stack.callback(subscribe(self._on_event))
        # before its step all gradients are there, and after it storages may have been resized to zero
        if (optimizer := self._owners.optimizer) is not None:
            stack.callback(optimizer.register_step_pre_hook(lambda *_: self._note_gradients()).remove)
            stack.callback(optimizer.register_step_post_hook(lambda *_: self._storages.look()).remove)
        for parameter in self.model.parameters() if self.offloaded else ():
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(self._gradient_left).remove)
        return stack

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Tag):
            self._heard.append(event)

    def _note_gradients(self) -> None:
        """Note the gradients that are held now; those that leave for the host are noted one by one."""
        self._storages.look()
        if not self.offloaded:
            self._gradients += self._owners.gradient_tags()

    def _gradient_left(self, parameter: torch.Tensor) -> None:
        """Note that a gradient leaves for the host."""
        gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
        if at := address(gradient, self.device):
            self._departures.append(AllocatorEvent(time.time_ns(), at, -gradient.untyped_storage().nbytes()))

    # ---- afterwards

    def _allocator_peaks(self) -> dict[str, int | None]:
        """The CUDA allocator's own figures; nothing on a CPU."""
        if self.device.type != "cuda":
            return {}
        torch.cuda.synchronize(self.device)
        return {
            "allocated_peak": torch.cuda.max_memory_allocated(self.device),
            "reserved_peak": torch.cuda.max_memory_reserved(self.device),
        }

    def _build(self, tags: list[Tag], measured: dict[str, int | None]) -> MemoryTimeline:
        """Make the timeline of the profile; AccountingError where it does not add up."""
        workspaces = take_workspaces(self.device)
        trace = read_trace(
            self._profile,
            self.device,
            buffers={tag.pointer for tag in self._heard if tag.category == "communication_buffers"},
            alive=lambda: alive_now(self.device).keys(),
            gathers_into_parameters=self.engine.startswith("deepspeed"),
        )
        timeline = build_timeline(
            [*self._storages.events(), *without_kept(trace.events, workspaces), *self._departures],
            # tags of the engine and the optimizer outrank inferred ones
            tags=[*trace.gradients, *self._gradients, *tags],
            hints=trace.hints,
            start_ns=self._start_ns,
            work_end_ns=trace.work_end_ns,
            workspaces=sum(workspaces.values()) or None,
            **measured,
        )
        timeline.check()
        return timeline


def _indexed(device: torch.device) -> torch.device:
    """The device with its number; ValueError for one whose memory cannot be measured."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"memory is measured on cpu and cuda, got device {str(device)!r}; run on one of these, or with memory=False"
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


# ---- the growth of a process's resident memory, to cross-check the allocator's figure
#
# Both can be right and differ. Freed memory that glibc keeps is resident still: it serves blocks of up to 32 MB from
# heaps, one for each thread, that fragment (an FSDP2 step on gloo: 86 MB by the allocator, 390 MB resident).
# `malloc_trim` returns what it can before the measurement; a process started with `MALLOC_MMAP_THRESHOLD_=65536` maps
# such blocks for themselves, and then the two agree within 5 MB (gloo's sockets, the profiler's notes), at the price of
# slower steps. The other way round, memory that was allocated but never written to is not resident.


class ResidentGrowth:
    """From construction to `stop`: highest resident bytes minus those at the beginning (Linux; None elsewhere)."""

    def __init__(self) -> None:
        self._before: int | None = None
        if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc has it, musl does not
            libc.malloc_trim(0)
        with suppress(OSError):  # no such file outside Linux, and some sandboxes forbid it
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _status_bytes("VmRSS")

    def stop(self) -> int | None:
        """Bytes by which the resident memory rose at its highest, or None where the system does not tell."""
        if self._before is None:
            return None
        highest = _status_bytes("VmHWM")
        return None if highest is None else max(0, highest - self._before)


def _status_bytes(field: str) -> int | None:
    """A field of this process's status, in bytes."""
    status = Path("/proc/self/status").read_text()
    line = re.search(rf"^{field}:\s*(\d+) kB", status, re.MULTILINE)
    return int(line[1]) * 1024 if line else None
