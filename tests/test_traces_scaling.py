"""The work of an analysis grows with the number of collectives, not with its square; and the sweep that attributes
exposed time gives what taking collective by collective gave.

Calls are counted, not seconds: the count is the same on a busy machine.
"""

from __future__ import annotations

import cProfile
import pstats

import numpy as np
import pytest

from fsdplab.profiling import analyse_trace
from fsdplab.profiling.intervals import EMPTY, intersect, subtract, union, within
from fsdplab.profiling.traces.account import account
from fsdplab.profiling.traces.collective import Collective, Piece
from fsdplab.profiling.traces.events import Window
from tests.gpu_traces import GpuRank
from tests.test_exposed_parts import Sets

pytestmark = pytest.mark.quick


def gathers(many):
    """Gloo's gathers in a step, 30 us each and 100 us apart: an operator beside the first half of each."""
    rank = GpuRank().step(1, 0, 100 * many)
    for start in range(0, 100 * many, 100):
        rank.range("FSDP::pre_forward (a)", start, start + 40)
        rank.operator("c10d::_allgather_base_", start + 1, start + 4)
        rank.range("gloo:all_gather", start + 5, start + 35, thread=9)
        rank.operator("aten::mm", start + 5, start + 20)
    return rank


def kernels(many):
    """The same on a GPU."""
    rank = GpuRank().step(1, 0, 10 * many)
    for start in range(many):
        rank.kernel(start, 10_000 + 50 * start, 10_020 + 50 * start)
        rank.nccl("all_gather", start, 10_010 + 50 * start, 10_040 + 50 * start)
    return rank


def calls(path):
    profile = cProfile.Profile()
    profile.enable()
    analyse_trace(path)
    profile.disable()
    return pstats.Stats(profile).total_calls


@pytest.mark.parametrize("trace", [gathers, kernels])
def test_four_times_the_collectives_are_four_times_the_calls(tmp_path, trace):
    few, many = (calls(trace(count).write(tmp_path / f"{count}.json")) for count in (200, 800))
    assert many < 5 * few


@pytest.mark.parametrize("trace", [gathers, kernels])
def test_a_collective_takes_few_calls(tmp_path, trace):
    """Most of them read its four events; looked at one by one, collectives took more than three hundred."""
    few, many = (calls(trace(count).write(tmp_path / f"{count}.json")) for count in (200, 800))
    assert (many - few) / 600 < 270


@pytest.mark.parametrize("trace", [gathers, kernels])
def test_no_collective_looks_at_the_whole_trace_again(tmp_path, trace, monkeypatch):
    """Of sets of instants: every operation on them joins them first."""
    looked_at, join = [0], np.concatenate

    def counted(arrays, *arguments, **options):
        joined = join(arrays, *arguments, **options)
        looked_at[0] += joined.size
        return joined

    monkeypatch.setattr(np, "concatenate", counted)
    sizes = []
    for count in (200, 800):
        looked_at[0] = 0
        analyse_trace(trace(count).write(tmp_path / f"{count}.json"))
        sizes.append(looked_at[0])
    assert sizes[1] < 5 * sizes[0]


def reference(exposed, collectives):
    """Collective by collective: the host's pieces first, then the one that ends first."""
    shares, left = [EMPTY] * len(collectives), exposed
    by_end = sorted(range(len(collectives)), key=lambda index: (collectives[index].end, collectives[index].issue))
    for of_host in (True, False):
        for index in by_end:
            wanted = [(each.start, each.end) for each in collectives[index].pieces if bool(each.role) is of_host]
            shares[index] = union(shares[index], intersect(left, wanted))
            left = subtract(left, wanted)
    return shares


def test_attribution_is_that_of_taking_one_after_the_other():
    chance = np.random.default_rng(3)
    for _ in range(150):
        collectives = []
        for _ in range(int(chance.integers(1, 12))):
            start = int(chance.integers(0, 80))
            pieces = [Piece(start, start + int(chance.integers(0, 30)))]
            for role in ("copy-in", "copy-out", "blocked")[: int(chance.integers(0, 4))]:
                at = int(chance.integers(0, 100))
                pieces.append(Piece(at, at + int(chance.integers(0, 20)), role))
            host_alone = len(pieces) > 1 and chance.random() < 0.3  # shared memory: no transport of its own
            collectives.append(Collective("all_gather", "a", start - 5, pieces[1:] if host_alone else pieces))
        spans = union([(piece.start, piece.end) for each in collectives for piece in each.pieces])
        computing = union([(at, at + 9) for at in chance.integers(0, 100, size=4).tolist()])
        expected = reference(subtract(spans, computing), collectives)
        found = account(Window(1, -10, 200), computing, collectives, Sets())
        runs, whose = found.cells.runs(np.where(found.exposed, found.owner, -1))
        assert [runs[whose == index].tolist() for index in range(len(collectives))] == [
            each.tolist() for each in expected
        ]


def test_within_is_the_part_inside():
    chance = np.random.default_rng(4)
    for _ in range(100):
        whole = union(np.sort(chance.integers(0, 60, size=(6, 2)), axis=1))
        start, end = sorted(chance.integers(-5, 70, size=2).tolist())
        assert within(whole, start, end).tolist() == intersect(whole, [(start, end)]).tolist()
