"""Writes an answer beside the terminal, as the flags of a command say: JSON, a page or figure, records."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdplab.cli.answer import Answer, Part
from fsdplab.cli.errors import refuse
from fsdplab.common.fields import option
from fsdplab.common.files import try_folder, try_output, write_output
from fsdplab.common.places import how_to_install

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Outputs:
    """The targets of an answer, and how much of it is printed. Each command takes some of the fields as flags.

    `keep` is a folder for records, which are replaced only by `force`.
    """

    json: str | None = option(None, "Write the answer as JSON to a file, or to stdout with -.", metavar="FILE|-")
    html: Path | None = option(None, "Write a standalone page: table, figures, what was real.")
    figure: Path | None = option(None, "Write a figure as .html; its button saves an SVG.")
    keep: Path | None = option(None, "Keep the run records in this folder.")
    tensorboard: Path | None = option(None, "Write a log folder that TensorBoard's profiler plugin opens.")
    perfetto: Path | None = option(None, "Write one trace of all ranks for Perfetto or chrome://tracing.")
    csv: Path | None = option(None, "Write the tables as CSV files into this folder.")
    snapshot: Path | None = option(None, "Write CUDA memory snapshots for PyTorch's memory viewer into this folder.")
    force: bool = option(False, "Replace an earlier record in that folder.", flags=("--force",))
    quiet: bool = option(False, "Print the result only: no progress, legend or findings.", flags=("--quiet", "-q"))
    verbose: bool = option(False, "Print also every step, and what the ranks printed.", flags=("--verbose", "-v"))

    def check(self) -> Outputs:
        """Refuse a target that cannot be written, and a page without plotly, before anything runs."""
        if self.quiet and self.verbose:
            refuse("--quiet and --verbose were given; expected one of them, or none")
        if self.figure and self.figure.suffix != ".html":
            shown = repr(str(self.figure))
            refuse(f"--figure is {shown}; expected a file name that ends in .html: its button saves an SVG")
        for flag, path in (("--html", self.html), ("--figure", self.figure)):
            if path and importlib.util.find_spec("plotly") is None:
                refuse(f"{flag} needs plotly; run: {how_to_install('lab')}")
        for name in ("html", "figure", "json", "perfetto", *_FOLDERS):
            target = getattr(self, name)
            if target and target != "-":
                _check(name, Path(target))
        return self

    def console(self) -> Console:
        """stdout, or stderr where stdout carries the JSON."""
        from fsdplab.cli.render import console_of

        return console_of(stderr=self.json == "-")

    def show(self, parts: Iterable[Part]) -> None:
        """Print tables and lines in their order."""
        from fsdplab.cli.render import show

        show(self.console(), parts)

    def give(self, answer: Answer) -> None:
        """Print an answer, and write the files that were asked for."""
        self.show(answer.parts)
        # after the terminal's part, which goes to stderr where JSON is on stdout
        text = json.dumps(_finite(answer.data), indent=1, allow_nan=False) + "\n" if self.json else ""
        if self.json == "-":
            sys.stdout.write(text)
        elif self.json:
            write_output(Path(self.json), text)
        page = self.html or self.figure
        if page and answer.page:
            write_output(page, answer.page())


def _finite(value: Any) -> Any:
    """Return what is written as JSON, which has no NaN and no infinity: null stands for them, as in a record."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return value


_FOLDERS = ("keep", "tensorboard", "csv", "snapshot")  # targets that are folders; the others are files


def _check(name: str, path: Path) -> None:
    """Refuse a file, or a folder, that is not writable, before a command takes its time."""
    attempt, expected = try_output, "expected a file name in an existing folder that is writable"
    if name in _FOLDERS:
        attempt, expected = try_folder, "expected a folder, or a name for one, where there is free space"
        if path.exists() and not path.is_dir():
            refuse(f"--{name} {path} is a file; expected a folder")
    try:
        attempt(path)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        refuse(f"--{name} {path} cannot be written ({getattr(error, 'strerror', None) or error}); {expected}")
