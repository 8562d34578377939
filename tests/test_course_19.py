"""Notebook 19: tables and figures say what the plans say."""

from __future__ import annotations

import pytest

from fsdplab.figures import alt_text
from fsdplab.teaching import sizing
from fsdplab.teaching.core import answers, registry
from fsdplab.teaching.lessons.nb19_planning_at_scale import order as ordering
from tests.lesson_cells import run_cell
from tests.solutions import must_name_each_slip


def test_the_question_accepts_the_right_number_and_names_each_slip(course):
    must_name_each_slip(registry.find("19.late"), sizing.published())


def test_another_row_of_the_table_is_told(course):
    """The second row says 1.56."""
    verdict = answers.grade_answer("19.late", 31.2, sizing.published())
    assert "another row of the table" in str(verdict)


def test_what_is_said_of_the_worst_row_is_true_of_it():
    worst, *_, last = sizing.published_rows(sizing.published()).rows
    assert worst[0] == "mbridge-2511-qwen3-30b" and float(worst[3]) > 2 > 1 > float(last[3])
    assert "a mixture of experts in 8 bits" in registry.find("19.late").explanation


def test_the_stub_does_not_pass():
    space: dict = {}
    exec(registry.find("19.order").stub, space)
    assert "does not fit" in ordering.verdict(space["order"]())


def test_what_the_allocator_reserves_must_fit_too():
    """83 GB in use fit a card of 86 GB, and what is reserved for them does not."""
    order = dict(gpu="h100", gpus=32, strategy="full_shard", micro_batch=1, checkpointing="selective")
    assert sizing.ordered(**order).fits and "likely to reserve 99.6 GB of 85.9 GB" in ordering.verdict(order)
    assert "which is too much" in str(sizing.told(sizing.ordered(**order)))
    for gpu in sizing.PRICES:
        assert all(ordering.roomy(found) for gpus in sizing.LADDER if (found := sizing.best(gpu, gpus)))


def test_the_search_answers_for_the_lessons_job():
    """128 cards are the cheapest of the ladder, and the answers keep the rule of 4 million tokens."""
    bills = {gpus: cost for gpus, (_, cost) in sizing.ladder("h100").items()}
    assert min(bills, key=lambda gpus: bills[gpus]) == 128
    found = sizing.searched("h100", 128)
    assert [row[0] for row in found.rows] == ["fastest", "cheapest", "safest"]
    assert all(float(row[3]) <= sizing.DAYS for row in found.rows)


def test_the_budget_is_a_fifth_above_the_best():
    bills = {
        gpu: min(cost for span, cost in sizing.ladder(gpu).values() if span <= sizing.DAYS) for gpu in sizing.PRICES
    }
    assert sizing.BUDGET / min(bills.values()) == pytest.approx(1.2, abs=0.01)
    assert max(bills.values()) < sizing.BUDGET, "on both cards there is an order within the budget"


def test_the_first_try_does_not_fit_and_the_fewest_cards_do():
    first = sizing.ordered("h100", gpus=16, checkpointing="full")
    said = str(sizing.told(first))
    assert "does not fit" in said and "--reduce-dtype bf16" in said
    assert f"{sizing.fewest('h100')} cards hold the same choices" in said
    fits = sizing.ordered("h100", gpus=64, checkpointing="selective")
    assert "MFU" in str(sizing.told(fits)) and "tokens/s" in str(sizing.told(fits))


def test_only_what_divides_all_states_over_all_cards_fits():
    rows = {row[0]: row[3] for row in run_cell("19", "strategies")["_"].rows}
    assert [name for name, speed in rows.items() if speed != "does not fit"] == ["full_shard"]


def test_the_bill_grows_by_a_quarter_with_eight_times_as_many_cards():
    steps = sizing.ladder("h100")
    assert steps[512][1] / steps[64][1] == pytest.approx(1.24, abs=0.03)
    assert steps[512][0] < steps[64][0] / 6


@pytest.mark.parametrize("gpu,gpus", [("h100", 64), ("a100", 512), ("a100", 32)])
def test_the_bill_is_drawn(gpu, gpus):
    figure = sizing.bill(gpu, gpus, 100)
    assert f"{gpus} {gpu.upper()}" in figure.layout.title.text and "$" in alt_text(figure)
    assert figure.layout.xaxis.title.text == figure.layout.xaxis2.title.text == "GPUs"


def test_an_order_is_weighed_beside_the_cheapest():
    rows = sizing.weighed(
        {"gpu": "h100", "gpus": 128, "strategy": "full_shard", "checkpointing": "selective", "micro_batch": 1.0}
    ).rows
    assert rows[0][1] == "128 h100" and [row[1].split()[1] for row in rows[1:]] == list(sizing.PRICES)


def test_the_table_of_published_rows_has_the_worst_first():
    found = sizing.published()
    rows = sizing.published_rows(found).rows
    assert float(rows[0][3]) == max(float(row[3]) for row in rows) and "qwen3" in rows[0][0]
    assert float(rows[0][3]) == pytest.approx(sizing.worst_ratio(found), abs=0.005)
    figure = sizing.ratios(found)
    assert f"{sizing.error(found):.1f} %" in alt_text(figure) and "held out" in [trace.name for trace in figure.data]
    shown = [ratio for trace in figure.data for ratio in trace.x]
    assert len(shown) == len(sizing.points(found)) and min(shown) > 0.5 and max(shown) < 2.4
