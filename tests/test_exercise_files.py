"""An exercise is one file: what its reader takes from it, which files it refuses, and how a wrong solution is led back
to its cause.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from fsdplab.sessions import Failure
from fsdplab.teaching.core import answers, checking, registry, run_submission
from fsdplab.teaching.core.exercise import Choice, Question, questions_of
from fsdplab.teaching.core.exercise_file import Exercise, ExerciseError
from fsdplab.teaching.core.in_source import slip
from fsdplab.teaching.core.nonsense import NonsenseInNewMemory
from fsdplab.teaching.core.quantities import QuantityError, quantity
from tests.solutions import solutions_of, try_all

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
    #! made = 3 * x
    #: this is three times
    #! made = x
    #: nothing was doubled
    return made
    #! print(made)
    #: the function returns nothing
    #! return made / 0
    #: raises: ZeroDivisionError names the operation
    ### END SOLUTION

#! def double(x):
#!     return x + x + x
#: as above


# ---- check: on 2 ranks, pure, within 1e-6, in 1 s


def cases(rank, n):
    yield "numbers", torch.tensor([1.0, 2.0]) * (rank + 1)
    yield "more", torch.tensor([3.0]) * (rank + 1)
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


def test_mistakes_stand_in_the_margin(double):
    lines = double.text.split("\n")
    found = [(known.source.strip().split("\n")[-1].strip(), known.cause, known.ends) for known in double.mistakes]
    assert found == [
        ("return made", "this is three times", "returns"),
        ("return made", "nothing was doubled", "returns"),
        ("print(made)", "the function returns nothing", "returns"),
        ("return made / 0", "ZeroDivisionError names the operation", "raises"),
        ("return x + x + x", "ZeroDivisionError names the operation", "returns"),
    ]
    assert all("#!" in lines[known.line - 1] for known in double.mistakes)
    whole = double.mistakes[-1].source
    assert whole.count("def double") == 2, "a function of its own comes after the reference and takes its place"
    for known in double.mistakes:
        compile(known.source, "mistake", "exec")


def test_a_stub_may_be_code_that_works(tmp_path):
    text = DOUBLE.replace("    made = 2 * x\n", "    ## made = x  # mend this\n    made = 2 * x\n")
    assert exercise_of(tmp_path, text).stub.endswith("    made = x  # mend this\n")


@pytest.mark.parametrize(
    "old,new,says",
    [
        ("# ---- check: on 2 ranks, pure", "# ---- check: with 2 ranks, pure", "'with 2 ranks' in the line of the"),
        ("# ---- check", "# checks", "no line `# ---- check: ...`"),
        ("    #: nothing was doubled\n", "", "made = x' lacks its cause"),
        ("    #! made = 3 * x\n    #: this", "    #: this", "stands under no mistake"),
        ("    #: this is three times\n", "    #: as above\n", "under the first mistake"),
    ],
)
def test_what_is_no_exercise_is_refused_with_what_is_expected(tmp_path, old, new, says):
    exercise = exercise_of(tmp_path, DOUBLE.replace(old, new, 1))
    with pytest.raises(ExerciseError, match=says):
        assert exercise.settings and exercise.mistakes


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
        ("    #! made = x\n", "    #! made = = x\n", "double.py: cannot be used: SyntaxError"),
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
        ("print(2 * x)", "the function returns nothing; it printed 'tensor"),
        ("return x / 0 + [1][2]", "behind a list's last place there is nothing"),
        (
            "at, made = 0, []\n    for _ in x:\n        made.append(2 * x[at : at + 1])\n    return torch.cat(made)",
            "from `at` on, which stays 0",
        ),
        (
            "at, made = 0, []\n    for _ in x:\n        made.append(2 * x[at : at + 1])\n        at += 1\n"
            "    return torch.cat(made) + 1",
            "compare the two",
        ),
        ("return (2 * x).double()", "torch's default dtype"),
        ("return x * 3", "this is three times"),
        ("return x.clone()", "nothing was doubled"),
        ("return 10 * x", "this is 5 times what is expected"),
        ("return torch.tensor([4.0, 8.0][: len(x)]) if len(x) > 1 else 2 * x", "this is what rank 1 must give"),
        ("return 2 * x + 1", "compare the two values"),
        ("return 'two'", "a tensor of shape [2] is expected"),
        ("return ...", "write a value in place of the dots"),
        ("return np.float64(2) * x", "its own imports"),
        ("twice = 2 * x\n    return twic", "did you mean `twice`?"),
        ("return {'double': 2}['doubel'] * x", "there is no such key in the dict; `double`, which is nearly it"),
        ("def twice():\n    return 2 * x\n\n\ndef double(x):\n    return twice()\n", "belongs to another function"),
        ("y = x + 0\n    y.require_grad = False\n    return y", "no tensor has an attribute `require_grad`"),
        ("if len(x) > 1:\n        return 2 * x", "in this case it returns nothing, or None"),
        ("for _ in range(2):\n        return x + 1", "`for _ in range(2)` never comes to the next one"),
        ("for _ in range(2):\n        if not len(x):\n            continue\n        return x + 1", "compare the two"),
        ("for _ in range(2):\n        if len(x):\n            return 10 * x", "5 times what is expected"),
        (
            "total = 0 * x\n    for _ in range(2):\n        total = x\n    return total",
            "every round of the loop sets `total = x` anew",
        ),
        ("import numpy\n    return torch.tensor(numpy.float32(2)) * x", None),
        ("while True: pass", "a loop that never ends"),
        ("return torch.tripled(x)", "read the last line"),
        ("return torch.mull(2, x)", "did you mean `mul`?"),
        ("return f'{x}'[:0] + '{x}'", "an `f` before the quotes"),
        ("return f'{...}'", "write a value in place of the dots"),
        ("return x * 3 if x.dtype == 'float' or 'int' else x", "is always true"),
        ("return f'{abs}{len.__call__}{double}'", "`name()` calls it"),
        ("yield 2 * x", "`yield` makes a generator"),
        ("if len(x) > 9:\n        made = x\n    return made", "in this case `made` was given no value"),
        ("return x + '%d %d' % len(x)", "another number of places"),
        ("return 10 * x if 'numberz' == 'x' else x", 'is "numbers" meant?'),
        ("return x * (1 // 0)", "what is divided by is 0"),
        ("return (x, x).shape", "have no names"),
        ("import torch\n\n\ndef double(x, times):\n    return times * x", "as the stub's line with `def` says"),
    ],
)
def test_a_wrong_solution_is_led_back_to_its_cause(double, workspace, body, says):
    found = feedback(double, workspace, body)
    assert found is None if says is None else says in found.cause, found


def test_a_wrong_answer_reads_well(double, workspace):
    found = feedback(double, workspace, "return 2 * x + 1")
    assert found.headline == "double returns a wrong value for rank 0 (case: numbers)." and found.got == "3.0"
    endless = feedback(double, workspace, "while True:\n        x += 1")
    assert "did not return within 1 s" in endless.headline and "it stood in 78.double.py, line" in endless.got


def test_every_mistake_of_the_file_is_its_own_diagnosis(double, workspace):
    for known in double.mistakes:
        found = feedback(double, workspace, known.source)
        assert found is not None and (known.cause in found.cause or known.cause.startswith("ZeroDivisionError")), known


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


def test_arguments_in_another_order_than_the_stubs_are_named(tmp_path, workspace):
    pair = HEAD.replace("double(x): twice x", "double(a, b): a, then b") + "def double(a, b):\n    ### BEGIN SOLUTION\n"
    pair += "    return a, b\n    ### END SOLUTION\n\n\n# ---- check: pure\n"
    pair += "\n\ndef cases(rank, n):\n    yield '1 and 2', 1, 2\n"
    path = workspace.save("78.double", "def double(b, a):\n    return a, b\n")
    found = checking.feedback_on(exercise_of(tmp_path, pair), path, workspace)
    assert found.cause == "the arguments come in the order of the stub: `a, b`"


PAIR = '''"""A pair

Write double(x): a dict with the count and the value.

1. A nudge.
2. A pointer.
3. Two lines.
"""


def double(x):
    ### BEGIN SOLUTION
    return {"count": 1, "value": 2 * x}
    #! return {"count": 2, "value": 0}
    #: two were counted
    #! return {"count": 1, "value": 3 * x}
    #: three times is too much
    ### END SOLUTION


# ---- check: pure


def cases(rank, n):
    yield "a number", 4
'''


@pytest.mark.parametrize(
    "value,says", [('"count": 2, "value": 1', "two were counted"), ('"count": 1, "value": 0 * x', "compare")]
)
def test_a_mistake_that_went_wrong_earlier_is_not_the_cause(tmp_path, workspace, value, says):
    assert says in feedback(exercise_of(tmp_path, PAIR), workspace, f"return {{{value}}}").cause


OFTEN = (
    PAIR.replace("# ---- check", "# ---- known").split("# ---- known")[0]
    + """# ---- check: pure


def cases(rank, n):
    for number in (1, 2, 3, 4, 5):
        yield f"number {number}", number
"""
)


@pytest.mark.parametrize(
    "body,says",
    [
        ("return {'count': 1, 'value': 3 * x if x < 4 else 0}", "three times is too much"),
        ("return {'count': 1, 'value': 3 * x if x < 3 else 0}", "compare the two values"),
        ("return {'count': 1, 'value': 3 + 0 * x}", "compare the two values"),
        ("return {'count': 1, 'value': 3}", "your function never reads `x`"),
        ("return {'count': 1, 'values': 2 * x}", "`value` is not there, and `values` stands there"),
    ],
)
def test_a_mistake_of_a_pure_function_is_the_cause_where_it_does_the_same_in_half_of_the_cases(
    tmp_path, workspace, body, says
):
    assert says in feedback(exercise_of(tmp_path, OFTEN), workspace, body).cause


SHARE = '''"""A share

Write double(rows, n): the rows of a rank, of as many as there are.

1. A nudge.
2. A pointer.
3. A line.
"""


def double(rows, n):
    ### BEGIN SOLUTION
    return reference
    ### END SOLUTION


# ---- check: pure

SAYS = {"the returned value": "all ranks together have all rows"}


def cases(rank, n):
    yield "seven", 7, 2
    yield "five", 5, 4
'''


@pytest.mark.parametrize(
    "reference,body,says",
    [
        ("rows // n", "return rows / n", "`/` makes a fraction, here 3.5"),
        ("rows / n", "return rows // n * 2", "drops all that is behind the point"),
        ("rows / n", "return rows - 2", "never reads `n`; all ranks together have all rows"),
        ("rows / n", "return f'{rows / n} rows'", "a number is expected, this is '3.5 rows'"),
        ("rows / n", "return rows * n", "all ranks together have all rows"),
    ],
)
def test_what_a_source_shows_is_said_before_the_exercises_own_sentence(tmp_path, workspace, reference, body, says):
    exercise = exercise_of(tmp_path, SHARE.replace("return reference", f"return {reference}"))
    assert says in feedback(exercise, workspace, f"def double(rows, n):\n    {body}\n").cause


LARGEST = '''"""The largest

Write double(numbers): twice the largest number.

1. A nudge.
2. A pointer.
3. Two lines.
"""


def double(numbers):
    ### BEGIN SOLUTION
    return 2 * max(numbers)
    #! return max(numbers)
    #: not doubled
    ### END SOLUTION


# ---- check: pure


def cases(rank, n):
    yield "two numbers", [4, 2]
'''


@pytest.mark.parametrize(
    "body,says",
    [
        ("return 2 * sorted(x)[-1]", None),
        ("x.sort()\n    return 2 * x[-1]", "The values are right, but double changes what it was given."),
        ("x.pop()\n    return 3 * x[-1]", "double returns a wrong value"),
    ],
)
def test_a_list_that_a_function_is_given_stays_as_it_is(tmp_path, workspace, body, says):
    """The argument has the statement's name in the report, whatever the learner calls it."""
    found = feedback(exercise_of(tmp_path, LARGEST), workspace, body)
    assert found is None if says is None else says in found.headline, found
    assert found is None or "the function changes `numbers` (case: two numbers)" in found.got + found.cause


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
    #! return x
    #: it was not divided
    ### END SOLUTION


# ---- check: on 2 ranks, within 1e-6


def cases(rank, n):
    yield "a vector", torch.arange(2.0) + 1 + 3 * rank
'''
MEANS = {
    "return 3 * x": "no collective was called",
    "dist.broadcast(x, src=0)\n    return x": "was called, which adds nothing up",
    "y = x.clone()\n    dist.all_reduce(y)\n    return x / 2": "stands in `y`, which nothing reads afterwards",
    "dist.all_reduce(x)\n    return x + 0": "it was not divided",
    "dist.all_reduce(x)\n    return x / 4": "once too often",
    "dist.reduce(x, dst=0)\n    return x / 2": "leaves its result on one rank only",
    "dist.all_reduce(x)\n    dist.all_reduce(x)\n    return x / 4": "fewer bytes bring the same values",
    "exact = x.double()\n    dist.all_reduce(exact)\n    return (exact / 2).float()": None,
    "work = dist.all_reduce(x, async_op=True)\n    return x / 2": "only begins the message",
    "dist.all_reduce(x)\n    if dist.get_rank() == 0:\n        return x / 2": "lets one rank alone do",
    "dist.all_reduce(x)\n    if dist.get_rank() < 1:\n        return x / 2": "and rank 0 a value: every rank",
    "y = torch.stack([*x.double(), *x.double()[:0]])\n    dist.all_reduce(y)\n    return (y / 2).float()": None,
    "every = [torch.empty_like(x) for _ in range(2)]\n    dist.all_gather(every, x)\n    return sum(every) / 2": None,
}


@pytest.mark.parametrize("body,says", MEANS.items())
def test_a_wrong_solution_on_ranks_is_led_back_to_its_cause(tmp_path, workspace, body, says):
    exercise = exercise_of(tmp_path, MEAN, "mean")
    found = feedback(
        exercise, workspace, f"import torch\nimport torch.distributed as dist\n\n\ndef mean(x):\n    {body}\n"
    )
    assert found is None if says is None else says in found.cause, found


def test_a_message_that_is_not_waited_for_is_named_whatever_the_values():
    source = "def double(x):\n    work = dist.all_reduce(x, async_op=True)\n"
    by_luck = checking.waited_for(None, source)
    assert "right by luck" in by_luck.headline and "`dist.all_reduce(x, async_op=True)` only begins" in by_luck.cause
    assert checking.waited_for(None, source + "    work.wait()\n") is None


@pytest.mark.parametrize(
    "written,says",
    [
        ("x / 2", "`x / 2` stands alone"),
        ("x.div(2)", "gives a new value and changes nothing"),
        ("optimizer.step", "called by `optimizer.step()`"),
        ("y = x == 1 or 2", "always true, because 2 alone is"),
        ("y = dist.all_reduce(x)", "`all_reduce` returns None"),
        ("y = held.discard(x)", "changes the object itself and returns None"),
        ("dist.all_reduce(x / 2)", "writes into `x / 2`, a new value that is lost"),
        ("dist.all_reduce(x.data)", ""),
        ("x /= dist.get_rank()", "this divides by `dist.get_rank()`"),
        ("if dist.get_rank() == 0:\n    x /= 2", "lets one rank alone do"),
        ("if dist.get_rank() == 0:\n    x /= 2\ndist.broadcast(x, src=0)", ""),
        ("if dist.get_rank() == 0:\n    print(x)", ""),
        ("work = dist.all_reduce(x, async_op=True)", ""),
        ("x.add_(2)", ""),
        ("def f(x):\n    y = x / 2", "`y = x / 2` makes a new value that nothing reads afterwards"),
        ("def f(x):\n    x = x / 2", "`x /= 2` changes `x` itself"),
        ("def f(xs):\n    for x in xs:\n        y = x.grad\n        y = y / 2\n    return xs", "nothing reads"),
        ("def f(xs):\n    y = 0\n    for x in xs:\n        y = y + x\n    return y", ""),
        ("def f(xs):\n    for x in xs:\n        y = 1\n        y = y + x\n    return y", ""),
        ("def f(x):\n    nonlocal y\n    y = y + x", ""),
        ("def f(g):\n    y = 1\n    g(lambda: y)\n    y = y + 1", ""),
    ],
)
def test_what_a_source_does_that_can_hardly_be_meant(written, says):
    assert says in slip(written, "") and bool(says) == bool(slip(written, ""))
    assert not slip(written, written), "what the reference does too is no slip"


def test_memory_that_promises_nothing_holds_nonsense():
    with NonsenseInNewMemory():
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


def test_known_mistakes_are_run_only_where_something_differs(double, workspace, monkeypatch):
    monkeypatch.setattr(checking, "known_mistakes", partial(pytest.fail, "a right solution needs no mistakes"))
    assert feedback(double, workspace, "return 2 * x") is None
    assert run_submission.behaviours([(double, workspace.file_of("78.double"))], workspace)[0].cases == (
        "numbers",
        "more",
    )


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


def test_a_mistake_that_raises_and_does_not_say_so_is_told_its_author(tmp_path, workspace):
    """Together with the exercise's other solutions, all of which it would end."""
    silent = exercise_of(tmp_path, DOUBLE.replace("#: raises: ZeroDivisionError", "#: ZeroDivisionError"))
    silent.path.write_text(silent.text.replace("#! return made / 0", "#! return made + [1][2]"))
    silent = Exercise(silent.path)
    with pytest.raises(
        ExerciseError, match="double.py, line 25: this known mistake raises: IndexError: list index out"
    ):
        try_all(solutions_of([silent]), workspace)
    with pytest.raises(ExerciseError, match="Begin its cause with `#: raises: `"):
        checking.must_return(silent, workspace)


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
    #! return x
    #: nothing was multiplied
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


@pytest.mark.parametrize(
    "died,says",
    [
        ("it ended with SIGABRT (signal 6). The last collective it entered: reduce_scatter of 72 bytes.", "do not fit"),
        ("it ended with SIGSEGV (signal 11). The last collective it entered: all_gather of 8 bytes.", "without memory"),
    ],
)
def test_a_rank_that_aborts_in_a_collective_met_another_one(died, says):
    """Gloo ends a rank that receives other bytes than it waits for; a tensor without memory ends it otherwise."""
    feedback = checking.feedback_on_failure(registry.find("05.reduce"), Failure("died", f"Rank 2 died: {died}", 2))
    assert says in feedback.cause


def test_an_error_is_shown_in_the_exercises_own_file_though_another_of_the_learners_raised_it():
    frames = 'File "/x/my_fsdp/06.hooks.py", line 8, in d\nf()\nFile "/x/my_fsdp/05.reduce.py", line 4, in f\nlen(None)'
    report = Failure("raised", "TypeError: no", 0, traceback=f"{frames}\nTypeError: no")
    got = checking.feedback_on_failure(registry.find("06.hooks"), report).got
    assert "06.hooks.py" in got and "05.reduce.py" not in got


@pytest.mark.parametrize(
    "source,line,says",
    [
        ("n = 1\nwhile n > 0:\n    n *= 2\n", 3, "nothing in it makes `while n > 0` false"),
        ("if dist.get_rank() == 0:\n    dist.all_reduce(x)\n", 2, "`if dist.get_rank() == 0` lets some ranks alone"),
        ("while True:\n    dist.barrier()\n", 2, "deadlock: the ranks wait for each other"),
    ],
)
def test_a_call_that_does_not_return_is_led_back_to_the_statement_around_the_line_where_it_stood(source, line, says):
    report = Failure("raised", f"StillWaiting: no return after 8 s; it stood in 16.compose.py, line {line}: here", 0)
    assert says in checking.feedback_on_failure(registry.find("16.compose"), report, source).cause


@pytest.mark.parametrize(
    "error,source,says",
    [
        ("SyntaxError: invalid syntax", "def f(:\n", "cannot read this line"),
        ("IndentationError: unexpected indent", "def f(:\n", "below each other"),
        ("TypeError: 'ellipsis' object cannot be interpreted as an integer", "", "dots are still there"),
        ("ValueError: too many values to unpack (expected 2)", "", "fixed number of names"),
        ("Invoked with: <AllreduceOptions>, <...distributed_c10d.ProcessGroup object>", "", "name it, `group=...`"),
        ("ValueError: Global rank 0 is not part of group <ProcessGroup>", "", "numbers among all ranks"),
        ("RuntimeError: Cannot concatenate overlapping meshes: [...]", "", "cut over this axis already"),
        ("ValueError: Cannot distribute a DTensor with device mesh [...]", "", "sharded already: cut the layers first"),
        ("TypeError: 'float' object cannot be interpreted as an integer", "", "made by `/`"),
        ("ValueError: Default process group has not been initialized", "", "runs without ranks"),
        ("AttributeError: 'GPT' object has no attribute 'layers'", "", "nothing of that name"),
        ("NameError: name 'torchh' is not defined", "import torch\n", "did you mean `torch`?"),
        ("NameError: name 'shart' is not defined", "from a import b as shard\n", "did you mean `shard`?"),
    ],
)
def test_an_error_is_led_back_to_what_the_learner_wrote(error, source, says):
    report = Failure("raised", error, 0, traceback=error)
    assert says in checking.feedback_on_failure(registry.find("16.compose"), report, source).cause


NOTEBOOKS = [f"{number:02}" for number in (*range(14), 16, 21)]
# what two ranks cannot hide: no formula of n, but settings of a job of two ranks, or a function of one rank alone
SETTINGS = {"06.choose_units", "07.hide", "09.slim", "11.choose", "13.fit"}
ONE_RANK = {"05.reshard", "05.guarded"}


def test_functions_of_the_number_of_ranks_are_judged_at_three_or_more():
    """With two ranks n - 1 is 1 and n / 2 is 1, so a wrong formula passes."""
    exercises = [each for name in NOTEBOOKS for each in registry.items_of(name) if isinstance(each, Exercise)]
    judged_at_two = {each.id for each in exercises if not each.pure and each.world_size < 3}
    assert judged_at_two == SETTINGS | ONE_RANK
