"""Notebook 10: figures and sentences come from plans and the record."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from fsdplab.figures import alt_text, overlap_roofline
from fsdplab.planning.overlap import overlap_of, overlap_point
from fsdplab.sessions import run
from fsdplab.teaching import hiding
from fsdplab.teaching.core import registry
from tests.lesson_cells import run_cell
from tests.lesson_records import TUNNEL
from tests.solutions import function_of, in_all_cases, must_name_each_slip

CROSSOVER = registry.find("10.crossover")


def test_the_expected_tokens_are_right():
    """The parameters cancel: bytes a number, times FLOP/s over bytes a second, times (n-1)/n, over 2 or 4."""
    rate = 733e12 / 380e9
    tokens = [
        6 / 4 * rate * 7 / 8,
        8 / 4 * rate * 3 / 4,
        rate * 15 / 16,
        2 * rate * 7 / 8,
        5 / 4 * rate * 7 / 8,
        6 / 4 * 100e12 / 26e9 / 2,
        2 / 4 * 4000 * 63 / 64,
    ]
    assert in_all_cases(CROSSOVER) == pytest.approx(tokens)


def test_the_question_accepts_the_right_number_and_names_each_slip(course):
    must_name_each_slip(registry.find("10.read"), hiding.machines())


# --- plans


def test_the_formula_and_the_planner_are_of_one_size():
    tokens = SimpleNamespace(score=lambda number, origin: None)
    rows = run_cell("10", "score", solution=lambda _: function_of(CROSSOVER), tokens=tokens)["_"].rows
    assert [row[0] for row in rows] == ["8 x H100", "8 x A100", "8 x RTX 4090"]
    for row in rows:
        by_formula, planned = (float(cell.replace(",", "")) for cell in row[3:])
        assert 0.6 < planned / by_formula <= 1.0, "the planner counts more compute, so it needs fewer tokens"
    assert rows[0][4] == f"{overlap_of(hiding.target()).crossover_tokens:,.0f}"


@pytest.mark.parametrize("rate,tokens,hides", [(50, 256, False), (400, 8192, True)])
def test_a_block_is_drawn_with_what_is_exposed(rate, tokens, hides):
    figure = hiding.block(rate, tokens)
    assert ("everything hides" in figure.layout.title.text) == hides
    drawn = {trace.name: [value for value in trace.x if value] for trace in figure.data}
    assert bool(drawn["messages, exposed"]) != hides and len(drawn["compute"]) == 2
    assert f"{rate} GB/s" in alt_text(figure)


def test_what_the_notebook_says_in_words_is_so():
    flops, bandwidth = hiding.reached(hiding.target())
    assert round(flops / 1e12) == 733 and bandwidth == pytest.approx(380e9, rel=0.01)
    assert overlap_of(hiding.target()).crossover_tokens < 4096, "one sequence of 4,096 tokens hides everything"
    assert "everything hides" in hiding.block(50, 16384).layout.title.text
    assert "everything hides" not in hiding.block(50, 8192).layout.title.text


def test_more_tokens_or_a_faster_link_never_expose_more():
    shown = {
        (rate, tokens): sum(
            sum(trace.x) for trace in hiding.block(rate, tokens).data if trace.name == "messages, exposed"
        )
        for rate in (25, 100)
        for tokens in (256, 1024)
    }
    assert shown[25, 256] > shown[100, 256] and shown[25, 256] >= shown[25, 1024]


# --- the wind tunnel


@pytest.mark.timeout(300)
def test_sentences_come_from_the_record(capsys):
    record = run(replace(TUNNEL, model="gpt-tiny"))
    share = SimpleNamespace(score=lambda number, origin: None)
    run_cell("10", "run-tunnel", share=share, show=lambda figure: None)["seen"](record)
    reached = overlap_point(record).measured
    told = capsys.readouterr().out
    assert f"reached {reached:.1%}" in told and "asked for 12.7 %" in told
    assert hiding.asked(record) == pytest.approx(12.7, abs=0.05), "what is predicted is the same on every machine"
    figure = overlap_roofline(hiding.target(), measured=record)
    assert any("measured" in (trace.name or "") for trace in figure.data)
    rows = [row for row in record.table("timeline") if row["lane"] == "compute" and row["rank"] == 0]
    at = min(row["start_ns"] for row in rows if row["phase"] == "backward")
    assert not [row for row in rows if row["phase"] == "forward" and row["start_ns"] > at], "one forward a step"


def test_the_machines_of_the_figure_hide_at_different_batches():
    tokens = [overlap_of(spec).crossover_tokens for spec in hiding.machines().values()]
    assert len({round(each) for each in tokens}) == 4 and max(tokens) > 3 * min(tokens)
