"""Notebook 09: the peak is explained to the byte."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fsdplab.figures import alt_text
from fsdplab.sessions import RunSpec, run
from fsdplab.teaching import reading_memory
from fsdplab.teaching.core import registry
from fsdplab.teaching.core.exercise import Question
from fsdplab.teaching.core.training_on_ranks import complaint
from tests.lesson_cells import run_cell
from tests.solutions import function_of, in_all_cases, must_name_each_slip

HOLDING, SLIM = EXERCISES = registry.find("09.holding"), registry.find("09.slim")
LIMITS = SLIM.module()
QUESTIONS = [item for item in registry.items_of("09") if isinstance(item, Question)]


@pytest.mark.parametrize(
    "choices,says",
    [
        (["prefetch"], "expected a dict"),
        ({"batch_size": 1}, "belongs to the job"),
        ({"units": "layer"}, "unknown units"),
        ({"prefetch": -1}, "prefetch"),
        ({"checkpoint": "full"}, "belongs to the job"),
    ],
)
def test_choices_outside_the_job_are_refused(choices, says):
    assert says in complaint(choices, LIMITS.JOB, LIMITS.CHOICES)
    assert complaint({"prefetch": 1}, LIMITS.JOB, LIMITS.CHOICES) == ""


def test_the_expected_units_are_right():
    held = ["blocks.0, blocks.1, root", "", "root", "root", "blocks.1, root"]
    held += ["blocks.1, root", "blocks.0, blocks.1, root", ""]
    assert [seen["units"] for seen in in_all_cases(HOLDING)] == held


# --- the records that the notebook reads


@pytest.fixture(scope="module")
def base():
    return run(RunSpec(**LIMITS.JOB, prefetch=1))


@pytest.fixture(scope="module")
def large():
    """More activations than moments, with a model that is small."""
    return run(RunSpec(model="gpt-tiny", batch_size=12, sequence_length=64, steps=1, device="cpu"))


def held_peak(record):
    """The row that the notebook calls the peak."""
    names = run_cell("09", "run", job=RunSpec(), run=lambda spec: record, whole=SimpleNamespace(score=lambda number: 0))
    return names["peak"]


@pytest.mark.timeout(300)
def test_the_gathered_bytes_at_the_peak_have_names(base):
    row, sizes = reading_memory.peak_row(base), reading_memory.unit_bytes(base)
    held = function_of(HOLDING)(reading_memory.life_of(base, row["rank"]), row["time_ns"])
    assert len(held) == 3 and "root" in held and row["unsharded_parameters"] == sum(sizes[unit] for unit in held)
    assert sizes["root"] == LIMITS.ROOT_BYTES and sizes["blocks.0"] == LIMITS.BLOCK_BYTES, "the constants of the check"
    peak, life = held_peak(base), reading_memory.life_of(base, row["rank"])
    names = run_cell("09", "gathered-table", base=base, peak=peak, life=life, solution=lambda _: function_of(HOLDING))
    assert sum(names["nbytes"][unit] for unit in names["units"]) == peak["unsharded_parameters"]


@pytest.mark.timeout(300)
def test_tables_and_sentences_say_the_record(base, large):
    places = [reading_memory.place_of(run, reading_memory.instant(run)) for run in (base, large)]
    done = [int(place.partition(", ")[2].partition("%")[0]) for place in places]
    assert places[0].startswith("in the backward") and done[0] > 60, places
    assert (done[1] < 30) if "backward" in places[1] else (done[1] > 70), places  # where forward becomes backward
    peak = held_peak(base)
    assert peak == reading_memory.peak_row(base) and places[0] == reading_memory.place_of(base, peak["time_ns"])
    shown = run_cell("09", "peak", base=base, peak=peak, held=reading_memory.total)["_"]
    assert shown.rows[0][0] == "optimizer state" and "unsharded parameters" in str(shown)
    runs, peaks = {"prefetch=1": base, "same": base}, dict.fromkeys(("prefetch=1", "same"), 199.0)
    compared = run_cell("09", "compare-figure", runs=runs, peaks=peaks, held=reading_memory.total)["_"]
    assert compared.rows[0][2] == "+0.0" and compared.rows[1][3] == "15.4"
    assert "one" in alt_text(reading_memory.memory_figure({"one": base, "two": base}))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("item", QUESTIONS, ids=lambda item: item.id)
def test_questions_accept_the_right_number_and_name_each_slip(course, base, large, item):
    must_name_each_slip(item, large if item.id == "09.crossover" else base)


def test_no_instant_is_later_than_the_end_of_its_phase(monkeypatch):
    """Under shard_grad_op the last unit of the forward is unsharded long before the forward ends."""
    lives = [("forward", "unsharding", 0), ("forward", "unsharded", 100), ("backward", "sharded", 150)]
    lives = [{"unit": "root", "state": state, "phase": phase, "time_ns": at} for phase, state, at in lives]
    monkeypatch.setattr(reading_memory, "life_of", lambda record, rank: lives)
    monkeypatch.setattr(reading_memory, "peak_row", lambda record: {"rank": 0})
    assert reading_memory.place_of(None, 120) == "in the forward, 80% of the way through it"
    assert reading_memory.place_of(None, 149) == "in the forward, 99% of the way through it"
