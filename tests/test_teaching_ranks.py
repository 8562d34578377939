"""Cells and checks on real ranks: how each way to fail is told."""

from __future__ import annotations

import pytest
from IPython.core.interactiveshell import InteractiveShell

from fsdplab import teaching
from fsdplab.sessions import Failure
from fsdplab.teaching import collectives
from fsdplab.teaching.core import cell_runs, checking, on_ranks, raised, registry, run_submission
from fsdplab.teaching.core.course_state import open_course
from fsdplab.teaching.core.exercise_file import Mistake
from tests.solutions import try_ended

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
    return next(known for known in RING.mistakes if known.ends == ends and line in known.source)


@pytest.mark.parametrize("line", ["dst=rank + 1)", "src=rank - 1)"])
def test_a_message_to_no_rank_is_explained(workspace, line):
    """gloo ends the process with SIGSEGV; the call is refused before."""
    known = ended("raises", line)
    feedback = try_ended(RING, known, workspace)
    assert known.cause in feedback.cause
    assert (
        "which does not exist: there are ranks 0 to 2" in feedback.got and 'ring_all_gather.py", line 1' in feedback.got
    )


def test_a_check_that_raises_shows_the_learners_line_and_unlocks_a_hint(course):
    known = ended("raises", "sending = isend(")
    course.workspace.save(RING.id, known.source)
    report = str(checking.grade(RING.id, hints=1))
    assert known.cause in report and "NameError: name 'isend' is not defined" in report
    assert "01.ring_all_gather.py" in report and "sending = isend(whole[(rank - step) % n]" in report
    assert "Hint 1 (a nudge)" in report and course.workspace.failed_tries(RING.id) == 1


@pytest.mark.parametrize("line", ["dist.send(whole[(rank - step) % n]", "dist.recv(whole[(rank - step - 1) % n]"])
def test_a_check_that_hangs_ends_within_its_limit_and_shows_the_line(workspace, line):
    known = next(known for known in RING.mistakes if f"step in range(n - 1):\n        {line}" in known.source)
    feedback = try_ended(RING, known, workspace, hangs_for=3.0)
    assert known.ends == "hangs" and known.cause in feedback.cause
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
    "TypeError: Expected parameter `x` of type\n  but got",
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


@pytest.mark.parametrize(
    "waits,says",
    [("", "only begins the message"), ("work.wait", "only begins the message"), ("work.wait()", "deadlock")],
)
def test_a_rank_that_hangs_after_a_message_that_nobody_waits_for_is_told_of_it(waits, says):
    failure = Failure("raised", "Rank 1 raised: StillWaiting: no return after 8 s", 1)
    feedback = checking.feedback_on_failure(RING, failure, f"work = dist.isend(mine, dst=1)\n{waits}")
    assert says in feedback.cause


@pytest.mark.parametrize(
    "error,cause",
    [
        ("TypeError: unsupported operand type(s) for /: 'NoneType' and 'int'", "go on with that tensor"),
        ("TypeError: object of type 'method' has no len()", "not called"),
        ("UnboundLocalError: cannot access local variable 'bucket' where it is not", "makes the name local"),
        ("UnboundLocalError: local variable 'bucket' referenced before assignment", "makes the name local"),
        ("RuntimeError: attempting to assign a gradient of size '[6192]' to a tensor of size", "view_as"),
        ("RuntimeError: Tensors must have same number of dimensions: got 2 and 1", "flatten each one"),
        ("ValueError: torch.cat(): expected a non-empty list of Tensors", "ask before whether there is anything"),
        ("RuntimeError: stack expects a non-empty TensorList", "begins with `torch.zeros(())`"),
        ("ValueError: Parameter 'head.weight' is shared with a parameter already managed by", "one unit for both"),
        ("RuntimeError: ProcessGroupGloo::allgather: invalid tensor size at index 2", "pad the short ones"),
        ("TypeError: Expected parameter `output` of type torch.Tensor but got <class 'NoneType'>", "something is None"),
        ("RuntimeError: split_with_sizes expects split_sizes to sum exactly to 9", "`len` counts rows"),
        ("AttributeError: 'dict' object has no attribute 'state'", "not `row.name`"),
        ("RuntimeError: setStorage: sizes [3, 2] are out of bounds for storage of size 0", "no memory"),
        ("RuntimeError: Check failed: outputs[0].sizes().vec() == inputs[0][i].sizes().vec()", "pad the short ones"),
        ("RuntimeError: The size of tensor a (7) must match the size of tensor b (9)", "different rows"),
        ("IndexError: tuple index out of range", "fewer pieces than ranks"),
        ("RuntimeError: post accumulate grad hooks should return None.", "a hook returns nothing"),
        ("KeyError: 'zero-1'", "the keys are those in the stub"),
        ("TypeError: Invalid function argument. Expected parameter `output` of type torch.Tensor", "comes first"),
        ("ValueError: invalid literal for int() with base 10: 'step-8'", "with `split` or `removeprefix`"),
        ("ValueError: max() arg is an empty sequence", "`max(..., default=...)`"),
        ("RuntimeError: Split sizes doesn't match total dim 0 size", "do not add up to the tensor"),
        (
            "RuntimeError: [enforce fail at /x/alltoall.cc:29] in->size % context->size == 0.",
            "all blocks are equally long",
        ),
        (
            "RuntimeError: [enforce fail at /x/alltoallv.cc:138] inLengthPerRank[myRank] == outLengthPerRank[myRank].",
            "is as long as what that rank expects",
        ),
        ("RuntimeError: shape '[-1, 2]' is invalid for input of size 9", "whose rows and columns"),
        ("TypeError: 'int' object is not iterable", "a pair is one argument"),
        ("TypeError: list.append() takes exactly one argument (2 given)", "`steps.append((a, b))`"),
        ("TypeError: slice indices must be integers or None or have an __index__ method", "a tuple of endings"),
        (
            "RuntimeError: The size of tensor a (2) must match the size of tensor b (6) at non-singleton dimension 1",
            "rows",
        ),
        (
            "RuntimeError: The expanded size of the tensor (2) must match the existing size (0) at",
            "as much as there is",
        ),
        ("TypeError: new_zeros(): argument 'size' failed to unpack the object at pos 2", "a star hands them over"),
        ("RuntimeError: invalid output tensor list at index 0 (expected length 3, got 2)", "one tensor for each rank"),
        ("TypeError: resize_() missing 1 required positional argument: 'nbytes'", "lacks an argument"),
        ("TypeError: hooks returned NoneType; return before_forward", "the function returns nothing"),
        ("ValueError: trying to initialize the default process group twice!", "leave `init_process_group` out"),
        ("RuntimeError: [enforce fail at pair.cc:801] Pair is not connected", "a rank names itself"),
        ("RuntimeError: Read error [127.0.0.1]:46317: Connection reset by peer.", "the same collective calls"),
        ("but got <class 'int'> instead.", "a tensor is expected"),
        ("TypeError: recv() got an unexpected keyword argument 'dst'", "no argument of that name"),
        ('TypeError: can only concatenate str (not "int") to str', "an f-string"),
        ("ValueError: torch.cat(): expected a non-empty list of Tensors", "`x.new_empty(0)`"),
        ("ValueError: Invalid usage of tensors with different dtypesFound torch.float32 and torch.int64", "one dtype"),
        (
            "RuntimeError: Check failed: outputTensors[i].dtype() == inputTensors[i].dtype() (float vs. long",
            "one dtype",
        ),
        ("RuntimeError: ProcessGroupGloo::allgather: invalid tensor type at index 0", "one dtype"),
        ("IndexError: list index out of range", "behind a list's last place there is nothing"),
    ],
)
def test_an_error_of_python_or_torch_is_led_back_to_the_mistake(error, cause):
    assert cause in raised.cause_of(error)


def test_a_shape_of_fewer_dimensions_is_told_from_a_list_of_fewer_pieces():
    error = "IndexError: tuple index out of range"
    assert "`x.shape[1:]`" in raised.cause_of(error, line=f"mine = torch.zeros(c, whole.shape[1])\n{error}")
    assert "fewer pieces than ranks" in raised.cause_of(error, line=f"return whole.chunk(n)[rank]\n{error}")


def test_none_in_a_pure_function_comes_from_no_collective():
    error = "AttributeError: 'NoneType' object has no attribute 'items'"
    assert "ask before, `is not None`" in raised.cause_of(error, pure=True)
    assert "go on with that tensor" in raised.cause_of(error)


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
    assert [row[2] for row in collectives.compose(world_size=2, elements=10_001).rows] == ["0", "0"]


def test_the_ring_is_counted(course, capsys):
    assert collectives.count_ring(megabytes=0.3, world_size=3) == [[100_000] * 2] * 3
    assert "using the reference ring_all_gather" in capsys.readouterr().out
