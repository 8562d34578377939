"""The lesson's figure from a real GPU: the result of `fsdplab gpu-check` is kept in data/gpu and opens on any machine.

Without a result, the cell says how to make one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdplab.common.places import checkout, shared_folder
from fsdplab.gpu_check.check import open_check
from fsdplab.records import RunRecord

from .display import Note, present, show

if TYPE_CHECKING:
    import plotly.graph_objects as go

KEPT = shared_folder("data") / "gpu"


def on_a_gpu(draw: Callable[[RunRecord], go.Figure], strategy: str = "full_shard", folder: Path = KEPT) -> None:
    """Show `draw(record)` of the run with most ranks that was recorded on a GPU under `strategy`; without one, a line
    that says so.

    `on_a_gpu(rank_timeline)` in lesson 07. Raises `CheckError` where the folder holds a damaged check.
    """
    if not (folder / "check.json").exists():
        return present(_none("no check was made on one yet"))
    check = open_check(folder)
    device = check.provenance.get("device", "an unnamed device")
    if device != "cuda":
        return present(_none(f"the check that is kept ran on {device}, as a rehearsal"))
    runs = map(RunRecord.load, check.records)
    fitting = [run for run in runs if run.spec["strategy"] == strategy and not run.spec["link"]]
    if not fitting:
        return present(_none(f"the check that is kept has no {strategy} run"))
    chosen = max(fitting, key=lambda run: run.spec["world_size"])
    show(draw(chosen))
    present(Note((_where(check.provenance, chosen),)))


def _none(why: str) -> Note:
    typed = "data/gpu" if checkout() else str(KEPT)
    then = f"`fsdplab gpu-check --out {typed}` measures it, and this cell then shows the figure."
    return Note((f"Not measured on a GPU: {why}.", f"On a machine with one, {then}"))


def _where(provenance: dict[str, Any], run: RunRecord) -> str:
    """The provenance line: "Measured on NVIDIA H200, torch 2.11.0, ... ; ranks on one gpu: emulated"."""
    parts = [
        f"Measured on {provenance.get('gpu', 'a GPU')}",
        *(f"{name} {provenance[name]}" for name in ("torch", "driver", "commit") if provenance.get(name)),
    ]
    emulated = [name.replace("_", " ") for name, word in run.provenance.items() if word == "emulated"]
    return ", ".join(parts) + (f"; emulated: {', '.join(emulated)}" if emulated else "") + "."
