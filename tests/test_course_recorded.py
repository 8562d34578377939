"""Lessons about time tell their story from the emulated clock and from runs in `data/`; the learner's run comes after.

The text holds whatever the learner's machine measures: the line below a table says why a figure differs.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fsdplab.records import RecordError
from fsdplab.sessions import RunSpec
from fsdplab.sessions.steady_card import steady
from fsdplab.teaching import hiding, reading_choices
from fsdplab.teaching.core import recorded as recording
from fsdplab.teaching.core.own_run import HERE, beside, why_it_differs
from fsdplab.teaching.core.recorded import recorded
from tests.lesson_cells import run_cell

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
RUNS = ["lesson-07/late", "lesson-07/early", "lesson-10/tunnel"]
RUNS += [f"lesson-11/{name}" for name in reading_choices.STRATEGIES]
LOCAL = re.compile(r"(?<!\.)\b(?:run|compare)\(")
FIRST = re.compile(r"\bsteady\(|teaching\.recorded\(")


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_opens_at_once_is_measured_and_small(name):
    run = recorded(name)
    assert run.status == "finished" and run.provenance["step_time_s"] == "measured"
    assert run.summary.cpu_share is not None, "how often the ranks had a core is told with it"
    assert sum(path.stat().st_size for path in run.path.iterdir()) < 130_000


def test_recorded_runs_are_the_lessons_jobs():
    fields = ("model", "world_size", "batch_size", "sequence_length", "link")
    job = RunSpec(model="gpt-20m", world_size=2, batch_size=2, sequence_length=64, link="400MB/s")
    for name in [name for name in RUNS if "tunnel" not in name]:
        assert {field: recorded(name).spec[field] for field in fields} == {
            field: getattr(job, field) for field in fields
        }
    assert [recorded(name).spec["strategy"] for name in RUNS if "lesson-11" in name] == list(reading_choices.STRATEGIES)
    assert hiding.asked(recorded("lesson-10/tunnel")) == pytest.approx(12.7, abs=0.05)


def test_the_recorded_runs_of_07_differ_in_prefetch_alone():
    """What 07 says of prefetch is held against the steady card (tests/test_course_claims.py), not against a machine."""
    late, early = (recorded(f"lesson-07/{name}") for name in ("late", "early"))
    assert {name for name in late.spec if late.spec[name] != early.spec[name]} == {"prefetch"}
    assert late.summary.comm.bytes_per_step == early.summary.comm.bytes_per_step


@pytest.mark.parametrize("notebook", ["07", "10", "11"])
def test_the_story_is_told_before_anything_runs_here(notebook):
    path = next((ROOT / "notebooks").glob(f"{notebook}_*.ipynb"))
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    texts = ["".join(cell["source"]) for cell in cells]
    told = next(index for index, text in enumerate(texts) if FIRST.search(text))
    runs = next(index for index, text in enumerate(texts) if LOCAL.search(text))
    assert told < runs
    assert any("beside(" in text for text in texts[runs:]), "how much CPU the ranks got"


def test_the_table_has_the_share_of_the_cores_and_says_why_a_row_differs():
    early = recorded("lesson-07/early")
    card = steady(RunSpec(model="gpt-20m", sequence_length=64, link="400MB/s"))
    shown = str(beside({"steady card": card, "recorded": early, HERE: with_share(early, 0.31)}))
    assert "simulated" in shown and "31 %" in shown
    assert "Ranks had a core for 31 % of their step" in shown and "If your figure differs, this is why" in shown


@pytest.mark.parametrize(
    ("share", "says"),
    [
        (0.31, "other programs took the cores"),
        (0.97, r"speed of its own \(ranks had a core for 97 %"),
        (None, r"speed of its own\. Bytes"),
    ],
)
def test_every_outcome_has_its_sentence(share, says):
    assert re.search(says, why_it_differs(with_share(recorded("lesson-07/early"), share)))


def test_here_is_compared_with_the_recorded_runs_of_its_strategies():
    runs = [recorded(f"lesson-11/{name}") for name in reading_choices.STRATEGIES]
    here = [with_share(runs[0], 0.9), with_share(runs[-1], 0.4)]
    on_card = reading_choices.on_steady_card(runs)
    job = RunSpec(link="400MB/s")
    names = run_cell("11", "here", job=job, runs=runs, on_card=on_card, compare=lambda specs, watcher: here)
    assert "40 %" in str(names["_"]) and len(names["ends"]) == len(here)


def test_a_missing_record_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(recording, "shared_folder", lambda name: tmp_path)
    with pytest.raises(RecordError, match="install fsdplab again"):
        recorded("lesson-07/early")


def with_share(run, share):
    """The run as ranks that had a core for `share` of their step would have made it."""
    return replace(run, summary=replace(run.summary, cpu_share=share))
