"""Notebook 07: right answers pass and known wrong ones are diagnosed; on the steady card the settings alone decide what
is exposed.

The card's clock is emulated, so its milliseconds are the same on a busy machine: every number below is the formula's,
with room for a host that wakes late. Ranks with an emulated card sleep while it computes, so four launches try the
solutions side by side.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdplab.figures import alt_text, svg
from fsdplab.sessions import RunSpec, call_on_ranks, run
from fsdplab.teaching import overlapping
from fsdplab.teaching.core import answers, registry
from fsdplab.teaching.core.exercise import Choice, Exercise, Question, Trial
from fsdplab.teaching.lessons.nb07_overlap import exercises, on_ranks
from fsdplab.teaching.lessons.nb07_overlap.figures import communication_bars
from tests.solutions import ended_of, must_name_each_slip, solutions_of, try_ended, try_side_by_side

ITEMS = registry.items_of("07")
EXERCISES = [item for item in ITEMS if isinstance(item, Exercise)]
RIGHT = {  # other right answers than the references
    "07.exposed": {
        "a sweep": (
            "def exposed(communication, compute):\n    events = [(a, 0, 1) for a, _ in communication] + [(b, 0, -1) for"
            " _, b in communication]\n    events += [(a, 1, 1) for a, _ in compute] + [(b, 1, -1) for _, b in"
            " compute]\n    open_, total, last = [0, 0], 0.0, 0\n    for at, which, step in sorted(events):\n       "
            " total += (at - last) * (open_[0] > 0 and open_[1] == 0)\n        open_[which] += step\n        last ="
            " at\n    return total\n"
        ),
        "the library's": (
            "from fsdplab.profiling.intervals import length, subtract\n\n\ndef exposed(communication, compute):\n   "
            " return length(subtract(communication, compute))\n"
        ),
        "a set of instants": (
            "def exposed(communication, compute):\n    held = lambda pairs: {t for a, b in pairs for t in range(a,"
            " b)}\n    return len(held(communication) - held(compute))\n"
        ),
    },
    "07.hide": {
        "two ahead": exercises._hide(prefetch=2),
        "by keyword": (
            "def hide():\n    settings = dict(prefetch=1, link_queues=2)\n    return dict(settings, batch_size=2,"
            " units='block')\n"
        ),
    },
}


SOLUTIONS = solutions_of(EXERCISES, RIGHT)


@pytest.fixture(scope="module")
def tried(workspace):
    """The feedback on each solution by its key."""
    return try_side_by_side(SOLUTIONS, workspace, launches=4)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("solution", SOLUTIONS, ids=str)
def test_right_solutions_pass_and_wrong_ones_are_diagnosed(tried, solution):
    solution.must_report(tried[solution.key])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "exercise,known", ended_of(EXERCISES), ids=lambda value: getattr(value, "id", None) or value.name
)
def test_solutions_that_raise_are_diagnosed(workspace, exercise, known):
    feedback = try_ended(exercise, known, workspace)
    assert known.says in f"{feedback.got} {feedback.cause}"


def test_the_question_accepts_the_right_number_and_names_each_slip(course):
    assert answers.grade_answer("07.least", 300).passed and answers.grade_answer("07.least", "0.3 s").passed
    must_name_each_slip(exercises.least)


@pytest.mark.parametrize("name", list(exercises._EXPOSED_CASES))
def test_the_cases_of_exposed_time_are_right(name):
    moved, computed, value = exercises._EXPOSED_CASES[name]
    assert len(exercises._held(moved) - exercises._held(computed)) == value


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
        exercises._remedy(settings)
        for settings in (
            stub,
            {**stub, "prefetch": 1},
            {**stub, "prefetch": 1, "units": "block"},
            {**stub, "units": "model"},
        )
    ]
    assert [cause.split(":")[0].split(",")[0] for cause in causes] == [
        "Each gather is issued when its unit is needed",
        "Small units",
        "A block's messages take longer than its compute",
        "One unit",
    ]


def test_the_feedback_says_by_how_much_and_where():
    case = exercises.hide.cases()[0]
    printed = (
        "{'units': 'block', 'prefetch': 0, 'link_queues': 2, 'batch_size': 2}\n1020 of 1760 ms exposed: gathers in"
        " forward 480"
    )
    trial = Trial(0, {"settings": "", "milliseconds over the target": 720}, printed, ())
    step, cause = exercises.hide.explain(
        case, trial, replace(_difference(), tensor="x['milliseconds over the target']")
    )
    assert step.startswith("1020 of 1760") and cause.startswith("720 ms too many")


def _difference():
    from fsdplab.teaching.core.verdicts import Difference

    return Difference("", "value", "0", "720")


@pytest.mark.timeout(300)
def test_the_card_exposes_what_arithmetic_says():
    payload = {"units": "block", "prefetch": 0, "link_queues": 2, "batch_size": 2}
    gather = on_ranks.GATHER_MS + on_ranks.LATENCY_MS
    for one in call_on_ranks(overlapping.ON_THE_RANKS, "on_this_rank", world_size=2, payload=payload, time_limit=200):
        assert one["exposed"]["gathers in forward"] == pytest.approx(on_ranks.BLOCKS * gather, rel=0.05)
        assert one["exposed"]["gathers in backward"] == pytest.approx(on_ranks.BLOCKS * gather, rel=0.05)
        moved = on_ranks.BLOCKS * (4 * on_ranks.GATHER_MS + 3 * on_ranks.LATENCY_MS)
        assert one["communication_ms"] == pytest.approx(moved, rel=1e-3)


# --- what the notebook says about its runs


@pytest.fixture(scope="module")
def small():
    """A profiled run behind a link, and one rank alone, of the smallest model."""
    common = dict(model="gpt-tiny", batch_size=2, sequence_length=32, steps=2, warmup=1, memory=False, profile=1)
    return {"linked": run(RunSpec(**common, link="20MB/s", prefetch=0)), "alone": run(RunSpec(**common, world_size=1))}


@pytest.mark.timeout(300)
def test_sentences_and_tables_come_from_the_record(small):
    linked = small["linked"]
    told, split = str(overlapping.seen(linked)), overlapping.breakdown_of(linked)
    assert "prefetch=0" in told and overlapping.duration(split["exposed_ns"]) in told
    assert "Most frequent cause" in str(overlapping.worst_place(linked))
    exposed, whole = overlapping.moving(linked)
    on_the_link = linked.summary["comm"]["bytes_per_step"] / 20e6
    assert 0.5 * on_the_link < exposed <= whole == pytest.approx(on_the_link, rel=1e-3), "copies are not on the link"
    assert overlapping.moving(small["alone"]) == (0, 0)


@pytest.mark.timeout(300)
def test_the_references_exposed_time_is_the_records(small):
    space: dict = {}
    exec(exercises.exposed.reference, space)
    rows = overlapping.by_hand(space["exposed"], small["linked"]).rows
    assert [row[0] for row in rows] == ["rank 0", "rank 1"]
    for row in rows:
        assert float(row[3]) == pytest.approx(float(row[4]), abs=0.2)


@pytest.mark.timeout(300)
def test_inflation_and_floor_need_no_second_look(small):
    table = overlapping.inflation({"alone": small["alone"], "linked": small["linked"]})
    assert table.rows[0][2] == "1.00" and table.rows[0][3] == "nothing sent" and float(table.rows[1][1]) > 0
    floor = overlapping.floor_of(small["linked"])
    assert floor(1e-3, 1).rows[2][1] > "0" and floor(1e9, 1000).rows[2][1] == "0"
    assert overlapping.least_exposed_ms(300, 500) == 200 and overlapping.least_exposed_ms(500, 300) == 0


@pytest.mark.timeout(300)
def test_the_sweep_shows_its_numbers(small):
    figure = overlapping.sweep_figure({"20 MB/s": small["linked"]})
    assert "20 MB/s" in alt_text(figure) and "20 MB/s" in str(overlapping.swept({"20 MB/s": small["linked"]}))
    two = communication_bars({"slow": (0.3, 0.4, 0.5), "fast": (0.0, 0.1, 0.2)})
    assert "slow: 300 ms of communication shows" in two.layout.title.text and "75 ms" not in alt_text(two)
    assert "25 % hidden" in svg(two) and "100 % hidden" in svg(two)


def test_jobs_are_behind_the_link_unless_they_are_raw():
    assert overlapping.job().link == overlapping.LINK and overlapping.raw().link is None
    assert "400 MB/s" in str(overlapping.banner()) and "emulated" in str(overlapping.banner())


def test_questions_are_of_the_notebook():
    assert [type(item) for item in ITEMS] == [Exercise, Choice, Choice, Question, Exercise]
