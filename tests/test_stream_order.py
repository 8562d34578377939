"""The check of streams' order itself: each kind of race is found, and what is ordered is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.stream_order import HOST, Order, touched

MAIN, SIDE = 0, 7
A, B = torch.zeros(64), torch.zeros(64)


def order() -> Order:
    made = Order()
    for tensor in (A, B):
        made.allocated(tensor.data_ptr(), MAIN, tensor.data_ptr() + tensor.nbytes)
    return made


def handed_over(made: Order, source: int, target: int) -> None:
    """`target` waits for an event that `source` records."""
    made.syncs.record_state(1, source)
    made.syncs.stream_wait_for_event(target, 1)


RACES: dict[str, Callable[[Order], None]] = {
    "its allocation": lambda made: made.access(SIDE, [], [A], "copy"),
    "write, read": lambda made: (made.access(MAIN, [], [A], "fill"), made.access(SIDE, [A], [], "gather")),
    "read, write": lambda made: (
        handed_over(made, MAIN, SIDE), made.access(SIDE, [A], [], "gather"), made.access(MAIN, [], [A], "fill")
    ),
    "a part of it": lambda made: (
        handed_over(made, MAIN, SIDE), made.access(SIDE, [], [A[32:]], "copy"), made.access(MAIN, [A], [], "sum")
    ),
    "its end": lambda made: (
        handed_over(made, MAIN, SIDE), made.access(SIDE, [A], [], "gather"), made.freed(A.data_ptr())
    ),
    "memory given out again": lambda made: (
        handed_over(made, MAIN, SIDE), made.access(MAIN, [A], [], "sum"), made.freed(A.data_ptr()),
        made.allocated(A.data_ptr(), MAIN, A.data_ptr() + A.nbytes), made.access(SIDE, [], [A], "gather"),
    ),
    "the host reads too early": lambda made: (
        handed_over(made, MAIN, SIDE), made.access(SIDE, [], [A], "copy"), made.access(HOST, [A], [], "adam")
    ),
}  # fmt: skip


@pytest.mark.parametrize("race", RACES.values(), ids=RACES)
def test_a_race_is_found(race: Callable[[Order], None]) -> None:
    made = order()
    race(made)
    assert len(made.conflicts) == 1 and "is not ordered after" in made.conflicts[0]


ORDERED: dict[str, Callable[[Order], None]] = {
    "two readers": lambda made: (
        handed_over(made, MAIN, SIDE), made.access(MAIN, [A], [], "sum"), made.access(SIDE, [A], [], "gather")
    ),
    "other memory": lambda made: (
        handed_over(made, MAIN, SIDE), made.access(MAIN, [], [A], "fill"), made.access(SIDE, [B], [], "gather")
    ),
    "there and back": lambda made: (
        made.access(MAIN, [], [A], "fill"), handed_over(made, MAIN, SIDE), made.access(SIDE, [], [A], "gather"),
        handed_over(made, SIDE, MAIN), made.access(MAIN, [A], [], "sum"), made.freed(A.data_ptr()),
    ),
    "the host has waited": lambda made: (
        made.access(MAIN, [], [A], "copy"), made.syncs.record_state(1, MAIN),
        made.syncs.all_streams_wait_for_event(1), made.access(HOST, [A], [], "adam"),
    ),
    "a device after the host": lambda made: (
        made.syncs.all_streams_wait_for_stream(MAIN), made.access(HOST, [], [A], "adam"),
        made.access(SIDE, [A], [], "copy"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("sequence", ORDERED.values(), ids=ORDERED)
def test_what_is_ordered_is_no_race(sequence: Callable[[Order], None]) -> None:
    made = order()
    sequence(made)
    assert made.conflicts == []


def test_what_an_operator_touches() -> None:
    aten, c10d = torch.ops.aten, torch.ops.c10d
    same = lambda found, expected: (
        [[id(each) for each in some] for some in found]
        == [  # noqa: E731
            [id(each) for each in some] for some in expected
        ]
    )
    result = torch.ones(64)
    assert same(touched(aten.add.Tensor, (A, B), {}, result), ([A, B], [result]))
    assert same(touched(aten.add_.Tensor, (A, B), {}, A), ([B], [A]))
    assert same(touched(aten._foreach_copy_.default, ([A], [B]), {}, None), ([B], [A]))
    assert same(touched(aten.view.default, (A, [8, 8]), {}, A.view(8, 8)), ([], []))
    assert same(touched(aten.empty_like.default, (A,), {}, result), ([], []))
    assert same(touched(c10d._allgather_base_.default, (A, B, None), {}, (A, None)), ([B], [A]))
    assert same(touched(c10d.allreduce_.default, ([A], None), {}, ([A], None)), ([], [A]))
