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

import gc
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fsdplab.engine.events import Event, Tag, subscribe
from fsdplab.profiling.memory.events_of_trace import read_trace
from fsdplab.profiling.memory.live_storages import (
    OffloadedTensors,
    WatchedStorages,
    alive_now,
    gradient_tags,
    inner_optimizer,
    named_storages,
    state_addresses,
)
from fsdplab.profiling.memory.resident_set import ResidentGrowth
from fsdplab.profiling.memory.timeline import MemoryTimeline, build_timeline
from fsdplab.profiling.saving import save_trace
from fsdplab.profiling.stopping import await_gloo_threads


class TagLog:
    """The newest tag of every address, kept from before the model is built so that long-lived buffers have a name.

    >>> log = TagLog()
    >>> len(log.tags)
    0
    >>> log.close()
    """

    def __init__(self) -> None:
        self._newest: dict[int, Tag] = {}
        self._unsubscribe: Callable[[], None] | None = subscribe(self._on_event)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Tag):
            self._newest[event.pointer] = event

    @property
    def tags(self) -> list[Tag]:
        """One tag an address; an address that was freed since keeps its last one."""
        return list(self._newest.values())

    def close(self) -> None:
        """Stop recording; the tags stay."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    def __enter__(self) -> TagLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MemoryRecorder:
    """Measures the memory of the one step inside its `with`: forward, backward, optimizer step, zero_grad.

    `tags` is the log that was started before the model was built (lab engine); `ignore` lists tensors that are no part
    of training, such as the text that batches are cut from. With `offloaded`, offloaded tensors are left out, also
    where the host computes (`OffloadedTensors`). With `save_trace` the profiler's trace of the step is written there.
    An exception inside the step passes through and leaves no timeline. No other `torch.profiler` may run.

    >>> model = torch.nn.Linear(1000, 10, bias=False)
    >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    >>> cpu = torch.device("cpu")
    >>> with MemoryRecorder(model=model, optimizer=optimizer, engine="torch-ddp", device=cpu) as recorder:
    ...     model(torch.ones(1, 1000)).sum().backward()
    ...     optimizer.step()
    >>> recorder.timeline.peak["parameter_slices"]
    40000
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: Any,
        engine: str,
        device: torch.device,
        tags: TagLog | None = None,
        ignore: Iterable[torch.Tensor] = (),
        offloaded: bool = False,
        save_trace: Path | None = None,
    ) -> None:
        self._device = _indexed(device)
        self._model, self._engine = model, engine
        self._outer, self._optimizer = optimizer, inner_optimizer(optimizer)
        self._log, self._ignore, self._save_trace = tags, list(ignore), save_trace
        self._offloaded = OffloadedTensors(model, self._optimizer, self._device) if offloaded else None
        self._heard: list[Tag] = []
        self._gradients: list[Tag] = []
        self._timeline: MemoryTimeline | None = None

    @property
    def timeline(self) -> MemoryTimeline:
        """The measured timeline; `RuntimeError` before the step has ended."""
        if self._timeline is None:
            raise RuntimeError(
                "no timeline yet: read recorder.timeline after its `with` block, and only if the step inside did not"
                " fail"
            )
        return self._timeline

    def __enter__(self) -> MemoryRecorder:
        gc.collect()  # garbage in cycles is no memory of the step, and would be freed at any instant
        self._old_tags = self._trusted_tags()
        named = named_storages(self._model, self._outer, self._engine, self._device)
        resting = self._offloaded.resting() if self._offloaded else []
        self._storages = WatchedStorages(self._device, named, [*self._ignore, *resting])
        self._settle_device()
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True)
        self._profile.start()
        self._undo = [
            subscribe(self._on_event),
            *self._watch_optimizer(),
            *(self._offloaded.watch() if self._offloaded else []),
        ]
        self._growth = ResidentGrowth()
        self._start_ns = time.time_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        measured = {"resident_growth": self._growth.stop(), **self._allocator_peaks()}
        self._note_gradients()
        self._storages.stop()
        for undo in self._undo:
            undo()
        tags = [*self._old_tags, *self._heard, *self._state_tags()]
        await_gloo_threads()
        self._profile.stop()
        if error is None and self._save_trace is not None:
            save_trace(self._profile, self._save_trace)
        if error is None:
            self._timeline = self._build(tags, measured)
        del self._profile

    # ---- while the step runs

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Tag):
            self._heard.append(event)

    def _watch_optimizer(self) -> list[Callable[[], None]]:
        if self._optimizer is None:
            return []
        before = self._optimizer.register_step_pre_hook(lambda *_: self._note_gradients())
        after = self._optimizer.register_step_post_hook(lambda *_: self._storages.look())
        return [before.remove, after.remove]

    def _note_gradients(self) -> None:
        self._storages.look()
        if self._offloaded is not None:
            return  # they left when their parameters got them
        self._gradients += gradient_tags(self._model, self._optimizer, self._engine, self._device)

    # ---- before and after

    def _trusted_tags(self) -> list[Tag]:
        """Tags from before the step, but for addresses where the optimizer's state lifetimes now."""
        state = state_addresses(self._optimizer, self._device)
        return [tag for tag in (self._log.tags if self._log else ()) if tag.pointer not in state]

    def _state_tags(self) -> list[Tag]:
        now = time.time_ns()
        if self._offloaded is not None:
            return []
        return [Tag("optimizer_state", at, 0, now, "") for at in state_addresses(self._optimizer, self._device)]

    def _settle_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def _allocator_peaks(self) -> dict[str, int | None]:
        if self._device.type != "cuda":
            return {}
        torch.cuda.synchronize(self._device)
        allocated, reserved = (
            torch.cuda.max_memory_allocated(self._device),
            torch.cuda.max_memory_reserved(self._device),
        )
        return {"allocated_peak": allocated, "reserved_peak": reserved}

    def _build(self, tags: list[Tag], measured: dict[str, int | None]) -> MemoryTimeline:
        trace = read_trace(
            self._profile,
            self._device,
            buffers={tag.pointer for tag in self._heard if tag.category == "communication_buffers"},
            alive=lambda: alive_now(self._device),
            gathers_into_parameters=self._engine.startswith("deepspeed"),
        )
        timeline = build_timeline(
            self._storages.storages(),
            [*trace.events, *(self._offloaded.departures if self._offloaded else ())],
            # tags of the engine and the optimizer outrank inferred ones
            tags=[*trace.gradients, *self._gradients, *tags],
            hints=trace.hints,
            start_ns=self._start_ns,
            work_end_ns=trace.work_end_ns,
            **measured,
        )
        timeline.check()
        return timeline


def _indexed(device: torch.device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"memory is measured on cpu and cuda, got device {str(device)!r}; run on one of these, or with memory=False"
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
