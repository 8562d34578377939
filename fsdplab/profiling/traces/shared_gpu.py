"""The transfers of the transport `shared_gpu`: GPU work launched inside its ranges.

NCCL moves bytes with kernels of its own, which are known by their names. Ranks that share a GPU move them with ordinary
copies and sums, on streams of their own, and only the range around their launches identifies them. Such work is no
computing; from the first to the last of it, and the waits for peers in between, it is one transfer.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict

import numpy as np

from fsdplab.profiling.traces.classify import Range, Spans, TraceEvents, Transfer, kind_of

_BYTES = re.compile(r"\((\d+) bytes\)$")


def take_shared(found: TraceEvents) -> TraceEvents:
    """`found`, with the work launched inside `shared_gpu:` ranges as transfers and no longer among the kernels."""
    if not found.shared:
        return found
    kernels, copies = found.kernels.pairs(), found.copies.pairs()
    numbers = np.concatenate(
        [np.array(found.kernel_launches, dtype=np.int64), np.array(found.copy_launches, dtype=np.int64)]
    )
    works = np.concatenate([kernels, copies])
    owner = _owners(found, numbers)
    for index, call in enumerate(found.shared):
        mine = np.flatnonzero(owner == index)
        if len(mine):
            found.transfers.append(_transfer(call, works[mine], int(numbers[mine[0]])))
    _keep_kernels(found, owner[: len(kernels)] < 0)
    return found


def _owners(found: TraceEvents, numbers: np.ndarray) -> np.ndarray:
    """For each work's correlation number the index of the range in which it was launched; -1 for work of no range."""
    calls = defaultdict(list)
    for index, call in enumerate(found.shared):
        calls[call.thread].append((call.start, call.end, index))
    launched: dict[int, int] = {}
    for thread, (correlations, spans) in found.launches.items():
        if not calls[thread]:
            continue
        starts, ends, indices = (np.array(column) for column in zip(*sorted(calls[thread])))
        at = spans.pairs()[:, 0]
        nearest = np.searchsorted(starts, at, side="right") - 1
        inside = (nearest >= 0) & (at < ends[nearest])
        launched |= {correlations[each]: int(indices[nearest[each]]) for each in np.flatnonzero(inside)}
    return np.array([launched.get(int(number), -1) for number in numbers], dtype=np.int64)


def _transfer(call: Range, works: np.ndarray, launch: int) -> Transfer:
    match = _BYTES.search(call.label)
    details = {"bytes": int(match.group(1))} if match else {}
    return Transfer(
        kind_of(call.label),
        int(works[:, 0].min()),
        int(works[:, 1].max()),
        ("shared_gpu", *call.thread),
        launch,
        details,
    )


def _keep_kernels(found: TraceEvents, kept: np.ndarray) -> None:
    pairs, numbers = found.kernels.pairs()[kept], np.array(found.kernel_launches, dtype=np.int64)[kept]
    found.kernels = Spans(array("q", pairs[:, 0].tolist()), array("q", pairs[:, 1].tolist()))
    found.kernel_launches = array("q", numbers.tolist())
