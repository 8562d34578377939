"""Notebook 11: a choice is judged by bytes and by the link's clock."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdplab.records import RunRecord, Spread, Summary
from fsdplab.records.summary import Comm, Peak
from fsdplab.sessions import RunSpec, compare
from fsdplab.sessions.steady_card import steady
from fsdplab.teaching import reading_choices
from fsdplab.teaching.core import answers, registry, training_on_ranks
from fsdplab.teaching.core.exercise import Question
from fsdplab.teaching.core.recorded import recorded
from fsdplab.teaching.lessons.nb11_shoot_out import on_ranks
from tests.lesson_cells import run_cell
from tests.solutions import must_name_each_slip

CHOOSE = registry.find("11.choose")
QUESTIONS = [item for item in registry.items_of("11") if isinstance(item, Question)]
NOTEBOOK = next((Path(__file__).resolve().parents[1] / "notebooks").glob("11_*.ipynb"))


def fake(
    strategy: str, peak: float, exposed_ms: float, on_link_ms: float, sent: float, step_ms: float
) -> SimpleNamespace:
    """A record as far as the lesson reads it; times in ms, sizes in MB."""
    ledger = [{"rank": 0, "step": step, "start_ns": 0, "end_ns": round(on_link_ms * 1e6)} for step in (0, 1)]
    return SimpleNamespace(
        spec={"strategy": strategy, "prefetch": 1, "link_queues": 1, "units": "auto"},
        status="finished",
        table={"ledger": ledger}.__getitem__,
        summary=Summary(
            peak_memory_bytes=Peak(round(peak * 1e6)),
            step_time_s=Spread.of([step_ms / 1e3]),
            formula_bytes_per_step=round(sent * 1e6),
            comm=Comm(round(sent * 1e6), 3, exposed_s=exposed_ms / 1e3, overlap=1 - exposed_ms / on_link_ms),
        ),
    )


RUNS = [
    fake("no_shard", 366, 25, 216, 86.4, 300),
    fake("zero2", 237, 60, 216, 86.4, 310),
    fake("shard_grad_op", 266, 69, 216, 86.4, 310),
    fake("full_shard", 199, 86, 322, 128.9, 350),
]


@pytest.mark.parametrize("item", QUESTIONS, ids=lambda item: item.id)
def test_questions_accept_the_right_number_and_name_each_slip(course, item):
    must_name_each_slip(item, RUNS)


def test_the_arithmetic_of_the_hint_answers_the_question(course):
    assert answers.grade_answer("11.busy", 3 * 86.4 / 2 / 400 * 1000, RUNS).passed


def test_tables_say_what_the_records_hold():
    runs = [recorded(f"lesson-11/{name}") for name in reading_choices.STRATEGIES]
    names = run_cell("11", "traffic", runs=runs)
    for run, row in zip(runs, names["_"].rows, strict=True):
        assert row[1] == row[2] == f"{run.summary.comm.bytes_per_step / 1e6:.1f}"
        assert names["on_link_ms"](run) == pytest.approx(1e3 * reading_choices.on_the_link(run))
    on_card = reading_choices.on_steady_card(runs)
    shown = run_cell("11", "bars", on_card=on_card, on_link_ms=names["on_link_ms"])["_"]
    assert [row[4] for row in shown.rows] == [f"{1e3 * card.summary.comm.exposed_s:.0f}" for card in on_card]
    phases = run_cell("11", "phases", on_card=on_card)["_"]
    assert list(phases.index) == list(reading_choices.STRATEGIES)
    assert phases["backward"]["compute"].nunique() == 1, "every strategy computes the same"


@pytest.mark.parametrize(
    "choices,says",
    [
        ({"card": 1}, "belongs to the job"),
        ({"strategy": "zero3"}, "unknown strategy"),
        ({"strategy": "hybrid_shard"}, "shard_size"),
        ("zero2", "expected a dict"),
    ],
)
def test_choices_outside_the_job_are_refused(choices, says):
    assert says in training_on_ranks.complaint(choices, on_ranks.JOB, on_ranks.CHOICES)


def test_the_reference_is_on_the_front():
    """No strategy that passes is better than the reference's in one of peak and step and as good in the other."""
    choice = CHOOSE.module().choose()
    cards = {name: steady(reading_choices.job(strategy=name)) for name in reading_choices.STRATEGIES}
    peaks = {name: card.summary.peak_memory_bytes.total for name, card in cards.items()}
    steps = {name: card.summary.step_time_s.median for name, card in cards.items()}
    mine = choice["strategy"]
    for name in cards:
        better = peaks[name] < peaks[mine] and steps[name] <= 1.001 * steps[mine]
        assert not better and (name == mine or peaks[name] != peaks[mine] or steps[name] >= steps[mine]), name


def test_the_statement_names_the_card():
    assert f"a card of {on_ranks.CARD / 1e6:g} MB" in CHOOSE.statement


def test_hidden_is_a_part_of_the_passage():
    waited = [
        training_on_ranks.hidden_part(SimpleNamespace(start_ns=10, end_ns=20, waited_ns=waited))
        for waited in (4, None, 12)
    ]
    assert waited == [0.6, 1.0, 0.0]


@pytest.mark.timeout(300)
def test_the_time_on_the_link_is_bytes_over_bandwidth(tmp_path):
    specs = [
        RunSpec(strategy=name, model="gpt-tiny", steps=1, link="100MB/s", device="cpu")
        for name in ("no_shard", "full_shard")
    ]
    runs = [RunRecord.load(record.path) for record in compare(specs, directory=tmp_path)]
    for record in runs:
        assert reading_choices.on_the_link(record) == pytest.approx(
            record.summary.comm.bytes_per_step / 100e6, rel=0.01
        )


def test_the_lab_is_shown_by_a_cell_that_runs_alone():
    cells = [
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    (cell,) = [cell for cell in cells if "StrategyLab(" in cell]
    assert "from fsdplab.widgets import StrategyLab" in cell
    namespace: dict = {}
    exec(cell.rpartition("\n")[0], namespace)
    assert not namespace["lab"].records and len(namespace["lab"].state.request.specs) == 5
