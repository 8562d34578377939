"""Notebook 16: what is composed trains as the twin does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdplab.figures import alt_text
from fsdplab.teaching import composing
from fsdplab.teaching.core import registry
from fsdplab.teaching.lessons.nb16_composition import lesson, on_ranks
from tests.composed import mesh_of


def averaged() -> torch.Tensor:
    """The reference's average of this rank's gradient."""
    exercise = registry.find("16.average_expert").module()
    ((_, gradient),) = exercise.cases(torch.distributed.get_rank(), 4)
    return exercise.observe(exercise.average_expert, gradient)


def test_worked_examples(ranks) -> None:
    assert registry.find("16.groups_of").module().groups_of(13, [2, 3, 4]) == [[1, 13], [13, 17, 21], [12, 13, 14, 15]]
    even, odd, *same = ranks(4, averaged)
    assert even.flatten().tolist() == [(101 + 2 * index) / 4 for index in range(6)]  # of 1 and 100
    torch.testing.assert_close(torch.stack(same), torch.stack([even, odd]))


# ---- what the lesson shows


@pytest.mark.timeout(600)
def test_composed_models_are_shown_beside_their_twins(course) -> None:
    run = composing.tensor()
    assert run.at_rest().rows[0] == ("attention.query.weight", "dp: rows of each share; tp: rows", "[16, 64]")
    assert run.rows_at_rest("attention.query.weight") == 16 and run.rows_at_rest("attention_norm.weight") == 32
    assert run.at_rest().rows[2] == ("attention_norm.weight", "dp: rows", "[32]")
    assert run.seen["drift"] < on_ranks.NEAR and len(run.beside_twin().rows) == 3
    # [2, 16, 64] float32 are 8,192 bytes: four sums a block, two for embeddings (positions half), logits out, their
    # input's gradient
    assert run.seen["bytes"]["tp"] == 2 * 4 * 8192 + 8192 + 4096 + 16384 + 8192
    assert run.kilobytes("dp") > run.kilobytes("tp")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("divide", "too_large"), [(4, 1.0), (2, 2.0)])
def test_expert_gradients_need_their_divide_factor(course, divide: int, too_large: float) -> None:
    run = composing.experts(divide)
    ratios = {name: float(ratio) for name, ratio in run.gradients().rows}
    assert ratios.pop("feed_forward.experts.up") == pytest.approx(too_large, rel=1e-4)
    assert ratios.pop("feed_forward.experts.down") == pytest.approx(too_large, rel=1e-4)
    assert all(ratio == pytest.approx(1.0, rel=1e-4) for ratio in ratios.values())
    assert run.at_rest().rows[1][1] == "efsdp: rows of each share; ep: rows" and run.seen["bytes"]["ep"] > 0


@pytest.mark.timeout(600)
def test_stages_are_counted_and_equal_the_twin(course) -> None:
    dropped, kept = composing.pipeline().rows
    assert kept == ("kept", "3", "3", "0.0e+00")
    assert int(dropped[1]) > 3 and dropped[2:] == ("3", "0.0e+00")


def test_the_bubble_is_computed() -> None:
    said = alt_text(composing.bubble(4, 12))
    assert "4 stages, 12 micro-batches: each stage is idle for 20.0% of the time" in said


@pytest.mark.parametrize("order", lesson.ORDERS)
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 4, 12])
def test_the_drawn_schedule_has_the_formulas_bubble(stages, micro_batches, order) -> None:
    turns = lesson.schedule(stages, micro_batches, order)
    assert (
        max(turn.end for turn in turns) == 3 * (micro_batches + stages - 1) and len(turns) == 2 * stages * micro_batches
    )
    ended = {(turn.stage, turn.phase, turn.micro_batch): turn.end for turn in turns}
    for turn in turns:
        before = turn.stage - 1 if turn.phase == "forward" else turn.stage + 1
        assert turn.start >= ended.get((before, turn.phase, turn.micro_batch), 0)
        assert turn.phase == "forward" or turn.start >= ended[turn.stage, "forward", turn.micro_batch]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (3, 6), (4, 2)])
def test_the_orders_differ_in_what_stage_0_keeps(stages, micro_batches) -> None:
    """As 16 says: all micro-batches under GPipe, at most one a stage under 1F1B."""
    gpipe, in_turn = (lesson.kept(lesson.schedule(stages, micro_batches, order)) for order in ("GPipe", "1F1B"))
    assert max(gpipe) == micro_batches and max(in_turn) == min(stages, micro_batches) and len(gpipe) == len(in_turn)
    assert f"most {micro_batches} micro-batches" in alt_text(composing.pipeline_diagram(stages, micro_batches))


@pytest.mark.parametrize("order", lesson.ORDERS)
def test_each_stage_is_drawn_busy_or_idle_at_every_moment(order) -> None:
    cells = list(lesson.pipeline_cells(order, 3, 6))
    for stage in range(3):
        lane = sorted((cell.moment, cell.lasts) for cell in cells if cell.row == f"{order}: stage {stage}")
        assert [moment for moment, lasts in lane for moment in range(moment, moment + lasts)] == list(range(24))
        idle = [cell for cell in cells if cell.row == f"{order}: stage {stage}" and cell.kind.startswith("idle")]
        assert len(idle) == 24 * (3 - 1) / (6 + 3 - 1), "the bubble of the formula"


def test_tokens_travel_to_their_experts_and_back() -> None:
    routing = lesson.Routing(lesson.CHOICES, ranks=2, experts=4)
    held = {(cell.row, cell.moment): cell.label for cell in lesson.token_cells(routing)}
    assert held["rank 1: expert e2", 1] == "t3, rank 0's t0 t1" and held["rank 1: expert e2", 2] == "e2 of t0 t1 t3"
    assert held["rank 0: answers", 3] == "t0: e0 e2, t1: e1 e2" and held["rank 1: its tokens", 4] == "t2 t3"
    assert routing.travelling == 3, "t0 and t1 to e2, t2 to e0"
    one_sided = lesson.Routing([(0, 1)] * 4, ranks=2, experts=4)
    assert not any("expert e2" in cell.row for cell in lesson.token_cells(one_sided))
    assert "experts hold 4, 4, 0, 0 tokens" in alt_text(composing.token_diagram([(0, 1)] * 4))


def test_maps_say_what_ranks_hold() -> None:
    first, second = composing.mesh_map(), composing.expert_map()
    assert "rank 1: rows 32 to 47 of query" in alt_text(first) and "rank 2: rows 16 to 31 of query" in alt_text(first)
    assert "rank 3: shard 2 of 2 of experts 2 to 3" in alt_text(second) and "rank 3" in str(second.data[0].text)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (Replicate(), "whole"),
        (Shard(0), "rows"),
        (Shard(1), "columns"),
        (_StridedShard(0, split_factor=2), "rows of each share"),
        (Shard(2), "dimension 2"),
    ],
)
def test_placements_in_words(placement, words: str) -> None:
    assert on_ranks._words(placement) == words


def sent_over_axes() -> dict[str, int]:
    """One all-to-all of which three of four rows leave, and nothing of a group that is not named."""
    mesh = mesh_of(a=1, b=2)
    group, rank = mesh["b"].get_group(), mesh["b"].get_local_rank()
    rows = torch.zeros(4, 8)
    other = torch.distributed.new_group([0, 1])
    with on_ranks.counted("dp", {group.group_name: "b"}) as sent:
        splits = [1, 3] if rank == 0 else [3, 1]
        torch.distributed.all_to_all_single(rows.new_empty(4, 8), rows, splits, splits, group=group)
        torch.distributed.all_to_all_single(rows.new_empty(4, 8), rows, group=other)
        nn.Linear(2, 2)(torch.ones(2, 2))
    return dict(sent)


def test_bytes_are_counted_by_group(ranks) -> None:
    assert ranks(2, sent_over_axes) == [{"b": 3 * 8 * 4}, {"b": 3 * 8 * 4}]
