"""Notebook 14: injected faults are named on live ranks, a sound job is not, and recorded cases are as they are told."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from fsdplab.figures import alt_text
from fsdplab.teaching import failures
from fsdplab.teaching.core import registry
from fsdplab.teaching.core.exercise import Choice
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.lessons.faulty_job import lesson as naming
from fsdplab.teaching.lessons.faulty_job.lesson import FAULTS, Fault
from fsdplab.teaching.lessons.nb14_failures import record
from tests.solutions import function_of


@pytest.fixture(scope="module")
def sound():
    return failures.inject("none")


# --- live ranks


@pytest.mark.parametrize("name", failures.names())
def test_an_injected_fault_is_named(name, course):
    """The naming is not told what was injected. The hangs end by the limit of five seconds on a message."""
    seen = failures.inject(name)
    assert [each.name for each in failures.reports(seen)][:1] == [name]
    assert f"`{name}`, by" in str(failures.report(seen)) and alt_text(failures.losses_figure(seen))
    assert all(not _alive(pid) for pid in _pids(seen)), "no process is left"


def _pids(seen) -> list[int]:
    return [each["pid"] for each in seen.ranks if each]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_sound_job_has_no_report_and_is_its_twin(sound, course):
    assert [each.name for each in failures.reports(sound) if each.name != "one slow rank"] == []
    assert naming.drift(sound) < 1e-6 and all(factor == pytest.approx(1) for factor, _ in sound.ranks[0]["ratios"])


def test_a_run_over_its_card_is_out_of_memory(course):
    found = naming.of_record(failures.out_of_memory())
    assert found is not None and found.name == "out of memory" and "optimizer state" in found.says


def test_a_fault_is_shown_by_the_lines_that_it_changes():
    assert failures.changed_line("wrong divisor").splitlines()[0].startswith("-         self.shard.grad = (self.sum")
    assert failures.changed_line("missing wait").split() == ["-", "self.work.wait()"]
    for name in failures.names():
        assert 1 <= len(failures.changed_line(name).splitlines()) <= 4


def test_a_fault_whose_line_is_gone_is_refused():
    with pytest.raises(ValueError, match="stands 0 times in job.py, not once"):
        Fault("old", "a line that was there once", "").source()
    assert {name for name, fault in FAULTS.items() if not fault.line} == {"none"}


# --- near misses: a rule gives nothing, or another name


def changed(seen, rank: int, **values):
    ranks = [each | values if number == rank else each for number, each in enumerate(seen.ranks)]
    return replace(seen, ranks=ranks)


def first(seen) -> str:
    return next((each.name for each in failures.reports(seen)), "")


def test_gradients_that_are_no_constant_multiple_are_no_divisor(sound):
    ratios = [[2.0, 0.0], [2.0, 0.0], [1.0, 0.0], [2.0, 0.0]]
    assert first(changed(sound, 1, ratios=ratios)) != "wrong divisor"
    halves = [[0.5, 0.0]] * 4
    found = failures.reports(changed(changed(sound, 0, ratios=halves), 1, ratios=halves))
    assert found[0].name == "wrong divisor" and "a wrong divisor" in found[0].says


def test_a_value_that_is_not_finite_on_every_rank_is_blamed_on_none_alone(sound):
    calls = [[dict(call, finite=call["step"] < 2) for call in own] for own in sound.calls]
    found = failures.reports(replace(sound, calls=calls))
    assert found[0].name == "NaN on one rank" and "as on other ranks" in found[0].says


def test_a_rank_that_waits_has_no_call_that_differs(sound):
    shorter = [sound.calls[0], sound.calls[1][:7]]
    assert naming.place_of_difference(shorter) is None
    other = [sound.calls[0], [*sound.calls[1][:7], dict(sound.calls[1][7], nbytes=1)]]
    assert naming.place_of_difference(other) == 7


# --- recorded


@pytest.mark.parametrize("letter", failures.CARDS)
def test_a_recorded_card_is_what_its_question_says(letter):
    seen = failures.card(letter)
    named = first(seen)
    question = registry.find(f"14.card_{letter.lower()}", Choice)
    assert named == failures.CARDS[letter] and named in question.options[question.right]
    for figure in (failures.losses_figure(seen), failures.calls_figure(seen)):
        assert len(alt_text(figure)) > 60 and named not in alt_text(figure)
    assert named not in str(failures.facts(seen))


def test_texts_of_pytorch_name_its_version_and_no_machine():
    for name in (*record.TEXTS, "flight_recorder"):
        text = failures.printed(name)
        assert text.startswith("# torch 2.") and "\n$ " in text and "/" not in text.split("job.py")[0].split("$")[0]
        assert "tmp" not in text and "pid" not in text and record._cleaned(text) == text
    assert "COLLECTIVE_TYPE_MISMATCH" in failures.printed("flight_recorder")
    made = json.loads(failures.printed("torchrun", ".json"))
    assert set(made["faults"]) == set(failures.names()) and failures.silent() == 7


# --- exercises


def test_the_references_agree_with_the_lab_on_recorded_cases():
    late = function_of(registry.find("14.late", Exercise))
    first_mismatch = function_of(registry.find("14.first_mismatch", Exercise))
    for letter, name in failures.CARDS.items():
        calls = failures.pairs(failures.card(letter))
        alike, ranks = first_mismatch(calls)
        assert (ranks != []) == (name == "mismatched order")
        assert alike == (naming.place_of_difference(failures.card(letter).calls) if ranks else min(map(len, calls)))
    assert late([[0.0, 61.0, 0.3]] * 6 + [[0.2, 0.1, 9.0]] * 4) == [1]
