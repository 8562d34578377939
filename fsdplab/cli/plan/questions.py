"""`fsdplab plan ask`: the list of questions, or the answer to one: a sentence, its table and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fsdplab.cli.plan.targets import Targets, grid, refusals
from fsdplab.planning.planner import plan_spec
from fsdplab.planning.questions import LISTED, QUESTIONS, Answer, ask


def show_questions(json_file: str | None) -> None:
    """Print every question with its name."""
    targets = Targets(json_file).check()
    console = targets.console()
    more = [name for name in QUESTIONS if name not in LISTED]
    console.print(_questions(LISTED))
    console.print("and five more:")
    console.print(_questions(more, numbered=False))
    console.print(
        "answer one for a plan: fsdplab plan ask hybrid --model llama-3.1-70b --world-size 16", highlight=False
    )
    targets.write({name: question.asked for name, question in QUESTIONS.items()})


def _questions(names: Sequence[str], numbered: bool = True) -> Table:
    table = Table(box=None, show_header=False)
    table.add_column(justify="right", width=2)
    table.add_column(style="bold", width=max(map(len, QUESTIONS)))
    for number, name in enumerate(names, 1):
        table.add_row(str(number) if numbered else "", name, QUESTIONS[name].asked)
    return table


def show_answer(name: str, settings: dict[str, Any], json_file: str | None, figure: Path | None) -> None:
    """Answer one question for a plan, print it, and write JSON and a figure if asked."""
    targets = Targets(json_file, figure).check()
    with refusals():
        answer = ask(name, plan_spec(**settings))
    console = targets.console()
    console.print(f"[bold]{answer.asked}[/]", highlight=False)
    console.print(f"{answer.sentence}.", highlight=False, markup=False)
    words = [column.name for column in answer.columns if column.kind in ("words", "verdict")]
    console.print(grid([column.name for column in answer.columns], answer.texts(), words))
    if answer.note:
        console.print(f"note: {answer.note}", highlight=False, markup=False)
    console.print(f"provenance: {answer.provenance}", highlight=False, markup=False)
    targets.write(answer.as_dict(), lambda: _figure(answer))


def _figure(answer: Answer) -> Any:
    from fsdplab.figures.plots.answers import answer_figure

    return answer_figure(answer)
