"""The collectives of a trace: each one's transport, the host's copies for it, who issued it, and when.

A collective has several events: a range on the thread that issued it, a `c10d::` operator, a range on one of gloo's
threads or a kernel, and a copy-out later. On CPU ranks they are matched by their order (`host_collectives`), on a GPU
by the number that a kernel shares with its launch (`device_collectives`). The ranges around the issue name the unit.
Engines without ranges (DDP, DeepSpeed) leave the unit empty.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from fsdplab.profiling.intervals import Intervals, union
from fsdplab.profiling.traces.collective import MARKED, Collective
from fsdplab.profiling.traces.device_collectives import launched_collectives, with_link
from fsdplab.profiling.traces.event_kinds import Kind
from fsdplab.profiling.traces.events import Events
from fsdplab.profiling.traces.groups import Groups
from fsdplab.profiling.traces.host_collectives import Drafts

_ISSUE = attrgetter("issue")


def find_collectives(
    events: Events, ledger: Sequence[dict[str, Any]] = (), life: Sequence[dict[str, Any]] = ()
) -> list[Collective]:
    """All collectives in order of issue; the rank's rows of an emulated link's `ledger` replace the transports."""
    groups = Groups(events.distributed)
    if events.on_gpu:
        moved = [*launched_collectives(events, groups), *_through_host(events, groups)]
        collectives = with_link(sorted(moved, key=_ISSUE), ledger, events)
    else:
        drafts = Drafts(events, groups)
        if ledger:
            drafts.take_shared_memory("copy-in")  # the link's transfer is the transport
            drafts.take_link(ledger, life)
        else:
            drafts.take_shared_memory()
            drafts.take_gloo()
        # a draft that no transport and no copy completed moved nothing
        collectives = [draft for draft in drafts.collectives if draft.pieces]
    for collective in collectives:
        if not collective.members:  # only the host's copies or a link carried it
            group = groups.of_unit(collective.kind) if collective.unit else groups.only
            collective.group = collective.group or group.name
            collective.group_size = collective.group_size or group.size
            collective.members = group.members
    return sorted(collectives, key=_ISSUE)


def _through_host(events: Events, groups: Groups) -> list[Collective]:
    """What gloo moved between GPUs through host memory; the ranges around it launch its copies, and copy nothing."""
    drafts = Drafts(events, groups)
    drafts.take_gloo()
    moved = []
    for draft in drafts.collectives:
        # the others were carried by kernels, which are found by their launches
        if draft.transport:
            draft.pieces = [draft.transport]
            moved.append(draft)
    return moved


def communicating(events: Events) -> dict[int, Intervals]:
    """When each thread of the host copied for a collective, or was inside a c10d call, where it enqueues or waits."""
    by_thread: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for labelled in events.ranges:
        if labelled.label in MARKED:
            by_thread[labelled.thread].append((labelled.start, labelled.end))
    for issue in events.issues:
        by_thread[issue.thread].append((issue.start, issue.end))
    for transfer in events.transfers:
        if transfer.carrier == Kind.SHM:
            by_thread[transfer.thread].append((transfer.start, transfer.end))
    return {thread: union(spans) for thread, spans in by_thread.items()}
