"""The accounting of memory on hand-written traces: every byte, every instant, and what an incomplete log does to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdplab.common.names import CATEGORIES
from fsdplab.common.thinning import MAX_POINTS, downsample
from fsdplab.engine.events import Tag
from fsdplab.profiling.memory.timeline import (
    LONG_AGO,
    NEVER,
    TOLERANCE_NS,
    AccountingError,
    AllocatorEvent,
    blocks_of,
    build_timeline,
    united,
)

pytestmark = pytest.mark.quick

MS = 1_000_000  # nanoseconds


def there(pointer: int, nbytes: int, category: str = "", gone_ns: int = NEVER) -> AllocatorEvent:
    """A storage that was there when profiling began."""
    return AllocatorEvent(LONG_AGO, pointer, nbytes, category, gone_ns=gone_ns)


def alloc(ms: float, pointer: int, nbytes: int, category: str = "", unit: str = "") -> AllocatorEvent:
    return AllocatorEvent(int(ms * MS), pointer, nbytes, category, unit)


def free(ms: float, pointer: int, nbytes: int) -> AllocatorEvent:
    return AllocatorEvent(int(ms * MS), pointer, -nbytes)


def tag(category: str, pointer: int, ms: float, nbytes: int = 1, unit: str = "") -> Tag:
    return Tag(category, pointer, nbytes, int(ms * MS), unit)


def held(row: dict[str, int]) -> dict[str, int]:
    return {name: row[name] for name in CATEGORIES if row[name]}


def series(timeline) -> list[tuple[float, dict[str, int]]]:
    timeline.check()
    return [(row["time_ns"] / MS, held(row)) for row in timeline.points]


def test_a_step_by_hand():
    baseline = [there(1000, 100, "sharded_parameters"), there(2000, 200, "optimizer_state"), there(3000, 7)]
    events = [
        alloc(1, 5000, 40, "unsharded_parameters", "block.0"),
        alloc(2, 6000, 30),
        free(3, 5000, 40),
        alloc(4, 7000, 100),
        free(5, 6000, 30),
        alloc(8, 8000, 9),  # after the last backward: a temporary of the optimizer
        free(9, 8000, 9),
    ]
    timeline = build_timeline([*baseline, *events], tags=[tag("unsharded_gradients", 7000, 6)], work_end_ns=6 * MS)
    rest = {"sharded_parameters": 100, "optimizer_state": 200, "other": 7}
    assert series(timeline) == [
        (0, rest),
        (1, rest | {"unsharded_parameters": 40}),
        (2, rest | {"unsharded_parameters": 40, "activations": 30}),
        (3, rest | {"activations": 30}),
        (4, rest | {"activations": 30, "unsharded_gradients": 100}),
        (5, rest | {"unsharded_gradients": 100}),
        (8, rest | {"unsharded_gradients": 100, "other": 16}),
        (9, rest | {"unsharded_gradients": 100}),
    ]
    assert (timeline.baseline_total, timeline.peak_total, timeline.peak_time_ns) == (307, 437, 4 * MS)
    assert held(timeline.peak) == rest | {"activations": 30, "unsharded_gradients": 100}
    assert timeline.growth == 130 and timeline.other_share == 7 / 437
    assert timeline.unit_names_gathered_at_peak == []
    assert (timeline.unknown_frees, timeline.unseen_frees, timeline.found_late) == (0, 0, 0)


def test_an_empty_step_is_its_baseline():
    timeline = build_timeline([there(8, 5, "other")])
    assert series(timeline) == [(0, {"other": 5})] and timeline.peak_total == 5
    assert build_timeline([]).other_share == 0.0


def test_units_gathered_at_the_peak_are_named_in_order():
    events = [
        alloc(1, 100, 10, "unsharded_parameters", "root"),
        alloc(2, 200, 10, "unsharded_parameters", "block.0"),
        free(3, 200, 10),
        alloc(4, 200, 10, "unsharded_parameters", "block.1"),
        alloc(5, 300, 10, "unsharded_parameters", "block.1"),
    ]
    assert build_timeline(events).unit_names_gathered_at_peak == ["root", "block.1"]


def test_an_address_used_again_is_another_block():
    events = [alloc(1, 100, 50), free(2, 100, 50), alloc(3, 100, 50), free(4, 100, 50), alloc(5, 100, 50)]
    timeline = build_timeline(events, tags=[tag("unsharded_gradients", 100, 3.5)])
    assert [row for _, row in series(timeline)] == [
        {},
        {"activations": 50},
        {},
        {"unsharded_gradients": 50},
        {},
        {"activations": 50},
    ]


def test_a_tag_right_before_its_allocation_event_counts():
    """The clock of the tag and that of the allocator are read one after the other,
    on a machine that may pause between.
    """
    early = 1 - TOLERANCE_NS / MS / 2
    timeline = build_timeline([alloc(1, 100, 50)], tags=[tag("sharded_gradients", 100, early)])
    assert held(timeline.peak) == {"sharded_gradients": 50} and timeline.found_late == 0


def test_a_tag_prefers_the_block_alive_to_the_one_soon_after():
    soon = 2 + TOLERANCE_NS / MS / 4
    events = [alloc(1, 100, 50), free(2, 100, 50), alloc(soon, 100, 60)]
    timeline = build_timeline(events, tags=[tag("sharded_gradients", 100, 1.999)])
    assert [row for _, row in series(timeline)] == [{}, {"sharded_gradients": 50}, {}, {"activations": 60}]


def test_the_last_tag_wins_over_earlier_ones_ranges_and_hints():
    events = [alloc(1, 100, 50, "communication_buffers"), alloc(1, 200, 5, "communication_buffers"), alloc(1, 300, 2)]
    tags = [tag("unsharded_gradients", 100, 2), tag("sharded_gradients", 100, 3, unit="a")]
    hints = [tag("unsharded_parameters", at, 2) for at in (100, 200, 300)] + [tag("communication_buffers", 300, 3)]
    timeline = build_timeline(events, tags=tags, hints=hints)
    assert held(timeline.peak) == {"sharded_gradients": 50, "communication_buffers": 5, "unsharded_parameters": 2}


def test_tags_from_before_name_baseline_storages_of_their_size_only():
    baseline = [there(100, 50), there(200, 60), there(300, 70)]
    old = [tag("sharded_parameters", 100, -5, nbytes=50), tag("unsharded_parameters", 200, -5, nbytes=61)]
    timeline = build_timeline(
        [*baseline, alloc(1, 400, 9)], tags=[*old, tag("unsharded_parameters", 400, -5, nbytes=9)]
    )
    assert held(timeline.peak) == {"sharded_parameters": 50, "other": 130, "activations": 9}
    assert timeline.found_late == 0


def test_tags_in_the_step_name_baseline_storages():
    timeline = build_timeline([there(100, 50), alloc(1, 200, 1)], tags=[tag("communication_buffers", 100, 2, nbytes=8)])
    assert held(timeline.peak) == {"communication_buffers": 50, "activations": 1}


def test_a_tag_inside_a_baseline_storage_names_it():
    timeline = build_timeline([there(100, 50)], tags=[tag("communication_buffers", 120, 2, nbytes=8)])
    assert held(timeline.peak) == {"communication_buffers": 50} and timeline.found_late == 0


def test_tagged_memory_that_nothing_else_knows_was_there_all_along():
    """A shared arena, or a bucket made in C++: counted once, from the beginning, with the most that was seen of it."""
    tags = [tag("communication_buffers", 900, 2, nbytes=64), tag("communication_buffers", 900, 3, nbytes=80)]
    timeline = build_timeline([there(100, 50, "other"), alloc(1, 200, 1)], tags=tags)
    assert timeline.baseline_total == 130 and timeline.found_late == 1
    assert held(timeline.peak) == {"other": 50, "communication_buffers": 80, "activations": 1}


def test_a_baseline_storage_may_be_freed():
    timeline = build_timeline(
        [there(100, 50, "unsharded_gradients"), alloc(1, 200, 20), free(2, 100, 50), free(3, 200, 20)]
    )
    assert [sum(row.values()) for _, row in series(timeline)] == [50, 70, 20, 0]


def test_a_baseline_storage_may_be_seen_to_go():
    baseline = [there(100, 50, "unsharded_gradients", gone_ns=2 * MS), there(300, 5, "other", gone_ns=4 * MS)]
    timeline = build_timeline([*baseline, alloc(1, 200, 20), free(3, 300, 5)])
    assert [(ms, sum(row.values())) for ms, row in series(timeline)] == [(0, 55), (1, 75), (2, 25), (3, 20), (4, 20)]
    assert timeline.unknown_frees == 0


def test_a_double_free_changes_nothing_and_is_counted():
    timeline = build_timeline([alloc(1, 100, 50), free(2, 100, 50), free(3, 100, 50)])
    assert timeline.totals == [0, 50, 0, 0] and timeline.unknown_frees == 1


def test_an_unknown_free_changes_nothing_and_is_counted():
    timeline = build_timeline([there(8, 1), free(1, 100, 50), alloc(2, 100, 10)])
    assert timeline.totals == [1, 1, 11] and timeline.unknown_frees == 1


@pytest.mark.parametrize("pointer,nbytes", [(100, 50), (90, 20), (140, 20), (110, 10), (50, 500)])
def test_a_block_over_a_live_one_proves_that_the_old_one_is_gone(pointer, nbytes):
    timeline = build_timeline([alloc(1, 100, 50), alloc(2, pointer, nbytes), free(3, pointer, nbytes)])
    assert timeline.totals == [0, 50, nbytes, 0] and timeline.unseen_frees == 1
    timeline.check()


def test_one_block_may_replace_several():
    blocks = blocks_of([there(100, 50), there(200, 50), there(300, 50), alloc(1, 120, 100)])
    assert blocks.totals == [150, 150] and blocks.unseen_frees == 2


def test_neighbours_do_not_overlap():
    blocks = blocks_of([there(100, 50), alloc(1, 150, 10), alloc(2, 90, 10)])
    assert blocks.totals == [50, 60, 70] and blocks.unseen_frees == 0


def test_shared_memory_is_counted_once():
    joined = united([there(200, 5), there(120, 10, "activations"), there(100, 50), there(140, 20), there(100, 30)])
    assert joined == [there(100, 60, "activations"), there(200, 5)]


def test_events_come_in_any_order_and_equal_times_keep_theirs():
    events = [free(2, 100, 50), alloc(2, 100, 70), alloc(1, 100, 50)]
    timeline = build_timeline(events)
    # one row at the time of the peak
    assert (timeline.totals, timeline.peak_total, timeline.unseen_frees) == ([0, 50, 70], 70, 0)


def test_the_peak_is_found_between_the_points_that_are_kept():
    """A spike of one instant among 20,000 must not be thinned away."""
    events = []
    for i in range(10_000):
        nbytes = 10**9 if i == 7_123 else 1000 + i % 17
        events += [alloc(i + 0.25, 4096, nbytes), free(i + 0.5, 4096, nbytes)]
    timeline = build_timeline([there(8, 24, "other"), *events])
    timeline.check()
    assert timeline.peak_total == 10**9 + 24 and timeline.peak_time_ns == 7_123.25 * MS
    assert {"time_ns": timeline.peak_time_ns, **timeline.peak} in timeline.points
    assert len(timeline.points) <= MAX_POINTS and len(timeline.totals) == len(timeline.points)
    times = [row["time_ns"] for row in timeline.points]
    assert times == sorted(times) and (times[0], times[-1]) == (0, 9_999.5 * MS)


def test_thinning_keeps_troughs_and_crests_of_every_stretch():
    totals = [100 + 50 * (i % 2) for i in range(5000)]
    kept = downsample(totals)
    assert len(kept) <= MAX_POINTS and {totals[i] for i in kept[5:]} == {100, 150}
    assert downsample(totals[:MAX_POINTS]) == list(range(MAX_POINTS))


def test_check_rejects_a_timeline_that_does_not_add_up():
    good = build_timeline([there(8, 24, "other"), alloc(1, 100, 50)])
    good.check()
    more = [row | {"activations": row["activations"] + 1} for row in good.points]
    with pytest.raises(AccountingError, match="sum to 25, the allocator's running total is 24"):
        replace(good, points=more).check()
    with pytest.raises(AccountingError, match="does not add up"):
        replace(
            good, points=[row | {"other": -1, "activations": row["activations"] + 25} for row in good.points]
        ).check()
    with pytest.raises(AccountingError, match="not the highest point"):
        replace(good, peak={name: good.points[0][name] for name in CATEGORIES}, peak_total=24, peak_time_ns=0).check()
    with pytest.raises(AccountingError, match="does not add up"):
        replace(good, peak_total=75).check()
