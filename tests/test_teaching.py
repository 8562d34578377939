"""The teaching base without ranks: what is saved, how answers are judged, what a failed check says,
what a page keeps.
"""

from __future__ import annotations

import importlib
import signal
import sys
from types import SimpleNamespace

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from fsdplab import RunSpec, teaching
from fsdplab.figures import memory_by_category, style
from fsdplab.records import RunRecord, Summary
from fsdplab.records.summary import Peak
from fsdplab.teaching import collectives, tour
from fsdplab.teaching.core import (
    answers,
    checking,
    display,
    exploring,
    on_ranks,
    predictions,
    provenance,
    registry,
    run_submission,
)
from fsdplab.teaching.core.cell_runs import ranks_wanted
from fsdplab.teaching.core.course_state import CheckFailed, current, open_course
from fsdplab.teaching.core.exercise import Choice, Question
from fsdplab.teaching.core.figure_below import FigureBelow
from fsdplab.teaching.core.on_ranks import with_plain_numbers
from fsdplab.teaching.core.predictions import Prediction, PredictionLocked, calibration_of
from fsdplab.teaching.core.provenance import origins
from fsdplab.teaching.core.quantities import QuantityError, plain, quantity
from fsdplab.teaching.core.verdicts import Feedback, Verdict, first_difference
from fsdplab.teaching.core.workspace import Workspace, WorkspaceError, checked_id, load_function
from fsdplab.teaching.lessons.nb01_collectives.lesson import Timing
from tests.lesson_cells import run_cell
from tests.solutions import must_name_each_slip


@pytest.fixture
def course(tmp_path):
    """A learner's course in an empty folder; afterwards no course is open."""
    from fsdplab.teaching.core import course_state

    path_before = list(sys.path)
    yield open_course("learner", tmp_path / "my_fsdp")
    course_state._open.clear()
    sys.path[:] = path_before
    sys.modules.pop("my_fsdp", None)


def a_record(strategy: str, total: int, **split: int) -> RunRecord:
    """A record as a run leaves it, with a peak and its split, and a card of 310 MB."""
    summary = Summary(peak_memory_bytes=Peak(total, split))
    spec = {"strategy": strategy, "engine": "lab", "world_size": 2, "card": 310_000_000}
    return RunRecord(
        "unsaved", spec=spec, summary=summary, provenance={"peak_memory_bytes": "measured", "card": "emulated"}
    )


RUNS = [
    a_record("no_shard", 347_000_000, optimizer_state=152_000_000),
    a_record("full_shard", 203_000_000, optimizer_state=76_000_000),
]


# --- numbers with units


@pytest.mark.parametrize(
    "value,unit,expected",
    [
        (36, "MB", 36),
        ("36", "MB", 36),
        ("36 MB", "kB", 36_000),
        ("1.5 GiB", "B", 1.5 * 2**30),
        ("9.6 Gbit/s", "GB/s", 1.2),
        ("3e6B", "MB", 3),
        ("1,000 kB", "MB", 1),
        ("50 %", "x", 0.5),
        ("20 ms", "s", 0.02),
        (torch.tensor(2.0), "MB", 2),
        (np.float32(2), "MB", 2),
        (np.int64(36), "MB", 36),
        (np.array([3]), "MB", 3),
        (torch.tensor([4]), "MB", 4),
    ],
)
def test_a_quantity_is_read_in_the_asked_unit(value, unit, expected):
    assert quantity(value, unit) == pytest.approx(expected)


@pytest.mark.parametrize(
    "value",
    [
        "many",
        "",
        "36 MB/s",
        "36 parsec",
        "3 s",
        None,
        True,
        np.True_,
        [1],
        "12 MB 4",
        np.ones(2),
        torch.ones(2),
        1j,
        "3,5",
        "1,00",
        "1,000,5 MB",
    ],
)
def test_a_quantity_that_measures_something_else_is_refused(value):
    with pytest.raises(QuantityError):
        quantity(value, "MB")


# --- what the learner wrote


@pytest.mark.parametrize(
    "wrong", ["ring", "1.ring", "01.Ring", "01.", "01.ring gather", "../01.ring", "01.class", "01.ring.py"]
)
def test_a_malformed_id_is_refused(wrong):
    with pytest.raises(WorkspaceError, match="not an exercise id"):
        checked_id(wrong)


def test_saved_exercises_can_be_imported(course):
    course.workspace.save(
        "01.double",
        "from dataclasses import dataclass\n@dataclass\nclass Two:\n    value: int = 2\n\ndef double(x):\n    return"
        " Two().value * x",
    )
    assert importlib.import_module("my_fsdp").double(4) == 8
    assert load_function(course.workspace.file_of("01.double"), "double")(4) == 8
    with pytest.raises(AttributeError, match="has not been run"):
        importlib.import_module("my_fsdp").triple
    with pytest.raises(WorkspaceError, match="defines no function triple"):
        load_function(course.workspace.file_of("01.double"), "triple")


def test_a_pass_counts_for_the_text_that_passed(course):
    workspace = course.workspace
    workspace.save("01.double", "def double(x):\n    return 2 * x")
    workspace.note_pass("01.double", workspace.source_of("01.double"))
    assert workspace.has_passed("01.double")
    workspace.save("01.double", "def double(x):\n    return 3 * x")
    assert not workspace.has_passed("01.double")


def test_a_damaged_record_names_the_file_and_the_remedy(course):
    course.workspace.open()
    (course.workspace.path / "progress.json").write_text("{")
    with pytest.raises(WorkspaceError, match="progress.json is damaged .* delete it"):
        course.workspace.has_passed("01.double") or course.workspace.note_failure("01.double")
    (course.workspace.path / "predictions.json").write_text("[]")
    with pytest.raises(WorkspaceError, match="expected a JSON object"):
        calibration_of(course.workspace)


def test_solution_says_whose_it_takes(course, capsys):
    reference = teaching.solution("00.hello_ranks")
    assert reference.__doc__ and "using the reference hello_ranks" in capsys.readouterr().out
    mine = "def hello_ranks():\n    return 'mine'"
    course.workspace.save("00.hello_ranks", mine)
    assert teaching.solution_file("00.hello_ranks").parent.name == "reference", "saved, but its check has not passed"
    course.workspace.note_pass("00.hello_ranks", mine)
    assert teaching.solution("00.hello_ranks")() == "mine"
    assert "using your hello_ranks" in capsys.readouterr().out


# --- the registry


def test_unknown_ids_and_wrong_verbs_are_explained():
    with pytest.raises(LookupError, match="near: 01.ring_all_gather"):
        registry.find("01.ring_all_gathr")
    with pytest.raises(LookupError, match="none in this notebook"):
        registry.find("77.nothing")
    with pytest.raises(LookupError, match="use answer"):
        teaching.check("01.busbw")
    with pytest.raises(LookupError, match="use check"):
        teaching.answer("01.ring_all_gather", 3)


def test_a_teacher_registers_an_id_once():
    own = Question("78.own", "two?", "", 2.0, hints=("a", "b", "c"))
    teaching.register(own, own)
    assert registry.find("78.own") is own
    with pytest.raises(ValueError, match="registered already"):
        teaching.register(Question("78.own", "three?", "", 3.0, hints=("a", "b", "c")))


def test_an_exercise_that_lacks_something_is_refused():
    with pytest.raises(ValueError, match="three hints"):
        Question("78.other", "two?", "", 2.0, hints=("a", "b"))
    with pytest.raises(ValueError, match="every option needs a `because`"):
        Choice("78.other", "?", {"a": "x", "b": "y"}, "a", {"a": "x"})


# --- numeric answers and choices


def test_a_question_about_runs_is_judged_by_them(course):
    must_name_each_slip(registry.find("00.peak"), RUNS)


@pytest.mark.parametrize(
    "factor,cause",
    [
        (8, "divide by 8"),
        (1 / 8, "eight times too small"),
        (1e6 / 2**20, "counted in MiB"),
        (2**20 / 1e6, "written as MiB"),
        (1000, "1000 times"),
        (1e6, "a million times"),
        (1e9, "bytes where GB are asked for?"),
        (1.5, "too large"),
        (3, "3 times too large"),
        (1 / 31**2, "upside down"),
        (0.01, "more than ten times too small"),
    ],
)
def test_slips_that_any_number_of_bytes_invites(factor, cause):
    question = Question("78.bytes", "?", "MB", 31.0, hints=("a", "b", "c"))
    assert cause in (answers.slip_behind(question, 31 * factor) or answers.how_far(31 * factor, 31))


def test_a_wrong_prefix_is_named_of_every_number_that_would_be_right_without_it():
    question = Question("78.time", "?", "ms", 322.4, hints=("a", "b", "c"), tolerance=0.03)
    assert "the prefix" in answers.slip_behind(question, 0.32) and not answers.slip_behind(question, 0.35)


@pytest.mark.parametrize(
    "value,says",
    [
        (..., "Not answered yet"),
        ("lots", "cannot be read"),
        ("3 s", "measures seconds"),
        (None, "cannot be read"),
        (float("nan"), "finite"),
    ],
)
def test_what_is_no_answer_is_no_failed_try(course, value, says):
    verdict = answers.grade_answer("01.busbw", value)
    assert says in str(verdict)
    assert ("#c8553d" not in verdict._repr_html_()) == (value is ...), "a question that nobody has tried is not red"
    assert course.workspace.failed_tries("01.busbw") == 0


@pytest.fixture
def on_the_page(course, monkeypatch):
    """What `ask` shows in a notebook: its widget, and the verdict below it each time that it changes."""
    widgets, verdicts = [], []
    monkeypatch.setattr(answers, "present_widget", lambda make, instead=None: widgets.append(make()))
    monkeypatch.setattr(answers, "present_live", lambda first: verdicts.append(first) or verdicts.append)
    return widgets, verdicts


def test_a_choice_is_made_by_a_click(on_the_page):
    widgets, verdicts = on_the_page
    teaching.ask("00.loop")
    assert "open. Not answered yet: click" in str(verdicts[-1])
    _, *buttons = widgets[-1].children
    assert [button.description[:11] for button in buttons] == ["nothing: ba", "every step ", "backward() "]
    buttons[0].click()
    assert not verdicts[-1].passed and "`backward()` adds to `.grad`. That is a feature" in str(verdicts[-1])
    assert [button.button_style for button in buttons] == ["danger", "", ""]
    teaching.ask("00.loop")
    assert "Not answered yet" in str(verdicts[-1]), "a wrong answer is not kept"
    buttons[1].click()
    assert verdicts[-1].passed and [button.button_style for button in buttons] == ["", "success", ""]
    teaching.ask("00.loop")
    assert verdicts[-1].passed and widgets[-1].children[2].button_style == "success", "it comes back on another day"


def test_a_number_is_given_in_a_field(course, on_the_page):
    widgets, verdicts = on_the_page
    teaching.ask("00.peak", against=RUNS)
    field = widgets[-1].children[0]
    for text, says in (("347", "whole bar"), ("many", "cannot be read"), ("  ", "Not answered yet"), ("37", "passed")):
        field.value = text
        assert says in str(verdicts[-1])
    assert course.workspace.failed_tries("00.peak") == 1 and "37 MB" in str(verdicts[-1])
    teaching.ask("00.peak", against=RUNS)
    assert verdicts[-1].passed and widgets[-1].children[0].value == "37"
    teaching.ask("00.peak", against=[a_record("no_shard", 400_000_000), RUNS[1]])
    assert "Not answered yet" in str(verdicts[-1]), "the number was right for another run"
    assert course.workspace.failed_tries("00.peak") == 1, "and to ask is no try"


def test_a_question_whose_run_failed_says_so(course, on_the_page):
    widgets, verdicts = on_the_page
    course.workspace.note_right_answer("00.peak", "37")
    lost = RunRecord("unsaved", spec={**RUNS[0].spec}, status="failed", summary=Summary())
    for against, says in (
        ([lost, RUNS[1]], "the run of no_shard failed. Run its cell again"),
        ([], "cannot be judged"),
    ):
        teaching.ask("00.peak", against=against)
        assert "open. This question cannot be judged yet" in str(verdicts[-1]) and says in str(verdicts[-1])
        widgets[-1].children[0].value = "43"
        assert says in str(verdicts[-1]) and course.workspace.failed_tries("00.peak") == 0
    lost.status = "finished"
    teaching.ask("00.peak", against=[lost])
    assert "did not measure this figure" in str(verdicts[-1])


def test_a_question_about_a_run_needs_the_run(course):
    with pytest.raises(ValueError, match=r"00.peak is about a run .* expected ask\('00.peak', against=...\)"):
        teaching.ask("00.peak")
    with pytest.raises(LookupError, match="use check"):
        teaching.ask("00.hello_ranks")


def test_where_there_are_no_buttons_options_have_letters(course, capsys):
    teaching.ask("00.loop")
    assert "   b) every step uses the sum" in (said := capsys.readouterr().out) and 'answer("00.loop", "a")' in said
    item = registry.find("00.loop")
    bundle = display.WidgetView(answers.buttons(item, None), answers.options(item))._repr_mimebundle_()
    assert "<b>b</b>&ensp;every step" in bundle["text/html"] and "application/vnd.jupyter.widget-view+json" in bundle


def test_a_failed_try_unlocks_the_next_hint(course, capsys):
    item = registry.find("01.busbw")
    teaching.hint("01.busbw")
    assert "no hint yet" in capsys.readouterr().out
    for unlocked in (1, 2, 3, 3):
        teaching.answer("01.busbw", 0.8)
        capsys.readouterr()
        teaching.hint("01.busbw")
        shown = capsys.readouterr().out
        assert [text in shown for text in item.hints] == [grade <= unlocked for grade in (1, 2, 3)]
    assert "Hint 2 (a pointer)" in str(answers.grade_answer("01.busbw", 0.8, hints=2))


def test_the_editions_differ_in_what_a_failed_check_does(course, capsys, tmp_path):
    teaching.answer("01.busbw", 0.8)
    assert "that is the algbw" in capsys.readouterr().out
    open_course("teacher", tmp_path / "my_fsdp")
    with pytest.raises(CheckFailed, match="that is the algbw") as failed:
        teaching.answer("01.busbw", 0.8)
    assert failed.value._render_traceback_() == [f"CheckFailed: {failed.value}"]
    with pytest.raises(CheckFailed, match="no such cell was run"):
        teaching.check("01.ring_all_gather")
    teaching.answer("01.busbw", 1.2)


def test_the_edition_comes_from_the_argument_else_the_environment(tmp_path, monkeypatch, course):
    monkeypatch.setenv("FSDPLAB_EDITION", "teacher")
    monkeypatch.setenv("FSDPLAB_HOME", str(tmp_path / "elsewhere"))
    assert open_course().edition == "teacher" and current().workspace.path == tmp_path / "elsewhere"
    assert open_course("learner").edition == "learner"
    with pytest.raises(ValueError, match="unknown edition 'student'"):
        open_course("student")


def test_an_untouched_stub_is_not_run(course):
    exercise = registry.find("01.ring_all_gather")
    course.workspace.save(exercise.id, exercise.stub)
    verdict = checking.grade(exercise.id)
    assert "still the stub" in str(verdict) and course.workspace.failed_tries(exercise.id) == 0


# --- pure functions, called in this process


def test_a_timer_of_somebody_else_goes_on(course):
    exercise = registry.find("05.shard")
    path = course.workspace.save(exercise.id, exercise.reference)
    handler, before = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 3600)
    try:
        run_submission.behaviours([(exercise, path)], course.workspace)
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < left <= 3600 and signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


# --- differences and verdicts


@pytest.mark.parametrize(
    "expected,got,tolerance,problem,index",
    [
        (torch.arange(4.0), torch.arange(4.0), 0, None, None),
        (torch.arange(4.0), torch.tensor([0, 1, 5.0, 3]), 0, "value", (2,)),
        (torch.ones(2, 2), torch.tensor([[1, 1], [1, float("nan")]]), 1e-3, "value", (1, 1)),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), 0, None, None),
        (torch.ones(3), torch.ones(3) + 1e-7, 1e-5, None, None),
        (torch.ones(3), torch.ones(3) + 1e-3, 1e-5, "value", (0,)),
        (torch.ones(3), torch.ones(3, 1), 0, "shape", None),
        (torch.ones(3), torch.ones(3, dtype=torch.bfloat16), 0, "dtype", None),
        (torch.ones(3), [1, 1, 1], 0, "type", None),
        (torch.ones(3), None, 0, "type", None),
        (torch.ones(()), torch.zeros(()), 0, "value", ()),
        ([1, torch.ones(2)], (1, torch.ones(2)), 0, None, None),
        ([1, torch.ones(2)], [1, torch.zeros(2)], 0, "value", (0,)),
        ([1], [1, 2], 0, "length", None),
        ([1], 1, 0, "type", None),
        ({"a": 1}, {"b": 1}, 0, "keys", None),
        ({"a": 1}, {"a": 2}, 0, "value", None),
        ({"a": 1}, [1], 0, "type", None),
        (1.0, 1.0005, 1e-3, None, None),
        (1.0, "1", 0, "value", None),
        (3, np.int64(3), 0, None, None),
        ([3, 1.5], (np.int32(3), np.float32(1.5)), 0, None, None),
        ({"steps": 3}, {"steps": np.int64(4)}, 0, "value", None),
        (True, np.True_, 0, None, None),
        ("a", "b", 0, "value", None),
        ("a", None, 0, "type", None),
        (True, False, 0, "value", None),
    ],
)
def test_the_first_difference(expected, got, tolerance, problem, index):
    found = first_difference(expected, got, tolerance)
    assert (found.problem if found else None, found.index if found else None) == (problem, index)


def test_numpys_numbers_are_numbers():
    """In settings that a learner returns, and in what a rank sends back, whatever they are inside."""
    settings = {"steps": np.int64(3), "rate": [np.float32(0.5)], "ranks": {np.int64(1)}, "deep": ({"x": np.True_},)}
    as_python = {"steps": 3, "rate": [0.5], "ranks": {1}, "deep": ({"x": True},)}
    assert repr(plain(settings)) == repr(as_python) and repr(on_ranks.portable(settings["deep"])) == "[{'x': True}]"
    assert with_plain_numbers(lambda: settings)() == as_python
    whole = torch.ones(2)
    assert plain([whole])[0] is whole
    assert RunSpec(**plain({"steps": np.int64(3), "learning_rate": np.float64(1e-3)})).steps == 3


def test_a_verdict_reads_well_as_text_and_html():
    feedback = Feedback("Wrong.", "<1>", "2", "a cause", rank=1, step="2 of 2", tensor="x", index=(0, 3))
    verdict = Verdict("01.x", feedback, "a note", ("Hint 1: h",))
    text, page = str(verdict), verdict._repr_html_()
    for part in ("01.x: not yet. Wrong.", "rank", "2 of 2", "[0, 3]", "likely cause", "a cause", "a note", "Hint 1: h"):
        assert part in text
    assert "&lt;1&gt;" in page and "first differing index" in page
    assert "<code>a</code>" in Verdict("01.x", None, "`a`")._repr_html_()
    assert "passed" in Verdict("01.x", None, "fine")._repr_html_()


# --- predictions


def test_a_prediction_is_empty_until_the_learner_writes_one(course):
    prediction = Prediction("00.peak", "MB", course.workspace)
    assert prediction.value is None and "write your own number" in str(prediction.standing)
    prediction.set("0.12 GB")
    assert "120 MB (your own number" in str(prediction.standing)
    assert str(prediction.scored("100 MB")).startswith("You predicted 120 MB, measured 100 MB: 1.20 times")
    assert "120 MB (locked, measured 100 MB)" in str(prediction.standing)
    assert Prediction("00.peak", "MB", course.workspace).value == 120
    assert Prediction("00.peak", "GB", course.workspace).value is None, "another unit is another question"


def test_a_simulated_number_is_nowhere_called_measured(course):
    prediction = Prediction("07.exposed_without", "ms", course.workspace)
    prediction.set(300)
    assert "simulated 322.4 ms: 0.93 times the right number" in str(prediction.scored(322.4, "simulated"))
    again = Prediction("07.exposed_without", "ms", course.workspace)
    assert "300 ms (locked, simulated 322.4 ms)" in str(again.standing)
    table = str(predictions.calibration_table(calibration_of(course.workspace)))
    assert "simulated 322.4 ms" in table and "measure" not in table


def test_a_number_that_comes_after_the_run_is_no_prediction(course):
    prediction = Prediction("00.peak", "MB", course.workspace)
    prediction.set(300)
    prediction.lock()
    with pytest.raises(PredictionLocked, match="its run has started"):
        prediction.set(100)
    assert prediction.scored(100).predicted == 300
    again = Prediction("00.peak", "MB", course.workspace)
    assert again.locked and again.value == 300, "it stays what it was, also when the notebook is run again"
    with pytest.raises(PredictionLocked):
        again.set(100)


def test_a_run_without_a_prediction_says_so_and_leaves_the_field_open(course):
    score = Prediction("00.peak", "MB", course.workspace).scored(100)
    assert "No prediction, measured 100 MB" in str(score) and calibration_of(course.workspace).scores == ()
    assert not Prediction("00.peak", "MB", course.workspace).locked


def test_calibration_counts_the_learners_own_predictions(course):
    for name, predicted, measured in (("a", 4, 1), ("b", 1, 1), ("c", 1, 1.5)):
        prediction = Prediction(name, "MB", course.workspace)
        prediction.set(predicted)
        prediction.scored(measured)
    found = calibration_of(course.workspace)
    assert (len(found.scores), found.within_two) == (3, 2)
    assert found.bias == pytest.approx((4 * 1 / 1.5) ** (1 / 3))
    assert "2 of 3 within a factor of two" in str(predictions.calibration_table(found))


def test_the_field_hands_its_number_to_the_prediction(course):
    prediction, changes = Prediction("00.peak", "MB", course.workspace), []
    box = predictions.number_field(prediction)
    prediction.watchers.append(lambda: changes.append(str(prediction.standing)))
    entry, complaint = box.children[1], box.children[3]
    assert entry.value == "" and not entry.disabled, "nothing in it, so nothing is given away"
    entry.value = "32 l"
    assert prediction.value is None and "unknown unit" in complaint.value and changes == []
    assert not entry.continuous_update, "half a number, which a busy kernel would lock, is never sent"
    entry.value = "321"
    assert prediction.value == 321 and complaint.value == ""
    assert changes == ["Prediction 00.peak: 321 MB (your own number; now run the next cell)"]
    entry.value = ""
    assert prediction.value is None and complaint.value == "", "an empty field is no prediction"
    entry.value = "321"
    assert Workspace(course.workspace.path).read("predictions.json")["00.peak"]["predicted"] == 321
    entry.value = "many"
    assert prediction.value is None and "nothing is predicted yet" in complaint.value, "not the number of before"
    entry.value = "321"
    prediction.lock()
    entry.value = "5"
    assert prediction.value == 321 and "is locked" in complaint.value and entry.value == "321", "what counts is shown"
    assert entry.disabled


def test_a_refused_text_goes_when_the_run_starts(course):
    prediction = Prediction("00.peak", "MB", course.workspace)
    box = predictions.number_field(prediction)
    box.children[1].value = "<b>1e999</b>"
    assert "&lt;b&gt;" in box.children[3].value
    box.children[1].value = "1e999"
    assert "not infinite" in box.children[3].value
    prediction.lock()
    assert box.children[1].value == "" and "none was made" in str(prediction.standing)


@pytest.mark.parametrize(
    "predicted,measured,words",
    [(0, 0, "right within 1 %"), (5, 0, "no ratio to a measurement of 0"), (5, -2, "the other sign")],
)
def test_a_measurement_of_nothing_is_no_infinite_ratio(course, predicted, measured, words):
    prediction = Prediction("00.peak", "MB", course.workspace)
    prediction.set(predicted)
    assert words in str(prediction.scored(measured))


@pytest.mark.parametrize(
    "cell", ["peak.score(100)", "score = peak.score\nscore(100)", "for each in [peak]:\n    each.score(100)"]
)
def test_the_cell_that_scores_locks_before_it_runs(course, tmp_path, cell):
    shell = InteractiveShell.instance()
    try:
        shell.user_ns["predict"] = teaching.predict
        shell.run_cell('peak = predict("00.peak", unit="MB"); other = predict("00.other", unit="MB")').raise_error()
        shell.user_ns["peak"].set(300)
        shell.run_cell("twice = 2 * peak.value  # a calculation may come between\n# not peak.score(100)").raise_error()
        shell.run_cell('print("peak.score(1)")').raise_error()
        assert not shell.user_ns["peak"].locked
        shell.user_ns["locked_now"] = lambda: [shell.user_ns[each].locked for each in ("peak", "other")]
        shell.run_cell(f"locked = locked_now()\n{cell}").raise_error()
        assert shell.user_ns["locked"] == [True, False]
    finally:
        InteractiveShell.clear_instance()


def test_an_empty_field_on_a_page_stops_the_next_cell_once(course, capsys):
    shell = InteractiveShell.instance()
    try:
        shell.user_ns["predict"] = teaching.predict
        shell.run_cell('peak = predict("00.peak", unit="MB"); other = predict("00.other", unit="MB")').raise_error()
        peak, other = shell.user_ns["peak"], shell.user_ns["other"]
        peak.is_on_page = other.is_on_page = lambda: True
        other.set(3)
        stopped = shell.run_cell("ran = True\npeak.score(100); other.score(3)", store_history=False)
        assert "ran" not in shell.user_ns and not peak.locked and not other.locked
        assert str(stopped.error_before_exec).startswith("The field is still empty: 00.peak. Write your number")
        assert "Traceback" not in capsys.readouterr().out
        shell.run_cell("print(peak.value)").raise_error()
        shell.run_cell("ran = True\npeak.score(100); other.score(3)").raise_error()
        assert peak.locked and other.locked and "No prediction, measured 100 MB" in capsys.readouterr().out
    finally:
        InteractiveShell.clear_instance()


def test_cells_below_a_stopped_one_say_what_is_missing(course):
    """Also where an earlier cell made a name of that kind, whose value would be another run's."""
    shell = InteractiveShell.instance()

    def refused(cell: str) -> str:
        error = shell.run_cell(cell, store_history=False).error_before_exec
        return str(error or "")

    scoring = "run = 7\nheld = {each: run for each in 'ab'}\npeak.score(run)"
    try:
        shell.user_ns["predict"] = teaching.predict
        shell.run_cell('run, each = 3, 0\npeak = predict("00.peak", unit="MB")').raise_error()
        shell.user_ns["peak"].is_on_page = lambda: True
        assert refused(scoring).startswith("The field is still empty")
        assert refused("total = run + 1") == (
            "`run` is missing: the cell that makes it was stopped, since the field of 00.peak was empty. Run that cell"
            " once more, then this one."
        )
        assert refused("def double():\n    return 2 * total\ndouble()").startswith("`total` is missing"), "in turn"
        assert not refused("print(each, [held for held in 'xy'], (lambda run: run)(1))"), "these are its own, or there"
        assert not refused(scoring) and not refused("total = run + 1")
        assert not refused("held, total") and shell.user_ns["total"] == 8
    finally:
        InteractiveShell.clear_instance()


def test_predict_runs_with_nobody_there(course, capsys):
    predicted = teaching.predict("00.peak", unit="MB", measured="0.1 GB")
    said = capsys.readouterr().out
    assert predicted.value is None and "200" not in said and "No prediction, measured 100 MB" in said
    with pytest.raises(QuantityError):
        teaching.predict("00.peak", unit="elephants")


# --- what a page keeps


def test_a_table_as_text_and_html():
    made = teaching.table(["rank", "bytes"], [[0, 36], [1, "<b>"]], "measured")
    assert str(made).splitlines() == ["rank  bytes", "----  -----", "0     36", "1     <b>", "measured"]
    assert "&lt;b&gt;" in made._repr_html_() and "measured" in made._repr_html_()


def test_columns_of_numbers_are_set_flush_right():
    page = teaching.table(["who", "n"], [["rank 0", "1,000"], ["rank 1", "-3"]])._repr_html_()
    assert page.count("text-align:left") == page.count("text-align:right") == 3


def test_what_a_widget_controls_is_an_output_of_its_own():
    bundle = display.WidgetView(
        exploring.sliders(exploring.Explorer(tour.state_figure, {"ranks": [2]}), lambda: None)
    )._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle and bundle["text/plain"] == ""


def test_a_figure_leaves_html_with_its_alternative_text(capsys):
    figure = memory_by_category(RUNS)
    bundle = display.Shown(figure, "two bars & a card")._repr_mimebundle_()
    assert set(bundle) == {"application/vnd.plotly.v1+json", "text/plain"}
    assert bundle["text/plain"] == "[figure] two bars & a card", "an export without a picture shows the words"
    teaching.show(figure)
    assert "full_shard" in capsys.readouterr().out
    with pytest.raises(ValueError, match="alternative text"):
        teaching.show(go.Figure())


def test_a_page_draws_a_figure_once_it_has_answered_and_for_the_width_that_it_told(monkeypatch):
    below, sent, drawn_anew = FigureBelow(), [], []
    monkeypatch.setattr(below, "send", sent.append)
    below.on_resize(lambda: drawn_anew.append(style.page()))
    figure = tour.state_figure(22, 2)
    assert not below.draw(figure) and sent == [], "the output is replaced, as nobody listens"
    try:
        below.width = 468
        below.width = 480
        assert sent == ["", ""] and drawn_anew == [468.0, 480.0]
        narrow = tour.state_figure(22, 2)
        assert narrow.layout.title.text.count("<br>") > figure.layout.title.text.count("<br>")
        below.answers = True
        assert below.draw(narrow) and "22 million" in sent[-1]
        below.width = 2000
        assert style.page() == style.PAGE
    finally:
        style.page_is(style.PAGE)


def test_sliders_move_the_figure_without_a_browser(capsys):
    explorer = exploring.Explorer(tour.state_figure, {"million_parameters": [1, 100], "ranks": [2, 4]}, {"ranks": 4})
    assert explorer.values == {"million_parameters": 1, "ranks": 4}
    shown = []
    box = exploring.sliders(explorer, lambda: shown.append(str(explorer.render())))
    box.children[0].value = 100
    assert "no_shard 1.60 GB" in shown[0] and explorer.values["million_parameters"] == 100
    for name, value in (("ranks", 3), ("rows", 2)):
        with pytest.raises(ValueError, match="can be"):
            explorer.set(name, value)
    teaching.explore(tour.state_figure, million_parameters=[1], ranks=[2])
    assert "full_shard" in capsys.readouterr().out


def test_what_was_real_collects_the_origins():
    rows = dict(provenance.origins(RUNS, {"bus_bandwidth": "measured"}))
    assert rows == {
        "measured": "peak memory, bus bandwidth",
        "computed": "nothing",
        "emulated": "card",
        "simulated": "nothing",
    }
    steady = RunRecord("unsaved", provenance={"steady": "simulated"})
    assert dict(provenance.origins([steady], {}))["simulated"] == "step on the steady card"
    formula = RunRecord("unsaved", provenance={"ledger": "measured", "formula_bytes_per_step": "simulated"})
    assert dict(provenance.origins([formula], {}))["computed"] == "the formula's bytes"
    assert dict(provenance.origins([], {"steady": "simulated"}))["simulated"] == "step on the steady card"
    with pytest.raises(ValueError, match="'guessed'"):
        provenance.origins([], {"x": "guessed"})


# --- the arithmetic of the lessons


def test_state_bytes_follow_the_strategy_table():
    from fsdplab.engine import STRATEGIES

    per_rank = {name: tour.state_bytes(row, 1_000_000, 4) for name, row in STRATEGIES.items()}
    assert per_rank["no_shard"] == (4e6, 4e6, 8e6) and per_rank["full_shard"] == (1e6, 1e6, 2e6)
    assert per_rank["zero1"] == (4e6, 4e6, 2e6) and per_rank["zero2"] == (4e6, 1e6, 2e6)


def test_bytes_and_bandwidths():
    figure = collectives.sent_figure(48, 4)
    title = figure.layout.title.text.replace("<br>", " ")
    assert "all_gather and reduce_scatter 36.0 MB, all_reduce 72.0 MB" in title
    assert [trace.y[-1] for trace in figure.data] == pytest.approx([48, 96], rel=0.01), "with many ranks P and 2 P"
    timing = Timing("all_reduce", 64_000_000, 4, 0.080)
    assert (timing.algbw, timing.busbw) == pytest.approx((0.8e9, 1.2e9))
    bandwidth = collectives.Bandwidth((timing, Timing("all_gather", 64_000_000, 4, 0.050)))
    assert bandwidth.at("all_gather", 64_000_000).busbw == pytest.approx(0.96e9)
    assert Timing("gloo's reduce_scatter", 64_000_000, 4, 0.080).busbw == pytest.approx(0.6e9), "a reduce_scatter's"
    recorded = collectives.recorded_bandwidth()
    assert {timing.nbytes for timing in recorded.timings} == set(collectives.SIZES)
    here = SimpleNamespace(recorded_bandwidth=lambda: recorded, measure_bandwidth=lambda world_size: recorded)
    score = SimpleNamespace(score=lambda ratio, origin: None)
    rows = {row[0]: row[1:] for row in run_cell("01", "measure", longer=score, collectives=here)["_"].rows}
    assert rows["all_reduce"][1] == rows["all_reduce"][2], "on two ranks busbw of an all-reduce is algbw"
    assert all(row[:3] == row[3:] for row in rows.values())
    lowest = min(rows, key=lambda kind: float(rows[kind][2]))
    assert lowest == "gloo's reduce_scatter", "as the text says of an idle machine"
    with pytest.raises(LookupError, match="was not measured"):
        bandwidth.at("all_gather", 1)
    assert "GB/s" in display.alt_text(collectives.bandwidth_figure(bandwidth))


# --- cell magics


@pytest.fixture
def shell(course, monkeypatch):
    monkeypatch.delenv("FSDPLAB_HOME", raising=False)
    monkeypatch.chdir(course.workspace.path.parent)
    made = InteractiveShell()
    teaching.load_ipython_extension(made)
    return made


def test_an_exercise_cell_is_saved_and_run(shell, course, capsys):
    shell.run_cell_magic("exercise", "00.hello_ranks", "def hello_ranks():\n    return 'rank'\n")
    assert course.workspace.file_of("00.hello_ranks").read_text() == "def hello_ranks():\n    return 'rank'\n"
    assert shell.user_ns["hello_ranks"]() == "rank"
    assert "Saved as my_fsdp/00.hello_ranks.py. Next: check('00.hello_ranks')" in capsys.readouterr().out
    shell.run_cell_magic("exercise", "20.fully_shard", "def fully_shard(module):\n    return module\n")
    assert "Next: the check of your stage" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line,cell,says",
    [
        ("00.helo", "x = 1", "near: .*00.hello_ranks"),
        ("hello", "x = 1", "not an exercise id"),
        ("00.peak", "x = 1", "use answer"),
        ("00.hello_ranks", "x = 1", "must define hello_ranks"),
    ],
)
def test_an_exercise_cell_that_cannot_be_saved_says_why(shell, line, cell, says):
    with pytest.raises(UsageError, match=says):
        shell.run_cell_magic("exercise", line, cell)


def test_errors_in_an_exercise_cell_are_pythons_own(shell):
    with pytest.raises(SyntaxError):
        shell.run_cell_magic("exercise", "00.hello_ranks", "def hello_ranks(:")


def test_the_number_of_ranks_is_checked():
    assert (ranks_wanted(""), ranks_wanted(" 3 ")) == (2, 3)
    for wrong in ("0", "-1", "two", "17", "2 3"):
        with pytest.raises(UsageError, match="from 1 to 16"):
            ranks_wanted(wrong)


def test_quantities_are_named_in_words():
    simulated = SimpleNamespace(provenance={"comm": "simulated", "exposed_s": "simulated"})
    assert dict(origins([simulated], {}))["simulated"] == "communication, exposed time"


def test_every_public_name_loads():
    assert all(getattr(teaching, name) is not None for name in teaching.__all__)
    with pytest.raises(AttributeError, match="public names"):
        teaching.no_such_name
