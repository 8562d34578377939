"""Reports what the engine does: typed events, and the only names it writes into profiler traces.

The engine knows nothing of records, figures or notebooks. It announces what happens (a collective, a buffer, a unit's
change of state) to whoever subscribed, and pays nothing when nobody did. The range names are those of PyTorch's FSDP2,
so one analyser reads the traces of both engines.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Collective:
    """One row of the ledger: a collective that one rank took part in.

    `logical_bytes` is the whole payload P, padding included; `wire_bytes` is what this rank sends: P(n-1)/n for
    all_gather and reduce_scatter, 2P(n-1)/n for all_reduce. Times are `time.time_ns()`. `waited_ns` is how long
    whoever needs the result stood still for it: the host, or on CUDA the computing stream; None where that is not
    known. Behind an emulated link all three are the link's.
    `issue_ns` is when this rank issued it.
    """

    unit: str
    phase: str
    kind: str
    logical_bytes: int
    wire_bytes: int
    padding_bytes: int
    dtype: str
    start_ns: int
    end_ns: int
    emulated: bool = False
    waited_ns: int | None = None
    issue_ns: int | None = None


@dataclass(frozen=True)
class Tag:
    """The storage that is alive at `pointer` at `time_ns` belongs to `category` for its whole life."""

    category: str
    pointer: int
    nbytes: int
    time_ns: int
    unit: str


@dataclass(frozen=True)
class Transition:
    """A unit moved from one state of its life to the next."""

    unit: str
    before: str
    after: str
    phase: str
    time_ns: int


Event = Collective | Tag | Transition
_subscribers: list[Callable[[Event], None]] = []


def subscribe(callback: Callable[[Event], None]) -> Callable[[], None]:
    """Send every event to `callback` (called on the thread that runs the model) until what is returned is called."""
    _subscribers.append(callback)
    return lambda: _subscribers.remove(callback)


def listening() -> bool:
    """Whether anybody subscribed; measuring for the ledger is skipped where nobody did."""
    return bool(_subscribers)


def emit(event: Event) -> None:
    """Hand one event to every subscriber."""
    # A copy of the list: a callback may end its own subscription.
    for callback in tuple(_subscribers):
        callback(event)


_deferred: list[Callable[[], None]] = []


def defer(report: Callable[[], None]) -> None:
    """Queue what emits an event whose times are known only once the device is done (CUDA); `flush` calls it."""
    _deferred.append(report)


def flush() -> None:
    """Emit what was deferred; call it after the device was synchronised, at the end of a step."""
    while _deferred:
        _deferred.pop(0)()


def tag(
    category: str,
    tensor: torch.Tensor,  # any shape: its storage is what counts
    unit: str,
) -> None:
    """Announce the category of the storage under `tensor`; storages that are empty, meta or fake are not."""
    if not _subscribers:
        return
    storage = tensor.untyped_storage()
    if storage.nbytes() and storage.device.type != "meta":
        emit(Tag(category, storage.data_ptr(), storage.nbytes(), time.time_ns(), unit))


def span(label: str, unit: str = "") -> torch.profiler.record_function:
    """Open a profiler range under FSDP2's name: `span("all_gather", "blocks.3")` is `FSDP::all_gather (blocks.3)`."""
    # Ranges cost no call of Python's while nobody watches their edges.
    kind = _WatchedSpan if _edge_watchers else torch.profiler.record_function
    return kind(f"FSDP::{label} ({unit})" if unit else f"FSDP::{label}")


_edge_watchers: list[Callable[[], None]] = []


def watch_edges(callback: Callable[[], None]) -> Callable[[], None]:
    """Call `callback` at the begin and the end of every range, on its thread, until the returned function is called."""
    _edge_watchers.append(callback)
    return lambda: _edge_watchers.remove(callback)


class _WatchedSpan(torch.profiler.record_function):
    def __enter__(self) -> _WatchedSpan:
        for callback in _edge_watchers:
            callback()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for callback in _edge_watchers:
            callback()


counters: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def counts_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark `function`, which replaces a collective of torch's and looks at no buffer, so that none is made for it."""
    counters.add(function)
    return function
