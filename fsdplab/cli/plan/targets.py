"""What all commands of `fsdplab plan` share: where an answer goes, and where its figures are from."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fsdplab.cli.console import console_beside
from fsdplab.cli.errors import refuse
from fsdplab.cli.outputs import WIDTH, check_file
from fsdplab.common.files import write_output
from fsdplab.common.places import how_to_install
from fsdplab.planning import HardwareError, PlanError
from fsdplab.planning.planner import Plan
from fsdplab.planning.step_time import peak_flops
from fsdplab.workloads.errors import ModelError

PREDICTED = "all figures are predicted, in closed form"


@dataclass(frozen=True)
class Targets:
    """Where an answer goes beside the terminal: JSON (a file, or `-` for stdout), and a figure as a page of its own."""

    json_file: str | None
    figure: Path | None = None

    def check(self) -> Targets:
        """Refuse a file that cannot be written, and a figure of another kind, before anything is computed."""
        if self.json_file not in (None, "-"):
            check_file("--json", Path(str(self.json_file)))
        if self.figure is None:
            return self
        if self.figure.suffix != ".html":
            refuse(
                f"--figure is {str(self.figure)!r}; expected a file name that ends in .html: its camera button saves"
                " an SVG"
            )
        if importlib.util.find_spec("plotly") is None:
            refuse(f"--figure needs plotly; run: {how_to_install('lab')}")
        check_file("--figure", self.figure)
        return self

    def console(self, width: int = WIDTH) -> Console:
        """stdout, or stderr where stdout carries the JSON."""
        return console_beside(self.json_file, width)

    def write(self, answer: Any, figure: Callable[[], Any] | None = None) -> None:
        """Write what was asked for; `figure` is drawn only then."""
        text = json.dumps(answer, indent=1) + "\n"
        if self.json_file == "-":
            sys.stdout.write(text)
        elif self.json_file is not None:
            write_output(Path(self.json_file), text)
        if self.figure is not None and figure is not None:
            from fsdplab.figures.style import CAMERA

            write_output(self.figure, figure().to_html(include_plotlyjs="cdn", config=CAMERA))


@contextmanager
def refusals() -> Iterator[None]:
    """An invalid plan becomes one line and exit code 2."""
    try:
        yield
    except (ModelError, HardwareError, PlanError) as error:
        refuse(str(error))


def grid(
    columns: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[str] = (), header: bool = True
) -> Table:
    """A table without lines; the columns named in `words` are aligned to the left, numbers to the right."""
    table = Table(box=None, header_style="bold", show_header=header)
    for name in columns:
        table.add_column(name, justify="left" if name in words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def reached_words(found: Plan) -> str:
    """`0.485 of 989 TFLOP/s: fitted on 5 published runs`: what all predicted times rest on."""
    return found.efficiency.of(peak_flops(found.spec.gpu)) if found.efficiency else "unknown"


def print_provenance(console: Console, plans: Sequence[Plan], what: str = PREDICTED) -> None:
    """Where the figures of plans on one kind of GPU are from, beneath their table."""
    reached = f"; matrix products reach {reached_words(plans[0])}" if plans and plans[0].efficiency else ""
    console.print(f"provenance: {what}{reached}", highlight=False, markup=False)
