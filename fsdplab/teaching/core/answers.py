"""`answer` and `ask`: numbers with units and lettered questions, with the likely mistake behind a wrong one.

A wrong number is compared with the numbers that known slips lead to (bits for bytes, MiB for MB, a forgotten (n-1)/n),
so the learner sees which step went wrong. `ask` shows a question on the page, where a click or a number in a field
answers it. The answer is judged at once. A right one is kept in the learner's folder, so that it is there on another
day too. Where a page shows no widgets, the options have letters, and `answer("00.loop", "a")` takes one; it does so in
a notebook as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .checking import deliver, failed
from .course_state import current
from .display import Text, present, present_live, present_widget
from .exercise import Choice, Question, Slip
from .quantities import QuantityError, quantity, shown
from .registry import find
from .verdicts import Feedback, Verdict, with_code

if TYPE_CHECKING:
    import ipywidgets

_LOOKS = """<style>
.fsdplab-option { height: auto; max-width: 52em; padding: 5px 14px; white-space: normal; text-align: left;
                  line-height: 1.4; }
</style>"""

_BYTE_SLIPS = (
    Slip("bits, not bytes: divide by 8", factor=8.0),
    Slip("this is eight times too small: bytes were divided by 8 as if they were bits", factor=1 / 8),
    Slip("counted in MiB (2**20 bytes) but written as MB (10**6 bytes)", factor=1e6 / 2**20),
    Slip("counted in MB (10**6 bytes) but written as MiB (2**20 bytes)", factor=2**20 / 1e6),
)
_PART_SLIPS = (Slip("that is a part of 1, and percent are asked for: 100 times as much", factor=1e-2),)
_SCALE_SLIPS = (
    Slip("the prefix: 1000 times too large", factor=1e3),
    Slip("the prefix: 1000 times too small", factor=1e-3),
    Slip("the prefix: a million times too large (bytes where MB are asked for?)", factor=1e6),
    Slip("the prefix: a million times too small", factor=1e-6),
    Slip("the prefix: 10⁹ times too large (bytes where GB are asked for?)", factor=1e9),
    Slip("the prefix: 10⁹ times too small", factor=1e-9),
    Slip("the sign: it was subtracted the other way round", factor=-1.0),
)
_USUAL_SLIPS_WITHIN = 0.005  # MB and MiB differ by 5 %: a question's own tolerance would take other numbers for one


_UNKNOWN = (ValueError, LookupError, StopIteration)  # what a question raises about a run that lacks its figure


def answer(question: str, value: Any, against: Any = None, hints: int = 0) -> None:
    """Judge an answer: a number in the question's unit, a text with a unit (`"36 MB"`), or a letter.

    `against` is what the question is about where that is only known at run time (a record, a measurement).
    """
    deliver(grade_answer(question, value, against, hints))


def grade_answer(question: str, value: Any, against: Any = None, hints: int = 0) -> Verdict:
    """Return the verdict of one answer; `answer` shows it."""
    item = gradable(question)
    # a failed run first: then there is no right answer to compare with
    missing = None if against is None else _missing(item, against)
    if missing:
        return Verdict(question, missing)
    # the dots of a cell that nobody has filled in
    if value is ...:
        return Verdict(question, Feedback(f"Not answered yet: {_how(item)}.", "", "", "", untouched=True))
    if isinstance(item, Choice):
        return _grade_choice(item, value)
    return _grade_number(item, value, against, hints)


def _missing(item: Question | Choice, against: Any) -> Feedback | None:
    """Return why a question cannot be judged: a run that it is about failed, or did not measure what is asked."""
    try:
        if isinstance(item, Question):
            item.right(against)
    except _UNKNOWN as error:
        runs = against if isinstance(against, (list, tuple)) else [against]
        failed_runs = [run.spec["strategy"] for run in runs if getattr(run, "status", "") == "failed"]
        why = str(error)
        if failed_runs:
            why = f"the run of {' and of '.join(failed_runs)} failed. Run its cell again, then this one."
        return Feedback(f"This question cannot be judged yet: {why}", "", "", "", untouched=True)
    return None


def gradable(question: str) -> Question | Choice:
    """Return the question or choice of an id; LookupError for an exercise, which `check` judges."""
    item = find(question)
    if isinstance(item, (Question, Choice)):
        return item
    return find(question, Question)  # raises


def is_right(item: Question | Choice, value: Any, against: Any = None) -> bool:
    """Return whether an answer is right; nothing is counted as a try."""
    if isinstance(item, Choice):
        return _letter(item, value) == item.right
    try:
        return close(quantity(value, item.unit), item.right(against), item.tolerance)
    except _UNKNOWN:
        return False


def _letter(item: Choice, value: Any) -> str:
    """Return the letter of an answer: of `B`, `(b)`, `option b`, `b) two meshes` and that option's words it is b."""
    text = str(value).lower().strip(" .:()").removeprefix("option ").removeprefix("answer ")
    # `b) two meshes`
    lettered = re.fullmatch(r"([a-z])[).:].*", text, re.DOTALL)
    if lettered:
        return lettered[1]
    for letter, option in item.options.items():
        if option.lower() == text:
            return letter
    return text


def _how(item: Question | Choice) -> str:
    """Return how a question is answered, as the start of a sentence."""
    if isinstance(item, Choice):
        return "click an answer"
    return f"write {_form(item)}"


def _form(item: Question | Choice) -> str:
    """Return the form in which an answer is written."""
    if isinstance(item, Choice):
        return "a letter: " + ", ".join(item.options)
    if item.unit:
        return f'a number in {item.unit}, or a text with a unit such as "12 {item.unit}"'
    return "a number"


def _grade_choice(item: Choice, value: Any) -> Verdict:
    """Return the verdict on a letter; a wrong one is explained at once, and counts as no failed try."""
    letter = _letter(item, value)
    if letter not in item.options:
        feedback = Feedback("That is not one of the letters.", _form(item), repr(value), "answer with one letter")
        return Verdict(item.id, feedback)
    because = item.because[letter]
    if letter == item.right:
        return Verdict(item.id, None, because[:1].upper() + because[1:])  # a sentence of its own after "passed."
    return Verdict(item.id, Feedback("That is not it.", "", item.options[letter], because))


def _grade_number(item: Question, value: Any, against: Any, hints: int) -> Verdict:
    """Return the verdict on a number: right within the question's tolerance, or the likely slip."""
    try:
        given = quantity(value, item.unit)
        # of a division by zero in the learner's cell; it is neither too large nor too small
        if not math.isfinite(given):
            raise QuantityError(f"expected a finite number, got {value!r}")
    except QuantityError as error:
        return Verdict(item.id, Feedback("The answer cannot be read.", _form(item), repr(value), str(error)))
    right = item.right(against)
    given_text, right_text = shown(given, item.unit), shown(right, item.unit)
    if close(given, right, item.tolerance):
        exactly = ""
        if given_text != right_text:
            exactly = f" (exactly: {right_text})"
        return Verdict(item.id, None, f"{given_text}{exactly}. {item.explanation}".strip())

    # a slip says what went wrong, so no distance is told; else how far it is from right, and not the number itself
    cause = slip_behind(item, given, against) or _given_already(item, given)
    got = given_text
    if not cause:
        got = f"{given_text}: {how_far(given, right)}"
    feedback = Feedback(f"{item.statement} (Right within {100 * item.tolerance:g} %.)", "", got, cause)
    return failed(item, feedback, current().workspace, hints)


def close(given: float, right: float, tolerance: float) -> bool:
    """Return whether two numbers agree within a relative tolerance: `close(101, 100, 0.01)`."""
    return abs(given - right) <= tolerance * abs(right)


def slip_behind(item: Question, given: float, against: Any = None) -> str:
    """Return the cause of the known slip whose number is the one given; "" where no such slip is known."""
    right = item.right(against)
    for slip, wrong in _wrong_numbers(item, right, against):
        tolerance = min(item.tolerance, _USUAL_SLIPS_WITHIN)
        if slip in item.slips or slip in _SCALE_SLIPS:
            tolerance = item.tolerance
        if close(given, wrong, tolerance):
            return slip.cause
    return ""


def _given_already(item: Question, given: float) -> str:
    """Return what to say of a number that the question itself gives."""
    # whole words only: the 4 of `fp4` or of `0.4` is no number of the question
    numbers = re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e\d+)?(?!\w)", item.statement)
    if given in map(float, numbers):
        return "the question gives this number; what is asked for follows from it"
    return ""


def how_far(given: float, right: float) -> str:
    """Return how wrong a number is, as up to 16 times too much or too little, or roughly.

    `how_far(1, 31) == "more than ten times too small"`.
    """
    for times in range(2, 17):
        if close(given, right * times, _USUAL_SLIPS_WITHIN):
            return f"{times} times too large: what is in it {times} times, or was not divided by {times}?"
        if close(given * times, right, _USUAL_SLIPS_WITHIN):
            return f"{times} times too small: what was divided by {times}, or not multiplied by {times}?"
    direction = "large" if given > right else "small"
    if right / 10 <= given <= right * 10:
        return f"too {direction}"
    return f"more than ten times too {direction}"


def _wrong_numbers(item: Question, right: float, against: Any) -> Iterator[tuple[Slip, float]]:
    """Yield the numbers of the question's own slips first, then those of the usual ones."""
    slips = list(item.slips)
    if "B" in item.unit:
        slips += _BYTE_SLIPS
    elif item.unit == "%":
        slips += _PART_SLIPS
    slips += _SCALE_SLIPS
    if right:
        slips.append(Slip("upside down: divide the other way round", value=1 / right))

    for slip in slips:
        if slip.factor is not None:
            yield slip, right * slip.factor
            continue
        # a number, several, or a function of what the question is about
        wrong: Any = slip.value
        if callable(wrong):
            wrong = wrong(against)
        numbers = wrong if isinstance(wrong, list) else [wrong]
        for number in numbers:
            yield slip, float(number)


# ---- on the page


Judge = Callable[[Any], Verdict]


def ask(*questions: str, against: Any = None) -> None:
    """Show questions with what answers them: buttons for a choice, a field for a number; the verdict stands below.

    `against` is what they are about where that is only known at run time (a record, a measurement).
    """
    for question in questions:
        item = gradable(question)
        if isinstance(item, Question) and callable(item.expected) and against is None:
            raise ValueError(f"{question} is about a run or a measurement; expected ask({question!r}, against=...)")
        _ask(item, against)


def _ask(item: Question | Choice, against: Any) -> None:
    """Show the statement, what answers it, and the verdict.

    They are outputs of their own, so that a saved notebook keeps the text.
    """
    workspace = current().workspace
    earlier = workspace.right_answer(item.id)
    if earlier and not is_right(item, earlier, against):
        earlier = ""  # the question has changed since, or is about another run

    def judge(value: Any) -> Verdict:
        verdict = grade_answer(item.id, value, against)
        if verdict.passed:
            workspace.note_right_answer(item.id, value)
        update(verdict)
        return verdict

    present(statement(item))
    if isinstance(item, Choice):
        present_widget(lambda: buttons(item, judge, earlier), options(item))
    else:
        present_widget(lambda: number_field(item, judge, earlier))
    update = present_live(grade_answer(item.id, earlier or ..., against))


def buttons(item: Choice, judge: Judge, earlier: str = "") -> ipywidgets.VBox:
    """Return one button an option; a click judges it and colours it green or red.

    `earlier` is the letter that was right on an earlier day.
    """
    import ipywidgets

    made = {}
    for letter, text in item.options.items():
        made[letter] = ipywidgets.Button(description=text.replace("`", ""), layout={"width": "auto"})

    def take(letter: str) -> None:
        passed = judge(letter).passed
        for button in made.values():
            button.button_style = ""
        made[letter].button_style = "success" if passed else "danger"

    for letter, button in made.items():
        button.add_class("fsdplab-option")
        if letter == earlier:
            button.button_style = "success"
        # a default argument, since all closures of the loop would see its last letter
        button.on_click(lambda _, letter=letter: take(letter))
    column = {"align_items": "flex-start"}
    return ipywidgets.VBox([ipywidgets.HTML(_LOOKS), *made.values()], layout=column)


def number_field(item: Question, judge: Judge, earlier: str = "") -> ipywidgets.HBox:
    """Return a field for a number in the question's unit, or a text with a unit; Enter judges it."""
    import ipywidgets

    entry = ipywidgets.Text(
        value=earlier,
        placeholder="your answer, then Enter",
        continuous_update=False,
        layout={"width": "14em", "flex": "0 0 auto"},
    )

    def take(change: Any) -> None:
        typed = change["new"]
        # an emptied field is open again
        judge(typed if typed.strip() else ...)

    entry.observe(take, names="value")
    return ipywidgets.HBox([entry, ipywidgets.Label(item.unit)], layout={"flex_flow": "row wrap"})


def statement(item: Question | Choice) -> Text:
    """Return what is asked, with the question's id."""
    html = f"<div style='margin:6px 0'><code>{item.id}</code>&ensp;{with_code(item.statement)}</div>"
    return Text(f"{item.id}  {item.statement}", html)


def options(item: Choice) -> Text:
    """Return the lettered options of a choice, where a page shows no buttons."""
    lines, html = [], ""
    for letter, text in item.options.items():
        lines.append(f"   {letter}) {text}")
        html += f"<div style='margin-left:1.5em'><b>{letter}</b>&ensp;{with_code(text)}</div>"
    lines.append(f'answer("{item.id}", "a") takes the letter.')
    return Text("\n".join(lines), html)
