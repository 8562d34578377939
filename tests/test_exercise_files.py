"""An exercise is one file: what its reader takes from it, which files it refuses, and how a wrong solution is led back
to its cause.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdplab.sessions import Failure
from fsdplab.sessions.launch.failure_report import UNLIKE
from fsdplab.teaching.core import answers, checking, registry
from fsdplab.teaching.core.exercise import Choice, Question, questions_of
from fsdplab.teaching.core.exercise_file import Exercise, ExerciseError
from fsdplab.teaching.core.quantities import QuantityError, quantity
from fsdplab.teaching.core.undefined_memory import UndefinedMemory

HEAD = '''"""Twice as much

Write double(x): twice x.

1. A nudge
   on two lines.
2. A pointer.
3. `2 * x`.
"""

'''
DOUBLE = (
    HEAD
    + '''import torch


def double(x):
    """Twice x."""
    ### BEGIN SOLUTION  one line
    made = 2 * x
    return made
    ### END SOLUTION


# ---- check: on 2 ranks, pure, within 1e-6, in 1 s


def cases(rank, n):
    yield "numbers", torch.tensor([1.0, 2.0]) * (rank + 1)
    yield "more", torch.tensor([3.0]) * (rank + 1)


SAYS = {"the returned value": "twice x is x + x"}
'''
)


def exercise_of(folder: Path, text: str, name: str = "double") -> Exercise:
    """The exercise 78.<name> with this text."""
    path = folder / "78" / f"{name}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return Exercise(path)


@pytest.fixture
def double(tmp_path) -> Exercise:
    return exercise_of(tmp_path, DOUBLE)


def test_a_file_is_read_from_top_to_bottom(double):
    assert (double.id, double.function, double.title) == ("78.double", "double", "Twice as much")
    assert double.statement == "Write double(x): twice x."
    assert double.hints == ("A nudge on two lines.", "A pointer.", "`2 * x`.")
    assert double.stub == 'import torch\n\n\ndef double(x):\n    """Twice x."""\n    ...  # one line\n'
    assert double.reference.endswith("    made = 2 * x\n    return made\n") and "#" not in double.reference
    settings = double.settings
    assert (settings.world_size, settings.tolerance, settings.time_limit, settings.pure) == (2, 1e-6, 1.0, True)
    assert not settings.facts_only and double.complaints() == []


def test_a_stub_may_be_code_that_works(tmp_path):
    text = DOUBLE.replace("    made = 2 * x\n", "    ## made = x  # mend this\n    made = 2 * x\n")
    assert exercise_of(tmp_path, text).stub.endswith("    made = x  # mend this\n")


@pytest.mark.parametrize(
    "old,new,says",
    [
        ("# ---- check: on 2 ranks, pure", "# ---- check: with 2 ranks, pure", "'with 2 ranks' in the line of the"),
        ("# ---- check", "# checks", "no line `# ---- check: ...`"),
    ],
)
def test_what_is_no_exercise_is_refused_with_what_is_expected(tmp_path, old, new, says):
    exercise = exercise_of(tmp_path, DOUBLE.replace(old, new, 1))
    with pytest.raises(ExerciseError, match=says):
        assert exercise.settings


@pytest.mark.parametrize(
    "old,new,says",
    [
        ("2. A pointer.\n", "", "expected three hints"),
        ("Write double(x): twice x.\n\n", "", "no statement"),
        ("### BEGIN SOLUTION", "# solution", "no part to write"),
    ],
)
def test_what_an_exercise_lacks_is_told(tmp_path, old, new, says):
    exercise = exercise_of(tmp_path, DOUBLE.replace(old, new, 1).replace("### END SOLUTION", "# the end"))
    assert says in " ".join(exercise.complaints())


def test_a_folder_of_exercises_is_registered(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    exercise_of(tmp_path, DOUBLE)
    registry.register(tmp_path / "78")
    assert isinstance(registry.find("78.double"), Exercise)
    exercise_of(tmp_path, DOUBLE.replace("Twice as much", "Edited").replace('"numbers"', '"other"'))
    registry.register(str(tmp_path / "78"))
    edited = registry.find("78.double", Exercise)
    assert edited.title == "Edited" and next(edited.module().cases(0, 2))[0] == "other"
    (tmp_path / "b").mkdir()
    with pytest.raises(ValueError, match="78.double is registered already"):
        registry.register(exercise_of(tmp_path / "b", DOUBLE).path.parent)
    with pytest.raises(ValueError, match="holds no exercise"):
        registry.register(str(tmp_path / "79"))


@pytest.mark.parametrize(
    "old,new,says",
    [
        ("def cases", "def examples", "defines no function cases"),
        ("def double(x):", "def twice(x):", "defines no function double"),
        ("    made = 2 * x\n", "    made = 2 *\n", "double.py: cannot be used: SyntaxError"),
        ("2. A pointer.\n", "", "expected three hints"),
    ],
)
def test_a_file_that_lacks_something_is_refused_when_it_is_registered(tmp_path, monkeypatch, old, new, says):
    monkeypatch.setattr(registry, "_registered", {})
    exercise_of(tmp_path, DOUBLE.replace(old, new))
    with pytest.raises(ExerciseError, match=says):
        registry.register(tmp_path / "78")
    assert registry.items_of("78") == ()


def test_what_left_a_folder_is_gone_and_the_courses_ids_stay_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    exercise_of(tmp_path, DOUBLE.replace("double", "twice"), "twice")
    exercise_of(tmp_path, DOUBLE)
    registry.register(tmp_path / "78")
    (tmp_path / "78" / "twice.py").unlink()
    registry.register(tmp_path / "78")
    assert [item.id for item in registry.items_of("78")] == ["78.double"]
    (tmp_path / "05").mkdir()
    (tmp_path / "05" / "shard.py").write_text(DOUBLE.replace("double", "shard"))
    with pytest.raises(ValueError, match="05.shard is registered already; give the exercise of .*05 an id"):
        registry.register(tmp_path / "05")
    assert registry.find("05.shard", Exercise).title == "Keep one shard"


# --- one diagnosis for all


def feedback(exercise: Exercise, workspace, body: str):
    path = workspace.save(exercise.id, body if "def " in body else f"import torch\n\n\ndef double(x):\n    {body}\n")
    return checking.feedback_on(exercise, path, workspace)


@pytest.mark.parametrize(
    "body,says",
    [
        ("return x + x", None),
        ("print(2 * x)", "the function returns nothing, or None, in this case; it printed 'tensor"),
        ("return x / 0 + [1][2]", "read the last line first"),
        ("return (2 * x).double()", "torch's default dtype"),
        ("return 10 * x", "twice x is x + x. This is 5 times what is expected"),
        ("return torch.tensor([4.0, 8.0][: len(x)]) if len(x) > 1 else 2 * x", "This is what rank 1 must give"),
        ("return 2 * x + 1", "twice x is x + x"),
        ("return 'two'", "twice x is x + x"),
        ("return ...", "the stub's dots are still there"),
        ("return np.float64(2) * x", "its own imports"),
        ("if len(x) > 1:\n        return 2 * x", "returns nothing, or None, in this case"),
        ("import numpy\n    return torch.tensor(numpy.float32(2)) * x", None),
        ("while True: pass", "a loop that never ends"),
    ],
)
def test_a_wrong_solution_is_told_what_is_wrong(double, workspace, body, says):
    found = feedback(double, workspace, body)
    assert found is None if says is None else says in found.cause, found


def test_a_wrong_answer_reads_well(double, workspace):
    found = feedback(double, workspace, "return 2 * x + 1")
    assert found.headline == "double returns a wrong value for rank 0 (case: numbers)." and found.got == "3.0"
    endless = feedback(double, workspace, "while True:\n        x += 1")
    assert "did not return within 1 s" in endless.headline and "it stood in 78.double.py, line" in endless.got


FACTS = (
    DOUBLE.split("# ---- check")[0]
    + """# ---- check: pure, facts only


def cases(rank, n):
    yield "a number", 4


def observe(double, x):
    value = double(x)
    return {"it is even": value % 2 == 0, "_value": value, "what is missing": 8 - value}


EXPECTED = {"it is even": True, "what is missing": 0}
SAYS = {
    "it is even": "an even number is twice something",
    "what is missing": lambda got, right: f"{got['_value']} lacks {got['what is missing']}",
}
"""
)


@pytest.mark.parametrize(
    "body,says",
    [
        ("return 8", None),
        ("return 7", "an even number is twice something"),
        ("return 6", "6 lacks 2"),
        ("pass", "the function returns nothing"),
        ("return [x]", "of another type than the statement asks for"),
    ],
)
def test_facts_are_judged_in_their_order_and_named_with_their_numbers(tmp_path, workspace, body, says):
    found = feedback(exercise_of(tmp_path, FACTS), workspace, body)
    assert found is None if says is None else says in found.cause, found


def test_facts_that_end_at_a_wrong_one_are_no_names_that_the_learner_left_out(tmp_path, workspace):
    early = FACTS.replace(
        "value = double(x)\n", 'value = double(x)\n    if value == 9:\n        return {"it is even": False}\n'
    )
    found = feedback(exercise_of(tmp_path, early), workspace, "return x + 5")
    assert found.cause == "an even number is twice something"  # not what the dict lacks


PAIR = '''"""A pair

Write double(x): a dict with the count and the value.

1. A nudge.
2. A pointer.
3. Two lines.
"""


def double(x):
    ### BEGIN SOLUTION
    return {"count": 1, "value": 2 * x}
    ### END SOLUTION


# ---- check: pure


def cases(rank, n):
    yield "a number", 4


SAYS = {"count": "one was counted"}
'''


@pytest.mark.parametrize(
    "value,says",
    [
        ('"count": 2, "value": 1', "one was counted. This is 2 times"),
        ('"count": 1.00001, "value": 2 * x', "one was counted"),  # and not "1 times what is expected"
        ('"count": 1, "value": 0 * x', "compare the two"),
        ('"count": 1, "values": 2 * x', "a value named 'value' is expected, this is count, values"),
        ('"count": 1, "value": None', "8 is expected, this is None"),
    ],
)
def test_the_first_fact_that_differs_is_told(tmp_path, workspace, value, says):
    cause = feedback(exercise_of(tmp_path, PAIR), workspace, f"return {{{value}}}").cause
    assert says in cause and ". This is 1 times" not in cause


def test_a_value_without_names_is_told_the_names(tmp_path, workspace):
    found = feedback(exercise_of(tmp_path, PAIR), workspace, "return 1, 2 * x")
    assert found.cause == "return a dict with the names count, value; what is returned is a value without names"


def test_an_error_names_the_case_that_raised_it(double, workspace):
    """Of two cases the second one has a single number."""
    found = feedback(double, workspace, "return torch.stack([2 * x[0], 2 * x[1]])")
    assert found.headline == "double raised an error (case: more)."
    assert found.got.splitlines()[0] == 'File "my_fsdp/78.double.py", line 5, in double'
    assert found.got.splitlines()[-1].startswith("IndexError: index 1 is out of bounds")


LARGEST = '''"""The largest

Write double(numbers): twice the largest number.

1. A nudge.
2. A pointer.
3. Two lines.
"""


def double(numbers):
    ### BEGIN SOLUTION
    return 2 * max(numbers)
    ### END SOLUTION


# ---- check: pure


def cases(rank, n):
    yield "two numbers", [4, 2]
'''


@pytest.mark.parametrize(
    "body,says",
    [
        ("return 2 * sorted(x)[-1]", None),
        ("x.sort()\n    return 2 * x[-1]", "the function changes `numbers` (case: two numbers)"),
        ("x.pop()\n    return 3 * x[-1]", "double returns a wrong value"),
    ],
)
def test_a_list_that_a_function_is_given_stays_as_it_is(tmp_path, workspace, body, says):
    """The argument has the statement's name in the report, whatever the learner calls it."""
    found = feedback(exercise_of(tmp_path, LARGEST), workspace, body)
    assert found is None if says is None else says in f"{found.headline} {found.got}", found


STEPS = (
    DOUBLE.split("# ---- check")[0]
    + """# ---- check: on 2 ranks, pure


def cases(rank, n):
    yield "two steps", 1.0 + rank


def observe(double, x):
    return {"step 0": double(x), "step 1": double(3 * x)}
"""
)


def test_the_rank_that_was_wrong_first_is_told(tmp_path, workspace):
    """Rank 1 is wrong from step 0 on (2 is doubled), rank 0 in step 1 (3 is): rank 1 is told, and step 0."""
    found = feedback(exercise_of(tmp_path, STEPS), workspace, "return 2 * x + (x > 1)")
    assert (found.rank, found.tensor, found.got) == (1, "step 0", "5.0")


PARTS = (
    DOUBLE.split("# ---- check")[0]
    + """# ---- check: pure


def cases(rank, n):
    yield "two tensors", torch.tensor([1.0, 2.0])


def observe(double, x):
    return {"gradients": {"a": double(x), "b": double(x + 1), "c": x}}
"""
)


@pytest.mark.parametrize(
    "body,says",
    [
        ("return 6 * x", "this is 3 times what is expected"),
        ("return 6 * x if x[0] == 1 else 2 * x", "this is 3 times what is expected"),  # the other is right
        ("return 6 * x if x[0] == 1 else 4 * x", "compare the two values"),
    ],
)
def test_a_factor_is_seen_in_tensors_by_name(tmp_path, workspace, body, says):
    """As of the gradients of a model, of which those of some parameters are not divided."""
    assert says in feedback(exercise_of(tmp_path, PARTS), workspace, body).cause


# --- on ranks

MEAN = '''"""The mean over ranks

Write mean(x): the mean of x over all ranks.

1. A nudge.
2. A pointer.
3. Divide.
"""

import torch
import torch.distributed as dist


def mean(x):
    """The mean over all ranks of x [2]."""
    ### BEGIN SOLUTION
    dist.all_reduce(x)
    return x / dist.get_world_size()
    ### END SOLUTION


# ---- check: on 2 ranks, within 1e-6


def cases(rank, n):
    yield "a vector", torch.arange(2.0) + 1 + 3 * rank
'''
MEANS = {
    "return 3 * x": "no collective was called",
    "dist.broadcast(x, src=0)\n    return x": "was called, which adds nothing up",
    "dist.all_reduce(x)\n    return x + 0": "a sum over the 2 ranks is that was not divided",
    "dist.all_reduce(x)\n    return x / 4": "once too often",
    "dist.reduce(x, dst=0)\n    return x / 2": "leaves its result on one rank only",
    "dist.all_reduce(x)\n    dist.all_reduce(x)\n    return x / 4": "fewer bytes bring the same values",
    "work = dist.all_reduce(x, async_op=True)\n    return x / 2": "never waited for",
    "dist.all_reduce(x)\n    if dist.get_rank() == 0:\n        return x / 2": "and rank 0 a value: every rank",
    "every = [torch.empty_like(x) for _ in range(2)]\n    dist.all_gather(every, x)\n    return sum(every) / 2": None,
}


@pytest.mark.parametrize("body,says", MEANS.items())
def test_a_wrong_solution_on_ranks_is_led_back_to_its_cause(tmp_path, workspace, body, says):
    exercise = exercise_of(tmp_path, MEAN, "mean")
    found = feedback(
        exercise, workspace, f"import torch\nimport torch.distributed as dist\n\n\ndef mean(x):\n    {body}\n"
    )
    assert found is None if says is None else says in found.cause, found


def test_a_message_that_is_not_waited_for_is_refused_though_the_values_are_right():
    source = "def double(x):\n    work = dist.all_reduce(x, async_op=True)\n"
    by_luck = checking.unwaited(None, source)
    assert "right by luck" in by_luck.headline and "call `.wait()`" in by_luck.cause
    assert checking.unwaited(None, source + "    work.wait()\n") is None


def test_memory_that_promises_nothing_holds_nonsense():
    with UndefinedMemory():
        made = torch.empty(2), torch.ones(2).new_empty(1), torch.empty_like(torch.ones(3, dtype=torch.int64))
        whole = torch.zeros(2)
    assert made[0].isnan().all() and made[1].isnan().all() and (made[2] == 113).all() and not whole.any()


def test_what_a_call_changes_does_not_reach_the_next(tmp_path, workspace):
    text = DOUBLE.replace('yield "numbers", torch.tensor', 'yield "numbers", WHOLE + 0 * torch.tensor', 1)
    shared = exercise_of(tmp_path, text.replace("def cases", "WHOLE = torch.ones(2)\n\n\ndef cases"))
    spoils = feedback(shared, workspace, "y = 2 * x\n    x.zero_()\n    return y")
    assert spoils is None


# --- questions

QUESTIONS = """# Questions

```python
from math import pi as full
```

## 78.area

How large
is it?

Right: `full * it["r"] ** 2` MB, within 2 %

- `right / full`: the circle
  is left out
- `8 * right`: bits

1. One.
2. Two
   lines.
3. Three.

Then: That is all.

## 78.which

Which?

- a) this: or that
  > no: a > b
  > and so on
- **b)** the other
  > yes.
"""


def test_questions_are_read_from_markdown(tmp_path):
    path = tmp_path / "questions.md"
    path.write_text(QUESTIONS)
    area, which = questions_of(path)
    assert isinstance(area, Question) and isinstance(which, Choice)
    assert (area.statement, area.unit, area.tolerance) == ("How large is it?", "MB", 0.02)
    assert area.right({"r": 2}) == pytest.approx(12.566, 1e-3) and area.explanation == "That is all."
    assert area.hints == ("One.", "Two lines.", "Three.")
    causes = [answers.slip_behind(area, value, {"r": 2}) for value in (4, 100.53)]
    assert causes == ["the circle is left out", "bits"]
    assert (which.right, which.options["a"], which.because["a"]) == ("b", "this: or that", "no: a > b and so on")


@pytest.mark.parametrize(
    "old,new,says",
    [
        ("Right: `full", "Right: full", "78.area cannot be read: expected the statement, Right:"),
        ("2. Two\n   lines.\n", "", "three hints"),
        ("- **b)**", "- b)", "78.which cannot be read: expected options"),
        ("  > yes.\n", "", "78.which cannot be read: expected options"),
        ("full * it", "full * * it", "78.area cannot be read"),
    ],
)
def test_a_question_that_cannot_be_read_is_named(tmp_path, old, new, says):
    path = tmp_path / "questions.md"
    path.write_text(QUESTIONS.replace(old, new, 1))
    with pytest.raises(ExerciseError, match=says):
        list(questions_of(path))


@pytest.mark.parametrize(
    "written,unit,value",
    [
        ("8 bytes", "B", 8), ("16 bytes a parameter", "B", 16), ("2 times", "x", 2), ("37 messages", "", 37),
        ("60 all_reduces", "", 60), ("5 percent", "%", 5), ("3 MB per rank", "MB", 3), ("about 547 MB", "MB", 547),
        ("~3 ms", "ms", 3), ("547 megabytes", "MB", 547), ("547 MB per GPU", "MB", 547), ("8 Mbit", "MB", 1),
    ],
)  # fmt: skip
def test_units_are_read_as_words_too(written, unit, value):
    assert quantity(written, unit) == value


def test_words_are_no_units_where_the_question_has_one():
    with pytest.raises(QuantityError, match="unknown unit"):
        quantity("8 messages", "MB")


def test_a_value_that_a_check_cannot_read_is_shown_as_what_was_returned(tmp_path, workspace):
    reads = "\n\ndef observe(double, x):\n    return {'rows': len(double(x))}\n"
    counted = exercise_of(tmp_path, DOUBLE + reads)
    found = feedback(counted, workspace, "2 * x")
    assert found.got == "None: nothing is returned" and "end it with `return ...`" in found.cause
    found = feedback(counted, workspace, "return 2")
    assert found.got == "a value of type int: TypeError: object of type 'int' has no len()"


SCALED = (
    HEAD.replace("double(x): twice", "double(x, n): n times")
    + """def double(x, n):
    ### BEGIN SOLUTION
    return x * n
    ### END SOLUTION


# ---- check: on 3 ranks, also on 2, pure


def cases(rank, n):
    yield "a number", 10 + rank, n
"""
)


@pytest.mark.parametrize("body,passes", [("x * n * 5 // 5", True), ("x * 3", False), ("sum([x] * 3)", False)])
def test_a_number_of_ranks_that_is_written_down_is_refused_where_it_is_wrong_on_others(
    tmp_path, workspace, body, passes
):
    found = feedback(exercise_of(tmp_path, SCALED), workspace, f"def double(x, n):\n    return {body}\n")
    assert (found is None) == passes
    if found:
        assert found.headline == "double is right on 3 ranks, and not on 2." and found.rank == 0
        assert (found.expected, found.got) == ("20", "30")
        assert found.cause == (
            "the number of ranks is written down, and this runs on any number: take the argument that holds it"
        )


ABORTED = "it ended with SIGABRT (signal 6). The last collective it entered: reduce_scatter of 72 bytes."


@pytest.mark.parametrize(
    "died,says",
    [
        (
            f"{ABORTED} As collective number 1, rank 0 entered barrier, rank 1 entered all_gather: {UNLIKE}.",
            "do not fit",
        ),
        (ABORTED, "a storage counts bytes"),
        ("it ended with SIGSEGV (signal 11). The last collective it entered: all_gather of 8 bytes.", "without memory"),
    ],
)
def test_a_rank_that_aborts_met_another_collective_only_where_the_ranks_last_ones_differ(died, says):
    """Gloo ends a rank that receives other bytes than it waits for; so does a heap that was written past its end."""
    feedback = checking.feedback_on_failure(registry.find("05.reduce"), Failure("died", f"Rank 2 died: {died}", 2))
    assert says in feedback.cause


def test_an_error_is_shown_in_the_exercises_own_file_though_another_of_the_learners_raised_it():
    frames = 'File "/x/my_fsdp/06.hooks.py", line 8, in d\nf()\nFile "/x/my_fsdp/05.reduce.py", line 4, in f\nlen(None)'
    report = Failure("raised", "TypeError: no", 0, traceback=f"{frames}\nTypeError: no")
    got = checking.feedback_on_failure(registry.find("06.hooks"), report).got
    assert "06.hooks.py" in got and "05.reduce.py" not in got


@pytest.mark.parametrize(
    "error,says",
    [
        ("TypeError: 'ellipsis' object cannot be interpreted as an integer", "dots are still there"),
        ("RuntimeError: got mixed torch.Tensor and DTensor", "call `fully_shard(model)` last"),
        ("ValueError: Default process group has not been initialized", "runs without ranks"),
        ("NameError: name 'torchh' is not defined. Did you mean: 'torch'?", "its own imports"),
        ("ZeroDivisionError: division by zero", "the line above is yours"),
    ],
)
def test_an_error_of_torch_is_told_in_words(error, says):
    report = Failure("raised", error, 0, traceback=error)
    assert says in checking.feedback_on_failure(registry.find("16.compose"), report).cause


NOTEBOOKS = [f"{number:02}" for number in (*range(14), 16, 21)]
# what two ranks cannot hide: no formula of n, but settings of a job of two ranks, or a function of one rank alone
SETTINGS = {"06.choose_units", "07.hide", "09.slim", "11.choose", "13.fit"}
ONE_RANK = {"05.reshard", "05.guarded"}


def test_functions_of_the_number_of_ranks_are_judged_at_three_or_more():
    """With two ranks n - 1 is 1 and n / 2 is 1, so a wrong formula passes."""
    exercises = [each for name in NOTEBOOKS for each in registry.items_of(name) if isinstance(each, Exercise)]
    judged_at_two = {each.id for each in exercises if not each.pure and each.world_size < 3}
    assert judged_at_two == SETTINGS | ONE_RANK
