"""Exposed time is on the link, copying or waiting for a peer: every nanosecond in one of them, on collectives written
by hand.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fsdplab.profiling import core_waits
from fsdplab.profiling.core_waits import waits_between
from fsdplab.profiling.intervals import EMPTY, size, union
from fsdplab.profiling.traces.account import account
from fsdplab.profiling.traces.collective import Collective, Piece
from fsdplab.profiling.traces.events import Window
from fsdplab.profiling.traces.overlap import StepAnalysis, TraceAnalysis
from fsdplab.profiling.traces.skew import with_peers
from fsdplab.profiling.traces.step_rows import parts_of

pytestmark = pytest.mark.quick
US = 1_000


def pieces(*spans: tuple[int, int, str]) -> list[Piece]:
    return [Piece(start * US, end * US, role) for start, end, role in spans]


class Sets:
    """A trace without units, idle causes or a device; `busy`: when its host ran operators, in us, `waits`: when it had
    no core.
    """

    def __init__(self, busy: list[tuple[int, int]] = (), waits: list[tuple[int, int]] = ()) -> None:
        self.core_waits = union(np.array(waits, dtype=np.int64).reshape(-1, 2) * US)
        self.segments, self.on_gpu, self.host_busy = (
            self,
            False,
            union(np.array(busy, dtype=np.int64).reshape(-1, 2) * US),
        )
        self.lifecycle = self.idle = EMPTY
        self.changes = self.idle_causes = EMPTY[:, 0]

    def phases_at(self, instants: list[int]) -> list[str]:
        return ["forward"] * len(instants)


def parts(collectives: list[Collective], until: int, busy: list[tuple[int, int]] = ()) -> list:
    """Each collective's (on the link, copying, waiting) in a step of `until` us without computing, in us."""
    found = account(Window(1, 0, until * US), EMPTY, collectives, Sets(busy))
    assert found.parts.sum() == sum(found.cells.length[found.exposed])
    return [tuple(ns // US for ns in [*parts_of(sums).values()][:3]) for sums in found.parts]


def test_copies_are_copying_and_the_transport_is_the_link() -> None:
    each = Collective("all_gather", "a", 0, pieces((0, 300, "copy-in"), (300, 900, ""), (900, 1000, "copy-out")))
    assert parts([each], 1000, [(0, 300), (900, 1000)]) == [(600, 400, 0)]


def test_a_host_that_idles_in_a_copy_waits_for_a_peer_unless_bytes_move() -> None:
    copies = Collective("all_gather", "a", 0, pieces((0, 1000, "copy-out")))
    assert parts([copies], 1000, [(0, 200), (250, 400)]) == [(0, 400, 600)], "50 us are the next operator's"
    other = Collective("all_gather", "b", 0, pieces((500, 2000, "")))
    assert parts([copies, other], 1000, [(0, 200), (250, 400)]) == [(500, 400, 100), (0, 0, 0)]


def test_blocked_before_a_free_link_takes_it_is_waiting_and_behind_another_is_the_link() -> None:
    each = Collective("all_gather", "a", 0, pieces((0, 950, "blocked"), (600, 900, "")), emulated=True)
    assert parts([each], 950) == [(350, 0, 600)], "it sleeps 50 us longer than the link takes"
    before = Collective("reduce_scatter", "b", 0, pieces((100, 600, "")), emulated=True)
    assert parts([each, before], 950) == [(850, 0, 100), (0, 0, 0)]


def test_the_hosts_own_transport_is_copying() -> None:
    each = Collective("all_gather", "a", 0, pieces((0, 1000, "")), by_host=True)
    assert parts([each], 1000, [(700, 1000)]) == [(0, 300, 700)]


def test_without_a_core_nothing_is_copied_and_a_transport_goes_on() -> None:
    """Of 1000 us the host has no core for 100 while it computes, 150 while it copies, 100 while bytes travel, and 100
    while it idles.
    """
    each = Collective("all_gather", "a", 0, pieces((300, 500, "copy-in"), (500, 800, ""), (800, 900, "copy-out")))
    waits = [(100, 200), (350, 450), (600, 700), (850, 1000)]
    found = account(Window(1, 0, 1000 * US), union([(0, 300 * US)]), [each], Sets([(0, 500), (800, 900)], waits))
    assert parts_of(found.parts[0]) == {
        "on_link_ns": 300 * US, "copying_ns": 150 * US, "waiting_ns": 0, "no_core_ns": 150 * US,
    }  # fmt: skip
    idle = {name: ns for name, ns in found.sums.items() if name.startswith("idle ") and ns}
    assert found.sums["compute_only_ns"] == 300 * US and idle == {"idle no_core_ns": 100 * US}
    assert found.core_wait_ns == 450 * US


def test_waits_are_between_two_notes_and_at_most_as_long() -> None:
    notes = [(0, 5_000), (100_000, 5_000), (300_000, 65_000), (310_000, 66_000), (400_000, 900_000)]
    assert waits_between(notes).tolist() == [[240_000, 300_000], [310_000, 400_000]], "1 us is a usual switch"
    assert waits_between(notes[:1]).tolist() == waits_between([]).tolist() == []


def test_a_system_that_does_not_tell_leaves_no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_waits, "Path", lambda path: Path("nowhere"))
    log = core_waits.CoreWaitLog()
    log.note()
    assert log.close().tolist() == []


def test_a_thread_that_competes_for_a_core_has_waited() -> None:
    """Two threads of one process on one core: the log's own thread waits while the other computes."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if not Path("/proc/self/schedstat").exists() or not cores:
        pytest.skip("the system does not tell how long a thread waits for a core")
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(0, {min(cores)})
        os.sched_setaffinity(rival.pid, {min(cores)})
        log, until = core_waits.CoreWaitLog(), time.monotonic() + 30
        log.note()
        while not (found := waits_between(log._notes)).size and time.monotonic() < until:
            sum(range(100_000))
            log.note()
        assert size(found) > 0 and size(log.close()) <= time.time_ns()
    finally:
        os.sched_setaffinity(0, cores)
        rival.kill()
        rival.wait()


def analysis(rank: int, start: int, device: str = "cuda", issue: int = 0) -> TraceAnalysis:
    """A kernel of a collective from `start` to 100, all of it exposed."""
    sums = {"on_link_ns": 100 - start, "copying_ns": 0, "waiting_ns": 0, "no_core_ns": 0}
    where = {"rank": rank, "step": 1, "unit": "", "phase": "forward", "kind": "all_reduce"}
    collective = {
        **where, "issue_ns": issue, "start_ns": start, "end_ns": 100, "logical_bytes": 8, "exposed_ns": 100 - start,
        "cause": "nothing_to_hide_behind", "emulated": False, "on_link": [[start, 100]],
    }  # fmt: skip
    collective |= {"on_link_ns": 100 - start, "packing_ns": 0, "unpacking_ns": 0, "waiting_ns": 0}
    breakdown = {"rank": rank, "step": 1, "exposed_ns": 100 - start, **sums}
    exposed = {**where, "communication_ns": 100, "exposed_ns": 100 - start, "cause": collective["cause"], **sums}
    return TraceAnalysis(None, rank, 2, device, (StepAnalysis(1, breakdown, (), (exposed,), (collective,)),))


@pytest.mark.parametrize("late, cause", [(30, "nothing_to_hide_behind"), (80, "waiting_for_peer")])
def test_until_its_last_rank_has_come_a_kernel_waits_for_the_peer(late: int, cause: str) -> None:
    early, last = with_peers([analysis(0, 10), analysis(1, late, issue=5)])
    (step,) = early.steps
    for row in (step.breakdown, *step.exposed, *step.collectives):
        assert (row["on_link_ns"], row["waiting_ns"]) == (100 - late, late - 10)
    for row in (step.breakdown, *step.exposed):
        assert row["on_link_ns"] + row["copying_ns"] + row["waiting_ns"] == row["exposed_ns"]
    assert step.exposed[0]["cause"] == cause, "a GPU's host runs ahead: the kernel's start tells, not its issue"
    assert last.steps[0].breakdown["waiting_ns"] == 0
