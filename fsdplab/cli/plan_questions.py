"""`fsdplab plan --ask`: the list of questions, or the answer to one: a sentence, its table and a figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fsdplab.cli.console import console_beside
from fsdplab.cli.outputs import WIDTH
from fsdplab.cli.plan import refusals, write_json
from fsdplab.cli.plan_search import check_figure, write_figure
from fsdplab.planning.planner import plan_spec
from fsdplab.planning.questions import LISTED, QUESTIONS, Answer, ask


def show_questions(json_file: str | None) -> None:
    """Print every question with its name."""
    console = console_beside(json_file, WIDTH)
    more = [name for name in QUESTIONS if name not in LISTED]
    console.print(_questions(LISTED))
    console.print("and five more:")
    console.print(_questions(more, numbered=False))
    console.print("answer one for a plan: fsdplab plan --ask hybrid --model llama-3.1-70b --gpus 16", highlight=False)
    write_json(json_file, json.dumps({name: question.asked for name, question in QUESTIONS.items()}, indent=1))


def _questions(names: Sequence[str], numbered: bool = True) -> Table:
    table = Table(box=None, show_header=False)
    table.add_column(justify="right", width=2)
    table.add_column(style="bold", width=max(map(len, QUESTIONS)))
    for number, name in enumerate(names, 1):
        table.add_row(str(number) if numbered else "", name, QUESTIONS[name].asked)
    return table


def show_answer(
    name: str, model: str, gpu: str, choices: dict[str, Any], json_file: str | None, figure: Path | None
) -> None:
    """Answer one question for a plan, print it, and write JSON and a figure if asked."""
    if figure is not None:
        check_figure(figure)
    with refusals():
        answer = ask(name, plan_spec(model, gpu, **choices))
    console = console_beside(json_file, WIDTH)
    console.print(f"[bold]{answer.asked}[/]", highlight=False)
    console.print(f"{answer.sentence}.", highlight=False, markup=False)
    console.print(_table(answer))
    if answer.note:
        console.print(f"note: {answer.note}", highlight=False, markup=False)
    console.print(f"provenance: {answer.provenance}", highlight=False, markup=False)
    write_json(json_file, json.dumps(answer.as_dict(), indent=1))
    if figure is not None:
        from fsdplab.figures.plots.answers import answer_figure

        write_figure(figure, answer_figure(answer))


def _table(answer: Answer) -> Table:
    table = Table(box=None, header_style="bold")
    for column in answer.columns:
        table.add_column(column.name, justify="left" if column.kind in ("words", "verdict") else "right", no_wrap=True)
    for row in answer.texts():
        table.add_row(*row)
    return table
