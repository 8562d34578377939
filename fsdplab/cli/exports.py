"""Exports records to other tools: TensorBoard, Perfetto, CSV files and PyTorch's memory viewer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsdplab.cli.answer import Line
from fsdplab.cli.errors import refuse
from fsdplab.cli.outputs import Outputs

if TYPE_CHECKING:
    from fsdplab.records import RunRecord

_ODD = re.compile(r"[^\w.]+")  # in the name of a folder; a record may have any text for its strategy
_LONGEST_NAME = 80


def exported(outputs: Outputs, records: Sequence[RunRecord]) -> Iterator[Line]:
    """Write the exports that were asked for and yield how to open each; a record without a trace is an error."""
    from fsdplab.profiling.exports import export_csv, export_perfetto, export_snapshots, export_tensorboard

    if outputs.tensorboard:
        _export(records, outputs.tensorboard, export_tensorboard)
        yield Line(f"TensorBoard: tensorboard --logdir {outputs.tensorboard}   (pip install torch-tb-profiler)")
    if outputs.perfetto:
        if len(records) > 1:
            refuse(f"--perfetto writes one trace, but {len(records)} records were given; give one at a time")
        export_perfetto(records[0], outputs.perfetto)
        yield Line(f"Perfetto: open {outputs.perfetto} in https://ui.perfetto.dev or chrome://tracing")
    if outputs.csv:
        _export(records, outputs.csv, export_csv)
        yield Line(f"tables: {outputs.csv}")
    if outputs.snapshot:
        _export(records, outputs.snapshot, export_snapshots)
        yield Line(f"memory snapshots: {outputs.snapshot}, to open in https://pytorch.org/memory_viz")


def _export(records: Sequence[RunRecord], folder: Path, export: Callable[[RunRecord, Path], object]) -> None:
    """Export one record into the folder itself, and each of several records into a subfolder named after its run."""
    from fsdplab.figures.view import view

    folder.mkdir(parents=True, exist_ok=True)
    for number, record in enumerate(records):
        name = f"{number}-{_ODD.sub('-', view(record).label)[:_LONGEST_NAME]}"
        export(record, folder if len(records) == 1 else folder / name)
