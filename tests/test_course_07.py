"""Notebook 07: on the steady card the settings alone decide what is exposed.

The card's clock is emulated, so its milliseconds are the same on a busy machine: every number below is the formula's,
with room for a host that wakes late.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fsdplab.common.words import OFF_LINK
from fsdplab.figures import alt_text, rank_timeline
from fsdplab.figures.profile_data import breakdown_of, duration
from fsdplab.sessions import RunSpec, run
from fsdplab.sessions.steady_card import GIGAFLOPS, steady
from fsdplab.teaching import overlapping
from fsdplab.teaching.core import answers, checking, registry
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.lessons.nb07_overlap import on_ranks
from tests.lesson_cells import run_cell
from tests.solutions import function_of, in_all_cases, must_name_each_slip

EXPOSED, AHEAD, HIDE = (registry.find(f"07.{name}", Exercise) for name in ("exposed", "ahead", "hide"))


def test_the_question_accepts_the_right_number_and_names_each_slip(course):
    assert answers.grade_answer("07.least", 300).passed and answers.grade_answer("07.least", "0.3 s").passed
    must_name_each_slip(registry.find("07.least"))


def test_the_expected_values_are_right():
    """Counted by hand; the times of exposed are whole numbers times a factor."""
    assert [seen["ms"] for seen in in_all_cases(EXPOSED)] == [1.375 * whole for whole in (4, 13, 10, 13, 8, 14, 3, 0)]
    next_units = ["blocks.1", "blocks.1, blocks.2", "blocks.2", "blocks.2, blocks.1", "blocks.0", "", ""]
    assert [seen["units"] for seen in in_all_cases(AHEAD)] == next_units


def test_who_counts_whole_ms_is_told_of_the_fractions(workspace):
    source = (
        "def exposed(communication, compute):\n"
        "    held = lambda spans: {t for a, b in spans for t in range(int(a), int(b))}\n"
        "    return len(held(communication) - held(compute))\n"
    )
    feedback = checking.feedback_on(EXPOSED, workspace.save(EXPOSED.id, source), workspace)
    assert feedback is not None and "fractions of a ms" in feedback.cause


# --- the steady card


@pytest.mark.parametrize(
    "settings,says",
    [
        (["block"], "expected a dict"),
        ({"overlap": 1}, "unknown setting 'overlap'"),
        ({"prefetch": -1}, "expected one of 0, 1, 2"),
        ({"prefetch": True}, "expected one of 0, 1, 2"),
        ({"batch_size": 8}, "holds 2 sequences"),
        ({"units": "block", "prefetch": 1}, "link_queues, batch_size missing"),
    ],
)
def test_settings_that_are_none_are_refused(settings, says):
    assert says in on_ranks.complaint(settings)
    with pytest.raises(ValueError, match=says):
        overlapping.on_the_card(settings)


def test_one_step_covers_up_the_others_in_a_fixed_order():
    stub = {"units": "linear", "prefetch": 0, "link_queues": 1, "batch_size": 1}
    causes = [
        HIDE.module().remedy(settings)
        for settings in (
            stub,
            {**stub, "prefetch": 1},
            {**stub, "prefetch": 1, "units": "block"},
            {**stub, "units": "model"},
        )
    ]
    assert [cause.split(":")[0].split(",")[0] for cause in causes] == [
        "Each all-gather is issued when its unit is needed",
        "Small units",
        "A block's messages take longer than its compute",
        "One unit",
    ]


def test_the_feedback_says_by_how_much_and_where():
    got = {
        "milliseconds over the target": 720,
        "_settings": {"units": "block", "prefetch": 0, "link_queues": 2, "batch_size": 2},
        "_split": "1020 of 1760 ms exposed: all-gathers in forward 480",
    }
    said = HIDE.says("milliseconds over the target", got, HIDE.expected)
    assert said.startswith("720 ms too many (1020 of 1760 ms exposed") and said.endswith("unshard ahead")
    assert f"at most {on_ranks.TARGET_MS} ms" in HIDE.statement


@pytest.mark.timeout(300)
def test_the_card_exposes_what_arithmetic_says(course):
    payload = {"units": "block", "prefetch": 0, "link_queues": 2, "batch_size": 2}
    gather = on_ranks.GATHER_MS + on_ranks.LATENCY_MS
    for one in overlapping._on_ranks("on_this_rank", **payload):
        assert one["exposed"]["all-gathers in forward"] == pytest.approx(on_ranks.BLOCKS * gather, rel=0.05)
        assert one["exposed"]["all-gathers in backward"] == pytest.approx(on_ranks.BLOCKS * gather, rel=0.05)
        moved = on_ranks.BLOCKS * (4 * on_ranks.GATHER_MS + 3 * on_ranks.LATENCY_MS)
        assert one["communication_ms"] == pytest.approx(moved, rel=1e-3)


# --- what the notebook says about its runs


@pytest.fixture(scope="module")
def small():
    """A profiled run behind a link, and one rank alone, of the smallest model."""
    common = dict(model="gpt-tiny", batch_size=2, sequence_length=32, steps=2, warmup=1, memory=False, profile=1)
    return {"linked": run(RunSpec(**common, link="20MB/s", prefetch=0)), "alone": run(RunSpec(**common, world_size=1))}


@pytest.mark.timeout(300)
def test_one_number_is_exposed_on_the_link(small):
    """Title, strip, sentence and record say the same; copies and waiting are apart from it."""
    linked = small["linked"]
    split, rows = breakdown_of(linked), linked.table("timeline")
    told = duration(split.on_link_ns)
    title = alt_text(rank_timeline(linked))
    assert f"{told} of" in title and "exposed on the link" in title and "in copying or waiting" in title
    assert linked.summary.comm.on_link_s == pytest.approx(split.on_link_ns / 1e9)
    red = [row for row in rows if row["lane"] == "exposed" and row["rank"] == split.rank]
    moving = [row["end_ns"] - row["start_ns"] for row in red if not row["name"].endswith(OFF_LINK)]
    besides = [row["end_ns"] - row["start_ns"] for row in red if row["name"].endswith(OFF_LINK)]
    assert sum(moving) / split.steps == pytest.approx(split.on_link_ns, rel=0.1, abs=5e5)
    assert sum(besides) / split.steps == pytest.approx(split.exposed_ns - split.on_link_ns, rel=0.1, abs=5e5)
    names = [bar.name for bar in rank_timeline(linked).data]
    assert names[-2:] == ["exposed on the link", "copying or waiting"]
    causes = run_cell("07", "late-heatmap", card_late=steady(replace(JOB, prefetch=0)))["_"]["exposed, ms a step"]
    assert causes.index[0] == "nothing_to_hide_behind" and causes.iloc[0] / causes.sum() == pytest.approx(
        0.37, abs=0.01
    )
    assert causes.sum() == pytest.approx(322, abs=1)


def test_on_the_steady_card_all_that_is_exposed_is_on_the_link():
    late = steady(replace(JOB, prefetch=0))
    comm, split = late.summary.comm, breakdown_of(late)
    assert 1e9 * comm.on_link_s == 1e9 * comm.exposed_s == split.on_link_ns == split.exposed_ns
    assert "322 ms of 637 ms" in alt_text(rank_timeline(late)) and "copying" not in alt_text(rank_timeline(late))


@pytest.mark.timeout(300)
def test_the_references_exposed_time_is_the_records(small):
    linked = small["linked"]
    comm = linked.summary.comm
    names = run_cell("07", "exposed-by-hand", card_late=linked, comm=comm, solution=lambda _: function_of(EXPOSED))
    exposed_s = {row["rank"]: row["exposed_ns"] / 1e9 for row in linked.table("breakdown")}
    by_hand = names["exposed"](names["messages"], names["computing"])
    assert by_hand == pytest.approx(1e3 * exposed_s[0], abs=0.2)


@pytest.mark.timeout(300)
def test_inflation_and_the_raw_steps_come_from_the_records(small):
    alone, linked = small["alone"], small["linked"]
    table = run_cell("07", "inflation-table", alone=alone, early=linked, gloo=linked, shared=linked)["_"]
    assert table.rows[0][1] == "1.00" and table.rows[0][2] == "nothing sent" and float(table.rows[1][1]) > 0
    assert table.rows[1][2].endswith("%")
    assert table.rows[1][3] == f"{1e3 * linked.summary.step_time_s.median:.0f}"
    assert overlapping.least_exposed_ms(300, 500) == 200 and overlapping.least_exposed_ms(500, 300) == 0


# --- the steady card and the learner's rule

JOB = RunSpec(model="gpt-20m", batch_size=2, sequence_length=64, link="400MB/s", device="cpu")


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_the_reference_rule_is_the_engines(prefetch):
    job = replace(JOB, prefetch=prefetch)
    assert overlapping.with_rule(function_of(AHEAD), job).tables == steady(job).tables


def test_another_rule_leads_to_another_timeline():
    none = overlapping.with_rule(lambda order, position, depth: [], JOB)
    assert none.summary.comm == steady(replace(JOB, prefetch=0)).summary.comm
    told = [
        alt_text(rank_timeline(overlapping.with_rule(function_of(AHEAD), replace(JOB, prefetch=n)))) for n in (0, 1)
    ]
    assert "322 ms" in told[0] and "54.8 ms of 369 ms" in told[1]


def test_the_curves_have_the_numbers_of_the_runs():
    curves = overlapping.curves_of(JOB, tokens=128, links=(100, 400, 6400))
    late, early, least = curves.values()
    assert [(at, round(shown), round(moved)) for at, shown, moved in late][1] == (400, 322, 322)
    for (_, slow, _), (_, quick, _), (_, floor, _) in zip(late, early, least, strict=True):
        assert slow >= quick >= floor
    assert least[0][1] > 900 and least[-1][1] == 0
    figure = overlapping.exposed_curves(curves, 400, 128)
    assert "54.8 ms (one unit ahead)" in figure.layout.title.text.replace("<br>", " ")
    assert "at least 31.9 ms under any schedule" in alt_text(figure) and "400" in figure.layout.xaxis.ticktext


def test_runs_without_a_link_are_not_for_the_steady_card():
    with pytest.raises(ValueError, match="expected a link"):
        steady(replace(JOB, link=None))


def test_the_lessons_name_the_steady_card_and_its_link():
    notebooks = Path(__file__).resolve().parents[1] / "notebooks"
    said = f"The steady card computes {GIGAFLOPS:g} GFLOP/s in fp32, behind the same link of 400 MB/s."
    for name in ("07_overlap", "11_strategy_shoot_out"):
        assert said in (notebooks / f"{name}.ipynb").read_text(encoding="utf-8")
