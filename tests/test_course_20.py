"""Notebook 20: learners' files, right and wrong, in every stage; the steady clock; a class's leaderboard.

A learner's file is `capstone/base.py` with the functions of one file in `capstone/right` or `capstone/wrong` in place
of its own. A wrong one's docstring says in which stage it fails first, and what the report must say.
"""

from __future__ import annotations

import ast
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdplab.figures import alt_text
from fsdplab.sessions import RanksFailed
from fsdplab.teaching import own_engine
from fsdplab.teaching.__main__ import main
from fsdplab.teaching.core import checking, judging, registry, run_submission
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.core.verdicts import Feedback
from fsdplab.teaching.core.workspace import Workspace
from fsdplab.teaching.lessons.nb20_own_fully_shard import leaderboard
from fsdplab.teaching.lessons.nb20_own_fully_shard.steady_order import (
    Moment,
    exposed_ms,
    replayed,
    waited_for_at_once,
)  # fmt: skip
from tests.tiers import values_of

CAPSTONE = Path(__file__).with_name("capstone")
RIGHT = ["", *(path.stem for path in sorted((CAPSTONE / "right").glob("*.py")))]
WRONG = sorted((CAPSTONE / "wrong").glob("*.py"))

# The wrong files that raise on ranks, which ends a launch: each is tried in one of its own.
RAISE = {"shards_again", "autograd_sees_the_copy", "other_wholes_in_backward", "a_piece_for_every_rank",
         "frozen_units_are_not_unsharded"}  # fmt: skip

OTHERS = pytest.mark.full("other files of the same kind")
pytestmark = pytest.mark.timeout(900)


def file_of(name: str, folder: str = "right") -> str:
    """A learner's file: the base, and the functions of another file after it."""
    base = (CAPSTONE / "base.py").read_text(encoding="utf-8")
    return base + (f"\n\n{(CAPSTONE / folder / f'{name}.py').read_text(encoding='utf-8')}" if name else "")


def verdicts(stage: str, sources: dict[str, str], workspace: Workspace) -> dict[str, Feedback | None]:
    """The feedback on each file in one stage, all tried in one launch; one by one where a file ends that."""
    exercise = registry.find(stage, Exercise)
    paths = {name: Workspace(workspace.path / stage / (name or "base")).save(leaderboard.WHOLE, source)
             for name, source in sources.items()}  # fmt: skip
    try:
        seen = run_submission.behaviours([(exercise, path) for path in paths.values()], workspace)
    except RanksFailed as failure:
        if len(sources) == 1:
            return {name: checking.feedback_on_failure(exercise, failure.report) for name in sources}
        found = {}
        for name, source in sources.items():
            found |= verdicts(stage, {name: source}, workspace)
        return found
    return {name: judging.judge(exercise, each, None) for name, each in zip(paths, seen, strict=True)}


def chosen(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """The values of a grid that this run has chosen: all that share a launch are tried with the first of them."""
    here = [item for item in request.session.items if item.path == request.path]
    return [values[name] for item in here if name in (values := values_of(item))]


def in_tiers(values: Sequence[Any]) -> list[Any]:
    """The default tier has the first value of a grid, the full tier the others."""
    return [values[0], *(pytest.param(value, marks=OTHERS) for value in values[1:])]


@pytest.fixture(scope="module")
def of_wrong(request, workspace) -> dict[str, Feedback | None]:
    """The feedback on every wrong file in the stage that its docstring names."""
    found: dict[str, Feedback | None] = {}
    paths = chosen(request, "wrong")
    for stage in leaderboard.STAGES:
        sources = {path.stem: file_of(path.stem, "wrong") for path in paths if expected(path)[0] == stage}
        for name in RAISE & sources.keys():
            found |= verdicts(stage, {name: sources.pop(name)}, workspace)
        found |= verdicts(stage, sources, workspace) if sources else {}
    return found


def expected(path: Path) -> tuple[str, str]:
    """(stage, what the report must say) of a wrong file: the first line of its docstring."""
    line = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()[0]
    stage, _, says = line.partition(": ")
    return stage, says


@pytest.mark.parametrize("wrong", in_tiers(WRONG), ids=lambda path: path.stem)
def test_a_wrong_file_is_told_its_cause(of_wrong, wrong):
    feedback, (_, says) = of_wrong[wrong.stem], expected(wrong)
    assert feedback is not None, "this is wrong, and passed"
    assert says in f"{feedback.cause} {feedback.got}" and feedback.rank is not None


@pytest.fixture(scope="module")
def of_right(request, workspace) -> dict[tuple[str, str], Feedback | None]:
    """The feedback on every right file in the two stages that ask for all that the others do."""
    found = {}
    names = chosen(request, "right")
    for stage in ("20.overlap", "20.special"):
        for name, feedback in verdicts(stage, {name: file_of(name) for name in names}, workspace).items():
            found[stage, name] = feedback
    return found


@pytest.mark.parametrize("right", in_tiers(RIGHT))
def test_a_right_file_passes_however_it_is_written(of_right, right):
    assert [of_right[stage, right] for stage in ("20.overlap", "20.special")] == [None, None]


# --- the steady clock

STEP = [
    Moment("issue", "all_gather", 0, 1.0), Moment("wait", "all_gather", 0), Moment("issue", "all_gather", 1, 1.0),
    Moment("forward", "block 0"), Moment("wait", "all_gather", 1), Moment("forward", "block 1"),
    Moment("backward", "block 1"), Moment("issue", "reduce_scatter", 2, 1.0), Moment("backward", "block 0"),
    Moment("wait", "reduce_scatter", 2),
]  # fmt: skip


def test_the_steady_clock_by_hand():
    """Gathers 0 to 3 and 3 to 6; forwards 3 to 7 and 7 to 11; backwards 11 to 19 and to 27, the reduction 19 to 22."""
    bars = replayed(STEP)
    assert [(bar.start, bar.end) for bar in bars if bar.lane == "compute"] == [(3, 7), (7, 11), (11, 19), (19, 27)]
    assert exposed_ms(bars) == 3 == exposed_ms(bars, "forward") and exposed_ms(bars, "backward") == 0
    at_once = replayed(waited_for_at_once(STEP))
    assert exposed_ms(at_once) == 9 and exposed_ms(at_once, "backward") == 3


def test_what_the_notebook_says_of_four_blocks(course):
    """Computing 4 x 12 + 6 ms; waited for at once 4 x 9 + 1 ms; one unit ahead only the first and the last messages."""
    step = own_engine.order(blocks=4)
    computing = sum(bar.end - bar.start for bar in replayed(step.moments) if bar.lane == "compute")
    assert computing == 4 * 12 + 6 and step.exposed_at_once_ms == pytest.approx(37, abs=0.1)
    assert step.exposed_ms < 6 and "rank waits" in alt_text(step.figure())


def test_the_loop_comes_after_the_check_that_lets_a_learners_function_in():
    notebook = (CAPSTONE.parents[1] / "notebooks" / "20_own_fully_shard.ipynb").read_text(encoding="utf-8")
    sources = ["".join(cell["source"]) for cell in json.loads(notebook)["cells"]]
    asks = next(at for at, source in enumerate(sources) if 'teaching.use("20.fully_shard")' in source)
    assert sources.index('check("20.fully_shard")') < asks


# --- a class


def test_a_leaderboard_of_a_class(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(leaderboard, "STAGES", ("20.shards", "20.overlap"))
    for learner, source in (("ada", file_of("")), ("bob", file_of("no_clone", "wrong"))):
        Workspace(tmp_path / learner / "my_fsdp").save(leaderboard.WHOLE, source)
    (tmp_path / "cyd.py").write_text(file_of("nothing_ahead", "wrong"))
    assert main(["leaderboard", str(tmp_path), "--out", str(tmp_path / "class.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "class.csv").open()))
    assert [(row["learner"], row["stages"]) for row in rows] == [("ada", "2"), ("cyd", "1"), ("bob", "0")]
    assert float(rows[0]["exposed_ms"]) < 10 and rows[0]["peak_mb"] == "" and int(rows[0]["lines"]) > 120
    assert "clone it" in rows[2]["stopped_by"] and "3 learners" in capsys.readouterr().out


def test_a_file_that_is_no_text_does_not_end_the_leaderboard_of_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(leaderboard, "STAGES", ())
    (tmp_path / "ada.py").write_bytes(b"# gr\xfcn\n")
    (tmp_path / "bob.py").write_text("pass\n")
    assert main(["leaderboard", str(tmp_path), "--out", str(tmp_path / "class.csv")]) == 0
    rows = {row["learner"]: row for row in csv.DictReader((tmp_path / "class.csv").open())}
    assert rows["ada"]["stopped_by"].startswith("ada.py cannot be read: ") and rows["bob"]["stopped_by"] == ""
    assert "ada: 0 of 6 stages; ada.py cannot be read" in capsys.readouterr().out


def test_a_folder_without_files_is_refused(tmp_path, capsys):
    assert main(["leaderboard", str(tmp_path)]) == 2 and "give the class's folder" in capsys.readouterr().err


def test_a_stage_that_passed_counts_until_the_file_changes(tmp_path):
    workspace = Workspace(tmp_path / "my_fsdp")
    workspace.save(leaderboard.WHOLE, "one = 1")
    workspace.note_pass("20.shards", "one = 1", leaderboard.WHOLE)
    assert workspace.has_passed("20.shards") and not workspace.has_passed("20.forward")
    workspace.save(leaderboard.WHOLE, "two = 2")
    assert not workspace.has_passed("20.shards")
