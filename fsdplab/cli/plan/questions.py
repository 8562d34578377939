"""`fsdplab plan ask`: the list of questions, or the answer to one: a sentence, its table and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdplab.cli.answer import Answer, Line, Part, Table
from fsdplab.figures.plots.plans import answer_figure, page_of
from fsdplab.planning.planner import plan_spec
from fsdplab.planning.questions import LISTED, QUESTIONS, ask


def _every_question() -> Answer:
    more = [name for name in QUESTIONS if name not in LISTED]
    parts = (
        _questions(LISTED, [str(number) for number in range(1, len(LISTED) + 1)]),
        Line("and five more:"),
        _questions(more, [""] * len(more)),
        Line("answer one for a plan: fsdplab plan ask hybrid --model llama-3.1-70b --world-size 16"),
    )
    return Answer(parts, {name: question.asked for name, question in QUESTIONS.items()})


def _questions(names: Sequence[str], numbers: Sequence[str]) -> Table:
    width = max(map(len, QUESTIONS))
    rows = [(number.rjust(2), name.ljust(width), QUESTIONS[name].asked) for number, name in zip(numbers, names)]
    return Table(("number", "name", "question"), rows, words=("name", "question"), folds=("question",), header=False)


def question_answer(question: str | None, settings: dict[str, Any]) -> Answer:
    """The answer to one question about a plan, or every question."""
    if question is None:
        return _every_question()
    found = ask(question, plan_spec(**settings))
    words = [column.name for column in found.columns if column.kind in ("words", "verdict")]
    parts: list[Part] = [
        Line(found.asked, mood="bold"),
        Line(f"{found.sentence}."),
        Table([column.name for column in found.columns], found.texts(), words),
        *([Line(found.note, "note")] if found.note else []),
        Line(found.provenance, "provenance"),
    ]
    return Answer(parts, found.as_dict(), lambda: page_of(answer_figure(found)))
