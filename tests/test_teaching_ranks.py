"""Cells and checks on real ranks: how each way to fail is told."""

from __future__ import annotations

import re

import pytest
from IPython.core.interactiveshell import InteractiveShell

from fsdplab import teaching
from fsdplab.sessions import Failure
from fsdplab.teaching import collectives
from fsdplab.teaching.core import cell_runs, checking, on_ranks, registry, run_submission
from fsdplab.teaching.core.course_state import open_course
from tests.lesson_cells import source_of
from tests.solutions import Mistake, mistakes_of, try_ended

RING = registry.find("01.ring_all_gather")
EXERCISES = [registry.find("00.hello_ranks"), RING]


@pytest.fixture
def course(workspace):
    """That learner's course, open."""
    from fsdplab.teaching.core import course_state

    yield open_course("learner", workspace.path)
    course_state._open.clear()


def ended(ends: str, line: str) -> Mistake:
    """The ring's known mistake that ends so and has this line."""
    return next(known for known in mistakes_of(RING) if known.ends == ends and line in known.source)


@pytest.mark.parametrize("line", ["dst=rank + 1)", "src=rank - 1)"])
def test_a_message_to_no_rank_is_explained(workspace, line):
    """gloo ends the process with SIGSEGV; the call is refused before."""
    known = ended("raises", line)
    feedback = try_ended(RING, known, workspace)
    assert "the ring is not closed" in feedback.cause
    assert (
        "which does not exist: there are ranks 0 to 2" in feedback.got and 'ring_all_gather.py", line 1' in feedback.got
    )


def test_a_check_that_raises_shows_the_learners_line_and_unlocks_a_hint(course):
    known = ended("raises", "sending = isend(")
    course.workspace.save(RING.id, known.source)
    report = str(checking.grade(RING.id, hints=1))
    assert "NameError: name 'isend' is not defined" in report
    assert "01.ring_all_gather.py" in report and "sending = isend(whole[(rank - step) % n]" in report
    assert "Hint 1 (a nudge)" in report and course.workspace.failed_tries(RING.id) == 1


@pytest.mark.parametrize("line", ["dist.send(whole[(rank - step) % n]", "dist.recv(whole[(rank - step - 1) % n]"])
def test_a_check_that_hangs_ends_within_its_limit_and_shows_the_line(workspace, line):
    known = next(known for known in mistakes_of(RING) if f"step in range(n - 1):\n        {line}" in known.source)
    feedback = try_ended(RING, known, workspace, hangs_for=3.0)
    assert known.ends == "hangs" and "deadlock" in feedback.cause
    assert "did not return within 3 s" in feedback.headline
    assert "01.ring_all_gather.py" in feedback.got and f": {line}" in feedback.got


def test_the_references_give_what_torch_and_arithmetic_give(workspace):
    seen = run_submission.behaviours(
        [(exercise, workspace.save(exercise.id, exercise.reference)) for exercise in EXERCISES], workspace
    )
    hello, ring = ([[trial.returned for trial in ranks] for ranks in behaviour.trials] for behaviour in seen)
    assert [facts["the returned value"] for facts in hello[0]] == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]
    for rank, facts in enumerate(ring[1]):  # whole numbers: 1000 * owner + place
        own = [facts["the own block"], *(facts[f"the block that step {step} brings"] for step in range(2))]
        owners = [(rank - far) % 3 for far in range(3)]
        assert [block.tolist() for block in own] == [[1000 * owner + i for i in range(4)] for owner in owners]


def test_a_rank_that_returned_and_still_waits_is_told_apart(monkeypatch):
    reported = []
    monkeypatch.setattr(on_ranks.sys, "excepthook", lambda kind, error, trace: reported.append(kind))
    on_ranks._give_up(8.0, "no file on this stack")
    on_ranks._give_up(8.0, __file__)
    assert reported == [on_ranks.LeftUnfinished, on_ranks.StillWaiting]


WAITING = "Rank 1 raised: StillWaiting: no return after 8 s"
UNFINISHED = "Rank 1 raised: LeftUnfinished: it returned, but 10 s later the ranks could still not meet"
ERRORS = (
    "NameError: name 'world_size' is not defined", "RuntimeError: Timed out waiting for recv", "IndexError: 3",
)  # fmt: skip
# failures that are one to a learner, line by line
FAILURES = (
    [Failure("raised", WAITING, 1)],
    [Failure("raised", UNFINISHED, 1)],
    *([Failure("raised", "Rank 1 raised.", 1, traceback=f"...\n{error}")] for error in ERRORS),
    [
        Failure("hung", "Rank 2 did not start within the time limit.", 2),
        Failure("timeout", "The ranks still made progress.", 0),
    ],
    [Failure("died", "Rank 1 died: it ended with SIGSEGV.", 1)],
)


def test_every_way_to_fail_has_a_cause_of_its_own_and_names_its_rank():
    causes = [{checking.feedback_on_failure(RING, each).cause for each in alike} for alike in FAILURES]
    assert all(len(each) == 1 and all(each) for each in causes)
    assert len(set.union(*causes)) == len(FAILURES)
    for failure in (each for alike in FAILURES for each in alike):
        assert checking.feedback_on_failure(RING, failure).rank == failure.rank


def test_a_passed_check_makes_the_learners_version_the_one_in_use(course, capsys):
    exercise = registry.find("00.hello_ranks")
    course.workspace.save(exercise.id, exercise.reference)
    teaching.check(exercise.id)
    assert "00.hello_ranks: passed." in capsys.readouterr().out
    assert teaching.solution_file(exercise.id) == course.workspace.file_of(exercise.id)


def test_a_cell_runs_on_fresh_ranks(course, capsys):
    shell = InteractiveShell()
    teaching.start(workspace=course.workspace.path, shell=shell)
    capsys.readouterr()
    course.workspace.save("00.hello_ranks", registry.find("00.hello_ranks").reference)
    cell = (
        "from my_fsdp import hello_ranks\nprint(hello_ranks())\ntotal = torch.tensor([rank +"
        " 1])\ndist.all_reduce(total)\nif rank == 1:\n    print('I am last')\ntotal"
    )
    shell.run_cell_magic("ranks", "2", cell)
    # as they come; those of a rank in order
    lines = sorted(capsys.readouterr().out.splitlines(), key=lambda line: line.partition("]")[0])
    assert lines == [
        "[rank 0] rank 0 of 2",
        "[rank 0] tensor([3])",
        "[rank 1] rank 1 of 2",
        "[rank 1] I am last",
        "[rank 1] tensor([3])",
    ]


def test_a_cell_that_fails_on_a_rank_says_which_and_where(course):
    with pytest.raises(
        cell_runs.CellFailed, match="(?s)Rank 1 raised.*line 2.*assert rank == 0.*AssertionError"
    ) as failed:
        cell_runs.run_cell_on_ranks("x = 1\nassert rank == 0, x\ndist.barrier()", 2)
    assert failed.value._render_traceback_() == [str(failed.value)] and "on_ranks.py" not in str(failed.value)


def test_the_lesson_on_collectives_measures_what_it_says(course):
    bandwidth = collectives.measure_bandwidth(sizes=(4000, 400_001), world_size=2, repeats=2)
    assert {timing.kind for timing in bandwidth.timings} == {
        "all_gather",
        "reduce_scatter",
        "gloo's reduce_scatter",
        "all_reduce",
    }
    assert {timing.nbytes for timing in bandwidth.timings} == {4000, 400_000} and all(
        timing.seconds > 0 for timing in bandwidth.timings
    )


def test_the_lesson_on_composition(course):
    rows = {row[0]: row[1:] for row in collectives.watch(world_size=2, block=1).rows}
    assert rows == {"rank 0": ("1 2", "11", "11 22", "11 22"), "rank 1": ("10 20", "22", "11 22", "11 22")}
    printed = cell_runs.run_cell_on_ranks(source_of("01", "compose").partition("\n")[2], 2)
    assert all(text.startswith("0 of 1,000,002 floats differ") for text in printed)


def test_without_a_message_ranks_go_apart(course):
    """Adam's first step moves a weight by about the learning rate, up on one rank and down on the other."""
    printed = cell_runs.run_cell_on_ranks(source_of("03", "run-drift").partition("\n")[2], 2)
    assert [re.findall(r"step 0: .* apart by (\S+)", text) for text in printed] == [["0.0060"], ["0.0060"]]


def test_the_ring_is_counted(course, capsys):
    assert collectives.count_ring(megabytes=0.3, world_size=3) == [[100_000] * 2] * 3
    assert "using the reference ring_all_gather" in capsys.readouterr().out
