"""Notebook 21: what halves of a matrix lose, three ways counted, owners and exchanges, and what the words say."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from fsdplab.engine.core.owners import buckets_of, newton_schulz_flops
from fsdplab.figures import alt_text
from fsdplab.planning.muon import OwnersStep
from fsdplab.sessions import RunSpec
from fsdplab.sessions.prediction import predict
from fsdplab.teaching import matrices
from fsdplab.teaching.core import registry
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.workloads.shapes import model
from tests.solutions import function_of

OWNERS = registry.find("21.owners", Exercise)
CASES = [given[1:] for given in OWNERS.module().cases(0, 1)]


# --- singular values


def test_newton_schulz_of_a_known_matrix():
    """Rows that are orthogonal already keep their directions; the iteration leaves values of 0.68 to 1.14."""
    matrix = torch.diag(torch.tensor([4.0, 2.0, 1.0])) @ torch.eye(3, 5)
    update = matrices.orthogonalised(matrix).float()
    assert torch.all((update.diagonal() > 0.65) & (update.diagonal() < 1.2))
    assert float((update - torch.diag_embed(update.diagonal()) @ torch.eye(3, 5)).abs().max()) < 0.02


def test_halves_that_share_a_direction_make_it_longer_by_the_root_of_two():
    row = torch.tensor([[1.0, 2.0, 2.0, 4.0]])
    whole, halves = torch.cat([row, row]), matrices.values(matrices.pieces(torch.cat([row, row]), 2))
    assert halves[0] / matrices.values(matrices.orthogonalised(whole))[0] == pytest.approx(math.sqrt(2), rel=0.05)


def test_the_values_that_the_notebook_tells():
    whole = matrices.values(matrices.orthogonalised(matrices.gradient("down")))
    assert whole[0] == pytest.approx(1.13, abs=0.02) and sum(each > 0.6 for each in whole) == len(whole) - 1
    assert matrices.largest(2) == pytest.approx(1.5, abs=0.05)
    assert [matrices.largest(ranks) for ranks in (1, 2, 4, 8)] == sorted(matrices.largest(n) for n in (1, 2, 4, 8))
    figure = matrices.values_figure(2)
    assert "halves" in figure.layout.title.text and len(figure.data) == 3 and len(alt_text(figure)) > 150
    assert len(matrices.values_figure(1, "query").data) == 2


# --- three ways


def test_the_three_ways_are_those_of_the_formulas():
    elements, flops = 12 * 12 * 384**2, 12 * (4 * 5 * 6 * 384**3 + 2 * 5 * 2 * 384**2 * 9 * 384)
    for ranks in (2, 3, 4):
        everywhere, owners, whole = matrices.ways("gpt-20m", ranks)
        assert everywhere.sent == 2 * elements * (ranks - 1) / ranks and everywhere.flops == flops
        assert owners.sent == pytest.approx(2 * 2 * elements * (ranks - 1) / ranks**2, rel=0.01)
        assert owners.flops == whole.flops == flops / ranks, "72 matrices divide well"
        share = {2: 6, 3: 4, 4: 4}[ranks] * 384**2  # of 12 d² in a block: 4 + 2, 4, 4 are the fullest
        assert whole.padding == 3 * 4 * 12 * (ranks - 1) * (share - 12 * 384**2 / ranks)


def test_the_ways_are_drawn_and_the_least_is_named():
    few, many = matrices.ways_figure("gpt-20m", 2, "150MB/s"), matrices.ways_figure("gpt-20m", 8, "150MB/s")
    assert "whole matrices a rank" in few.layout.title.text and "an owner a matrix" in many.layout.title.text
    assert "gather everywhere 1.70 s of computing and 142 ms on the link" in alt_text(few)


def test_what_is_said_of_llama():
    shape = model("llama-3.1-8b")
    found = [OwnersStep.of(shape, ranks, whole=False).flops / 1e12 for ranks in (64, 1)]
    assert [round(each) for each in found] == [11, 666]
    assert 6 * shape.parameters * 16_384 / 1e12 == pytest.approx(790, abs=1)


# --- owners, and the exchange


@pytest.mark.parametrize("shapes,ranks", CASES, ids=str)
def test_the_reference_balances_as_the_engine_does_and_near_the_best(shapes, ranks):
    costs = [newton_schulz_flops(shape) for shape in shapes]

    def busiest(owners) -> float:
        return max(sum(cost for cost, of in zip(costs, owners) if of == rank) for rank in range(ranks))

    found = function_of(OWNERS)(shapes, ranks)
    whole = [type("Of", (), {"holder": None, "numel": 1})() for _ in shapes]
    (bucket,) = buckets_of(whole, costs, ranks, 10**9)
    engines = dict(zip(bucket.numbers, bucket.owners))
    assert busiest(found) == busiest([engines[number] for number in range(len(shapes))])
    if ranks ** len(shapes) < 70_000:
        best = min(busiest(owners) for owners in product(range(ranks), repeat=len(shapes)))
        assert busiest(found) <= 4 / 3 * best


def test_a_matrix_is_whole_once_and_every_rank_ends_with_its_rows():
    cells = list(matrices.exchange_cells(3))
    assert sum(cell.kind == "a whole matrix" for cell in cells) == 3
    for rank in range(3):
        rows = {cell.row for cell in cells if cell.moment == 3 and cell.row.startswith(f"rank {rank}")}
        assert len(rows) == 3 and f"rank {rank}: matrix {'ABC'[rank]}" in {c.row for c in cells if c.moment == 1}
    assert len(alt_text(matrices.exchange_diagram())) > 100


# --- steps


def test_the_optimizers_share_of_a_step():
    job = RunSpec(model="gpt-20m", world_size=2, batch_size=1, sequence_length=128, link="150MB/s")
    steps = {
        (optimizer, batch): matrices.steady(replace(job, optimizer=optimizer, batch_size=batch))
        for batch in (1, 16) for optimizer in ("adamw", "muon")
    }  # fmt: skip
    own = {key: matrices.optimizer_s(step) for key, step in steps.items()}
    assert own["muon", 1] == pytest.approx(own["muon", 16]) and own["muon", 1] > 20 * own["adamw", 1], (
        "it does not depend on the tokens"
    )
    share = {key: own[key] / steps[key].summary.step_time_s.median for key in own}
    assert share["muon", 1] > 0.5 and share["muon", 16] == pytest.approx(1 / 6, abs=0.03)
    figure = matrices.steps_figure(list(steps.values()))
    assert "muon, 2,048 tokens a rank" in figure.layout.title.text and "of which" in alt_text(figure)


@pytest.mark.timeout(600)
def test_pytorchs_own_sends_many_messages_and_owners_two(course):
    found = matrices.counted()
    assert found["owners"] == {"all-to-all": 2} and sum(found["torch.optim.Muon"].values()) > 12 * 5
    table = matrices.collectives(found)
    assert table.rows[1][1] == "2" and "all-gathers" in table.rows[0][2]


@pytest.mark.parametrize(
    ("model", "adamw", "muon", "more"), [("gpt-tiny", 564e3, 368e3, 98e3), ("gpt-20m", 86.4e6, 44e6, 21.2e6)]
)
def test_what_the_notebook_says_of_state_and_messages(model: str, adamw: float, muon: float, more: float) -> None:
    job = RunSpec(model=model, world_size=2, batch_size=1, sequence_length=32)
    of_adamw, of_muon = (predict(replace(job, optimizer=each)) for each in ("adamw", "muon"))
    states = [each.by_category["optimizer_state"] for each in (of_adamw, of_muon)]
    assert states == [pytest.approx(adamw, rel=0.005), pytest.approx(muon, rel=0.005)]
    assert of_muon.bytes_per_step - of_adamw.bytes_per_step == pytest.approx(more, rel=0.005)
