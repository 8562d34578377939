"""The judge of overlap on a GPU (tests/hiding.py): spans written by hand, and a small model on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.hiding import (
    RANKS,
    SIZES,
    Blocks,
    Span,
    group_of_one,
    host_syncs,
    judge,
    link_for,
    measure,
    synchronisations,
)

CPU = torch.device("cpu")


def test_only_synchronisations_are_counted_and_paths_are_cut() -> None:
    heard = [
        ("called a synchronizing CUDA operation (Triggered internally)", "/home/me/x/engine/unit.py", 7),
        ("deprecated", "/a/b.py", 1),
    ]
    assert synchronisations(heard) == ["engine/unit.py:7"]


def test_cpu_has_no_host_syncs_to_count() -> None:
    assert host_syncs(lambda: None, CPU) is None


def compute(unit: str, phase: str, start: int, end: int) -> Span:
    return Span(unit, "compute", phase, start, end)


FORWARD = [compute("a", "forward", 0, 10), compute("b", "forward", 10, 20)]


def test_a_gather_under_the_forward_before_it_is_hidden() -> None:
    judged = judge("ab", [*FORWARD, Span("b", "all_gather", "forward", 2, 6)])
    assert (judged.hideable_ns, judged.hidden_ns, judged.share, judged.elsewhere) == (4, 4, 1.0, ())


def test_a_gather_in_a_gap_is_exposed_and_told_to_be_elsewhere() -> None:
    spans = [
        compute("a", "forward", 0, 10),
        compute("b", "forward", 14, 24),
        Span("b", "all_gather", "forward", 10, 14),
    ]
    judged = judge("ab", spans)
    assert (judged.hideable_ns, judged.hidden_ns, judged.share) == (4, 0, 0.0)
    assert judged.elsewhere == ("all_gather of b not under forward of a",)


def test_of_a_gather_longer_than_the_forward_only_that_much_can_be_hidden() -> None:
    spans = [compute("a", "forward", 0, 10), compute("b", "forward", 30, 40), Span("b", "all_gather", "forward", 0, 30)]
    assert (judge("ab", spans).hideable_ns, judge("ab", spans).share) == (10, 1.0)


def test_the_first_gather_has_nothing_to_hide_behind() -> None:
    judged = judge("ab", [compute("a", "forward", 5, 10), Span("a", "all_gather", "forward", 0, 5)])
    assert judged.hideable_ns == 0 and judged.share is None


BACKWARD = [compute("c", "backward", 0, 20), compute("b", "backward", 20, 40), compute("a", "backward", 40, 60)]


def test_a_backward_hides_the_reduction_before_and_the_gather_after() -> None:
    spans = [*BACKWARD, Span("c", "reduce_scatter", "backward", 20, 30), Span("a", "all_gather", "backward", 30, 35)]
    judged = judge("abc", spans)
    slot = next(slot for slot in judged.slots if (slot.unit, slot.phase) == ("b", "backward"))
    assert (slot.compute_ns, slot.communication_ns, slot.hideable_ns, slot.hidden_ns) == (20, 15, 15, 15)
    assert judged.share == 1.0 and judged.elsewhere == ()


def test_a_reduction_after_everything_is_elsewhere() -> None:
    judged = judge("abc", [*BACKWARD, Span("c", "reduce_scatter", "backward", 60, 70)])
    assert judged.share == 0.0 and judged.elsewhere == ("reduce_scatter of c not under backward of b",)


def test_the_last_reduction_has_nothing_to_hide_behind() -> None:
    assert judge("abc", [*BACKWARD, Span("a", "reduce_scatter", "backward", 60, 70)]).share is None


def test_a_link_is_as_slow_as_it_was_asked_to_be() -> None:
    size = SIZES["cpu"]
    assert size.unit_bytes == 2 * sum(parameter.numel() for parameter in Blocks(size).blocks[0].parameters())
    _, nanoseconds = link_for(size, forward_ns=2e6, times=0.5).collective("all_gather", size.unit_bytes, RANKS)
    assert nanoseconds == pytest.approx(1e6, rel=1e-4)


def test_on_the_cpu_there_is_something_to_hide() -> None:
    with group_of_one(CPU):
        free = measure(CPU, SIZES["cpu"], None)
        linked = measure(CPU, SIZES["cpu"], link_for(SIZES["cpu"], free.median_ns("compute", "forward"), 1.5))
    assert all(step.hideable_ns > 0 for step in linked.judged())
