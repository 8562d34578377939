"""The pure half of the engine: layouts, the schedule, the strategy table, and the examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

from fsdplab.engine.core.average import Average
from fsdplab.engine.core.buffers import UnshardedBuffer, chunks, cut_out, pack, same_order, unpack, unpack_from
from fsdplab.engine.core.layout import SHARDS_ALIGNED, Layout
from fsdplab.engine.core.policy import STRATEGIES, Strategy, strategy_named
from fsdplab.engine.core.step import Schedule
from fsdplab.planning import UnitShapes, step_traffic
from fsdplab.workloads.shapes import model

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("module", ["engine.core.pending", "engine.core.step"])
def test_docstring_examples(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"fsdplab.{module}"))
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_rows_are_cut_as_torch_chunk_cuts(rows: int, ranks: int) -> None:
    (slot,) = Layout.of([("w", (rows, 3), 4)], ranks).slots
    chunks = torch.chunk(torch.arange(rows), ranks)
    for rank in range(ranks):
        start, stop = slot.span(rank)
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(start, stop)) == expected


def test_padding_is_named() -> None:
    layout = Layout.of([("w", (5, 4), 4), ("b", (3,), 4)], 2)
    assert (layout.shard_bytes, layout.total_bytes, layout.padding_bytes) == (56, 112, 20)


def test_mixed_dtypes_are_aligned_to_the_widest() -> None:
    layout = Layout.of([("half", (3,), 2), ("full", (3,), 4)], 1)
    assert [slot.offset for slot in layout.slots] == [0, 8]
    assert layout.shard_bytes == 20
    assert [(piece.slot and piece.slot.name, piece.words) for piece in layout.pieces] == [
        ("half", 3),
        (None, 1),
        ("full", 6),
    ], "words of 2 bytes"


def test_parameters_begin_at_multiples_of_16_bytes_in_memory() -> None:
    entries = [("half", (3,), 2), ("full", (3,), 4), ("empty", (0, 3), 4), ("last", (40,), 1)]
    layout = Layout.of(entries, 1, SHARDS_ALIGNED)
    assert [slot.offset for slot in layout.slots] == [0, 16, 32, 32] and layout.shard_bytes == 80
    layout = Layout.of(entries, 2)
    assert [slot.whole_offset for slot in layout.slots] == [0, 64, 128, 128] and layout.whole_bytes == 192


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 3, (torch.bfloat16, torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("shapes", [((5, 4), (3,), (8, 2)), ((8, 12), (12, 4), (24, 2))])
def test_a_slice_is_cast_slot_by_slot_or_at_once(ranks: int, dtypes: tuple, shapes: tuple) -> None:
    rest = Layout.of([("a", shapes[0], 4), ("b", shapes[1], 4), ("c", shapes[2], 4)], ranks, SHARDS_ALIGNED)
    made = Layout.of([(slot.name, slot.shape, dtype.itemsize) for slot, dtype in zip(rest.slots, dtypes)], ranks)
    source = torch.randn(rest.shard_bytes // 4).view(torch.uint8)
    target = torch.full((made.shard_bytes,), 7, dtype=torch.uint8)
    before, after = chunks(source, rest, [torch.float32] * 3), chunks(target, made, dtypes)
    torch._foreach_copy_(after, before)
    for was, now, dtype, slot in zip(before, after, dtypes, made.slots, strict=True):
        assert now.dtype == dtype and now.nbytes == slot.chunk_bytes and torch.equal(was.to(dtype), now)
    if len(set(dtypes)) == 1:
        first_elements = [(a.offset // 4, b.offset // 2) for a, b in zip(rest.slots, made.slots)]
        alike = all(a == b for a, b in first_elements) and rest.shard_bytes == 2 * made.shard_bytes
        assert same_order(rest, made) == alike
        assert not alike or torch.equal(target.view(dtypes[0]), source.view(torch.float32).to(dtypes[0]))


def test_layouts_of_other_lengths_have_not_the_same_order() -> None:
    layout = Layout.of([("a", (4, 4), 4), ("b", (8,), 4)], 2)
    assert same_order(layout, Layout.of([("a", (4, 4), 2), ("b", (8,), 2)], 2))
    assert not same_order(layout, Layout.of([("a", (4, 4), 2)], 2))
    assert not same_order(layout, Layout.of([("a", (4, 4), 2), ("b", (8,), 2)], 2, alignment=64))


def test_what_is_cut_out_of_a_whole_comes_back() -> None:
    layout = Layout.of([("w", (5, 4), 4), ("b", (3,), 4)], 2)
    whole, again = (UnshardedBuffer(layout, torch.device("cpu")) for _ in range(2))
    whole.tensor.random_()
    for rank in range(2):
        slice_ = torch.empty(layout.shard_bytes, dtype=torch.uint8)
        cut_out(rank, whole, slice_)
        unpack_from(rank, slice_, again)
    for slot in layout.slots:
        span = slice(slot.whole_offset, slot.whole_offset + slot.nbytes)
        assert torch.equal(whole.tensor[span], again.tensor[span])


def test_gathered_memory_comes_with_its_first_use_and_goes() -> None:
    layout = Layout.of([("w", (4, 4), 4)], 2)
    whole = UnshardedBuffer(layout, torch.device("cpu"))
    assert whole._tensor is None
    (place,) = whole.places()
    storage = whole.tensor.untyped_storage()
    assert storage.nbytes() == layout.whole_bytes == place.nbytes
    whole.free()
    assert storage.nbytes() == 0
    assert whole.places()[0] is place and storage.nbytes() == layout.whole_bytes
    whole.free()
    whole.lay_out(Layout.of([("w", (8, 4), 4)], 2))
    assert whole.places()[0] is not place and whole.tensor.nbytes == 128 == storage.nbytes()


def test_a_scalar_parameter_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"'scale' is 0-dimensional.*shape \(1,\)"):
        Layout.of([("scale", (), 4)], 2)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pack_then_unpack_is_the_identity(ranks: int) -> None:
    shapes = [(5, 4), (3,), (8, 2), (1, 7)]
    layout = Layout.of([(str(i), shape, 4) for i, shape in enumerate(shapes)], ranks)
    tensors = [torch.randn(shape) for shape in shapes]
    send = torch.full((layout.total_bytes // 4,), torch.nan)
    pack(layout, tensors, send)
    whole = UnshardedBuffer(layout, torch.device("cpu"))
    unpack(send, whole)
    for slot, tensor in zip(layout.slots, tensors):
        start = slot.whole_offset
        assert torch.equal(whole.tensor[start : start + slot.nbytes].view(torch.float32).view(slot.shape), tensor)


def test_a_missing_gradient_packs_as_zeros() -> None:
    layout = Layout.of([("a", (3, 2), 4), ("b", (2,), 4)], 2)
    send = torch.full((layout.total_bytes // 4,), torch.nan)
    pack(layout, [None, torch.ones(2)], send)
    assert send.view(2, -1).tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 0, 1]]
    assert send.view(2, -1)[:, :4].signbit().all() and not send.view(2, -1)[:, 4:].signbit().any()


def test_gradients_pack_from_any_layout_and_dtype() -> None:
    layout = Layout.of([("a", (6, 4), 2), ("b", (5,), 2)], 4)
    strided, wide = torch.randn(4, 6).t(), torch.randn(5, dtype=torch.float64)
    sends = [torch.full((layout.total_bytes // 2,), torch.nan, dtype=torch.bfloat16) for _ in range(2)]
    pack(layout, [strided, wide], sends[0])
    pack(layout, [strided.contiguous().bfloat16(), wide.bfloat16()], sends[1])
    assert torch.equal(*sends)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_run_in_rank_order_in_float32(ranks: int, dtype: torch.dtype) -> None:
    parts = torch.randn(ranks, 1000).to(dtype)
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    output = torch.empty(1000, dtype=dtype)
    Average(2.0).sum_up(parts.unbind(), output)
    assert torch.equal(output, (expected / 2.0).to(dtype))


def test_schedule_gathers_nothing_ahead_once_the_order_differs() -> None:
    schedule = Schedule(depth=2)
    schedule.begin()
    for unit in ("a", "b", "c"):
        assert schedule.before_forward(unit) == []
    schedule.begin()
    assert schedule.before_forward("a") == ["b", "c"]
    assert schedule.before_forward("c") == []
    assert schedule.before_forward("b") == []


def test_schedule_without_prefetch_gathers_nothing_ahead() -> None:
    schedule = Schedule(depth=0)
    for _ in range(2):
        schedule.begin()
        assert [schedule.before_forward(unit) for unit in "ab"] == [[], []]
        for unit in "ab":
            schedule.after_forward(unit)
    assert schedule.before_backward("b") == []


def test_unknown_strategies_are_refused_with_near_matches() -> None:
    with pytest.raises(ValueError, match="unknown strategy 'fullshard'; did you mean full_shard"):
        strategy_named("fullshard")
    with pytest.raises(ValueError, match="shards a state while keeping a later one whole"):
        Strategy("odd", True, False, True, None)
    with pytest.raises(ValueError, match="no traffic formula for strategy 'hybrid'"):
        step_traffic([], "hybrid", 2)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("no_shard", 4000),
        ("zero1", 4000),
        ("zero2", 4000),
        ("shard_grad_op", 4000),
        ("full_shard", 6000),
        ("hybrid_shard", 6000),
    ],
)
def test_traffic_of_one_unit_of_a_thousand_parameters(strategy: str, expected: int) -> None:
    unit = UnitShapes("block", (("w", (1000,)),))
    assert sum(row.step_bytes for row in step_traffic([unit], strategy, 2)) == expected
    assert step_traffic([unit], strategy, 1) == []


def test_hybrid_traffic_is_full_sharding_inside_and_an_all_reduce_of_the_slice_across() -> None:
    """4 ranks as 2 x 2: 3 P (s-1)/s inside, 2 (P/s) (r-1)/r across, for P = 4,000 bytes."""
    rows = step_traffic([UnitShapes("block", (("w", (1000,)),))], "hybrid_shard", 4, replicas=2)
    assert {row.kind: row.step_bytes for row in rows} == {
        "all_gather": 4000,
        "reduce_scatter": 2000,
        "all_reduce": 2000,
    }
    with pytest.raises(ValueError, match="3 replicas of hybrid_shard on 4 ranks"):
        step_traffic([], "hybrid_shard", 4, replicas=3)
    with pytest.raises(ValueError, match="2 replicas of zero1 on 4 ranks"):
        step_traffic([], "zero1", 4, replicas=2)


def test_every_row_of_the_table_has_a_formula() -> None:
    for strategy in STRATEGIES:
        assert step_traffic([UnitShapes("root", (("w", (3,)),))], strategy, 2)


EXPERTS = [("experts", (128, 1536, 2048), 2)]


def layouts(name: str, ranks: int) -> list[Layout]:
    """Of a model's units in bf16, or of one stack of experts."""
    if "experts" in name:
        return [Layout.of(EXPERTS, ranks)]
    shape = model(name)
    root, block = (
        Layout.of([(each.name, each.shape, 2) for each in entries], ranks) for entries in (shape.root, shape.block)
    )
    return [root, *[block] * shape.layers]


def test_what_ragged_shards_would_save() -> None:
    """The table of docs/engine.md, from the layouts."""
    page = (Path(__file__).parents[1] / "docs" / "engine.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S.*?) \| ([\d,]+) \| ([\d,]+) MB \| ([\d.]+) % \| ([\d.]+) GB \|$", page, re.MULTILINE)
    assert len(rows) == 6
    for name, ranks, padding, share, copied in rows:
        found = layouts(name, int(ranks.replace(",", "")))
        pad, total = (sum(getattr(each, what) for each in found) for what in ("padding_bytes", "total_bytes"))
        assert (f"{pad / 1e6:,.0f}", f"{pad / (total - pad):.1%}") == (padding, f"{share}%")
        assert f"{3 * total / 1e9:.1f}" == copied  # two gathers are unpacked, one reduction is packed
