"""`ask`: a question on the page that is answered where it stands, a choice by a click and a number in a field.

The answer is judged at once. A right one is kept in the learner's folder, so that it is there on another day too.
Where a page shows no widgets, the options have letters, and `answer("00.loop", "a")` takes one; it does so in a
notebook as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .answers import gradable, grade_answer, is_right
from .course_state import current
from .display import present, present_live, present_widget
from .exercise import Choice, Question
from .verdicts import Verdict, with_code

if TYPE_CHECKING:
    import ipywidgets

_LOOKS = """<style>
.fsdplab-option { height: auto; max-width: 52em; padding: 5px 14px; white-space: normal; text-align: left;
                  line-height: 1.4; }
</style>"""

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
    """The statement, what answers it, and the verdict, as outputs of their own: a saved notebook keeps the text."""
    workspace = current().workspace
    kept = workspace.right_answer(item.id)
    earlier = kept if kept and is_right(item, kept, against) else ""

    def judge(value: Any) -> Verdict:
        verdict = grade_answer(item.id, value, against)
        if verdict.passed:
            workspace.note_right_answer(item.id, value)
        update(verdict)
        return verdict

    present(Statement(item))
    if isinstance(item, Choice):
        present_widget(lambda: buttons(item, judge, earlier), Options(item))
    else:
        present_widget(lambda: number_field(item, judge, earlier))
    update = present_live(grade_answer(item.id, earlier or ..., against))


def buttons(item: Choice, judge: Judge, earlier: str = "") -> ipywidgets.VBox:
    """One button an option; a click judges it and colours it green or red. `earlier` is the letter that was right."""
    import ipywidgets

    made = {
        letter: ipywidgets.Button(description=text.replace("`", ""), layout={"width": "auto"})
        for letter, text in item.options.items()
    }

    def take(letter: str) -> None:
        passed = judge(letter).passed
        for other, button in made.items():
            button.button_style = "" if other != letter else "success" if passed else "danger"

    for letter, button in made.items():
        button.add_class("fsdplab-option")
        button.button_style = "success" if letter == earlier else ""
        button.on_click(lambda _, letter=letter: take(letter))
    column = {"align_items": "flex-start"}
    return ipywidgets.VBox([ipywidgets.HTML(_LOOKS), *made.values()], layout=column)


def number_field(item: Question, judge: Judge, earlier: str = "") -> ipywidgets.HBox:
    """A field for a number in the question's unit, or a text with a unit; Enter judges it."""
    import ipywidgets

    entry = ipywidgets.Text(
        value=earlier, placeholder="your answer, then Enter", continuous_update=False,
        layout={"width": "14em", "flex": "0 0 auto"},
    )  # fmt: skip
    entry.observe(lambda change: judge(change["new"] if change["new"].strip() else ...), names="value")
    return ipywidgets.HBox([entry, ipywidgets.Label(item.unit)], layout={"flex_flow": "row wrap"})


@dataclass(frozen=True, repr=False)
class Statement:
    """What is asked, with the question's id."""

    item: Question | Choice

    def __str__(self) -> str:
        return f"{self.item.id}  {self.item.statement}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<div style='margin:6px 0'><code>{self.item.id}</code>&ensp;{with_code(self.item.statement)}</div>"


@dataclass(frozen=True, repr=False)
class Options:
    """The lettered options of a choice, where a page shows no buttons."""

    item: Choice

    def __str__(self) -> str:
        lines = [f"   {letter}) {text}" for letter, text in self.item.options.items()]
        return "\n".join([*lines, f'answer("{self.item.id}", "a") takes the letter.'])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(
            f"<div style='margin-left:1.5em'><b>{letter}</b>&ensp;{with_code(text)}</div>"
            for letter, text in self.item.options.items()
        )
