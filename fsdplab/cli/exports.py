"""Exports records to other tools: TensorBoard, Perfetto, CSV files and PyTorch's memory viewer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdplab.cli.answer import Line
from fsdplab.cli.errors import refuse
from fsdplab.cli.outputs import check_file, check_folder
from fsdplab.common.fields import option

if TYPE_CHECKING:
    from fsdplab.records import RunRecord

_ODD = re.compile(r"[^\w.]+")  # in the name of a folder; a record may have any text for its strategy
_LONGEST_NAME = 80


@dataclass(frozen=True)
class Exports:
    """The targets of exported traces and tables; None: no export."""

    tensorboard: Path | None = option(None, "Write a log folder that TensorBoard's profiler plugin opens.")
    perfetto: Path | None = option(None, "Write one trace of all ranks for Perfetto or chrome://tracing.")
    csv: Path | None = option(None, "Write the tables as CSV files into this folder.")
    snapshot: Path | None = option(None, "Write CUDA memory snapshots for PyTorch's memory viewer into this folder.")

    def check(self) -> Exports:
        """Refuse a target that cannot be written, before anything is read."""
        for flag, folder in (("--tensorboard", self.tensorboard), ("--csv", self.csv), ("--snapshot", self.snapshot)):
            if folder:
                check_folder(flag, folder)
        if self.perfetto:
            check_file("--perfetto", self.perfetto)
        return self

    def write(self, records: Sequence[RunRecord]) -> Iterator[Line]:
        """Write the requested exports and yield how to open each; a record without a trace is an error."""
        from fsdplab.profiling.exports import export_csv, export_perfetto, export_snapshots, export_tensorboard

        if self.tensorboard:
            _export(records, self.tensorboard, export_tensorboard)
            yield Line(f"TensorBoard: tensorboard --logdir {self.tensorboard}   (pip install torch-tb-profiler)")
        if self.perfetto:
            if len(records) > 1:
                refuse(f"--perfetto writes one trace, but {len(records)} records were given; give one at a time")
            export_perfetto(records[0], self.perfetto)
            yield Line(f"Perfetto: open {self.perfetto} in https://ui.perfetto.dev or chrome://tracing")
        if self.csv:
            _export(records, self.csv, export_csv)
            yield Line(f"tables: {self.csv}")
        if self.snapshot:
            _export(records, self.snapshot, export_snapshots)
            yield Line(f"memory snapshots: {self.snapshot}, to open in https://pytorch.org/memory_viz")


def _export(records: Sequence[RunRecord], folder: Path, export: Callable[[RunRecord, Path], object]) -> None:
    """Export one record into the folder itself, and each of several records into a subfolder named after its run."""
    from fsdplab.figures.view import view

    folder.mkdir(parents=True, exist_ok=True)
    for number, record in enumerate(records):
        name = f"{number}-{_ODD.sub('-', view(record).label)[:_LONGEST_NAME]}"
        export(record, folder if len(records) == 1 else folder / name)
