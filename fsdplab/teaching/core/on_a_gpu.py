"""The lesson's figure from a real GPU: the records of `fsdplab gpu-check` are kept in data/gpu and open on any machine.

Without a record from a GPU, the cell says how to make one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fsdplab.common.places import checkout, shared_folder
from fsdplab.records import RunRecord

from .display import Note, present, show

if TYPE_CHECKING:
    import plotly.graph_objects as go

KEPT = shared_folder("data") / "gpu"


def on_a_gpu(draw: Callable[[RunRecord], go.Figure], strategy: str = "full_shard", folder: Path = KEPT) -> None:
    """Show `draw(record)` of a run that was recorded on GPUs under `strategy`; without one, a line that says so.

    Of several runs it is the one with most ranks: `on_a_gpu(rank_timeline)` in lesson 07. Raises `RecordError` where a
    record is damaged.
    """
    records = [RunRecord.load(path.parent) for path in sorted(folder.glob("records/*/run.json"))]
    if not records:
        return present(_none("no check was made on one yet"))
    on_gpus = [record for record in records if record.environment.get("device") == "cuda"]
    if not on_gpus:
        return present(_none("the check that is kept ran on the CPU, as a rehearsal"))
    # on the machine's own links: an emulated one would hide what the GPUs do
    fitting = [record for record in on_gpus if record.spec["strategy"] == strategy and not record.spec["link"]]
    if not fitting:
        return present(_none(f"the check that is kept has no {strategy} run"))
    chosen = max(fitting, key=lambda record: record.spec["world_size"])
    show(draw(chosen))
    present(Note((_where(chosen),)))


def _none(why: str) -> Note:
    """Return the note that stands in place of the figure, with the command that would measure it."""
    # a clone is worked in from its root, where the short path is right
    typed = "data/gpu" if checkout() else str(KEPT)
    then = f"`fsdplab gpu-check --out {typed}` measures it, and this cell then shows the figure."
    return Note((f"Not measured on a GPU: {why}.", f"On a machine with one, {then}"))


def _where(record: RunRecord) -> str:
    """Return the provenance line: "Measured on NVIDIA H200, torch 2.11.0, ... ; emulated: ranks on one gpu."."""
    environment = record.environment
    gpus = environment.get("gpus") or [{"name": "a GPU"}]
    parts = [f"Measured on {gpus[0]['name']}", f"torch {environment['versions']['torch']}"]
    if environment.get("commit"):
        parts.append(f"commit {environment['commit']}")
    line = ", ".join(parts)
    emulated = [name.replace("_", " ") for name, word in record.provenance.items() if word == "emulated"]
    if emulated:
        line = f"{line}; emulated: {', '.join(emulated)}"
    return f"{line}."
