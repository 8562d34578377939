"""Lesson 15 in the notebook's process: who holds what of a state dict, a training that is killed and goes on with other
ranks, and a file that others open.

Everything is measured on real ranks; a rank is killed while it writes. No time is among the figures.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdplab.common.sizes import size
from fsdplab.figures import lines
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import CATEGORY_COLOURS, titled
from fsdplab.sessions import RanksFailed
from fsdplab.teaching.core.display import Note, Table, table
from fsdplab.teaching.core.lesson_ranks import LessonRanks
from fsdplab.teaching.core.waiting import doing

from .on_ranks import LOSSES

_on_ranks = LessonRanks(__file__)
_COLOURS = {1: "#7f868f", 2: "#0064c8", 3: "#0aa06c", 4: "#b84a0a"}  # a colour for each number of ranks
STEPS, EVERY = 12, 4


# ---- forms


@doing("a model on 4 ranks, in three forms")
def forms(model: str = "gpt-20m", ranks: int = 4) -> list[dict[str, int]]:
    """Bytes that each rank holds of the parameters, by the form of the state dict."""
    return _on_ranks("forms", ranks, model=model)


def forms_figure(held: Sequence[dict[str, int]]) -> go.Figure:
    """A bar for each form and rank: what it holds."""
    names = [f"{form}: rank {rank}" for form in held[0] for rank in range(len(held))]
    values = [each[form] / 1e6 for form in held[0] for each in held]
    parts = [Part("parameters", CATEGORY_COLOURS["sharded_parameters"], values)]
    ends = {name: f"<b>{value:.0f}</b>" for name, value in zip(names, values)}
    figure = stacked_bars(ends, parts, "MB of parameters", "%{x:.1f} MB")
    whole, part = held[0]["full, on rank 0"], held[0]["sharded"]
    title = f"A full state dict puts {size(whole)} on rank 0, a sharded one {size(part)}"
    said = "; ".join(f"{name} {value:.0f} MB" for name, value in zip(names, values))
    subtitle = f"Measured on {len(held)} ranks; parameters alone, Adam's state is twice as much again"
    return titled(figure, title, subtitle, f"Bars: {said}.", height=60 + 28 * len(names))


@doing("a checkpoint of 4 ranks, loaded on other numbers")
def reshaped(numbers: Sequence[int] = (2, 3, 1)) -> Table:
    """A checkpoint saved on 4 ranks and loaded on others: what each rank holds, and whether bits are those saved."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for how, ranks in (("saved", 4), *(("loaded", number) for number in numbers)):
            found = _on_ranks("save_and_read", ranks, folder=folder, saves=how == "saved")
            held = ", ".join(f"{each['bytes'] / 1e3:.0f}" for each in found)
            rows.append([f"{how} on {ranks}", held, "all equal" if all(each["equal"] for each in found) else "differ"])
    return table(["", "each rank holds, kB", "bits"], rows, "Measured: gpt-tiny after two steps, full_shard.")


# ---- a job that is killed


@dataclass
class Job:
    """A training with a folder of checkpoints, which goes on wherever it was; `parts` tells how each start ended."""

    folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)
    parts: list[str] = field(default_factory=list)

    @doing("training on ranks")
    def run(self, ranks: int, steps: int = STEPS, kill: tuple[int, int] | None = None, every: int = EVERY) -> Note:
        """Train to `steps` on so many ranks; with `kill=(rank, step)` that rank dies while it writes the checkpoint of
        that step.
        """
        begins = self.newest()
        kills = kill and list(kill)
        try:
            behind = _on_ranks("train", ranks, folder=self.folder.name, steps=steps, every=every, kill=kills)[0]
            how = f"{ranks} ranks went from step {begins} to {steps}."
            if behind:
                how += f" A checkpoint was whole on the disk {max(behind)} steps after its save began, or earlier."
        except RanksFailed as error:
            how = f"{ranks} ranks began at step {begins}. {str(error).split('. ')[0]}."
        self.parts.append(how)
        return Note((how, f"In the folder: {', '.join(self.contents()) or 'nothing'}"))

    def contents(self) -> list[str]:
        """The names in the folder of checkpoints, hidden ones too."""
        there = Path(self.folder.name) / "checkpoints"
        return sorted(path.name for path in there.iterdir()) if there.is_dir() else []

    def newest(self) -> int:
        """The step of the newest complete checkpoint; 0 for none."""
        return max((int(name.removeprefix("step-")) for name in self.contents() if name.startswith("step-")), default=0)

    def losses(self) -> list[dict[str, Any]]:
        """A row for each step that was computed, also those that were lost: step, loss, ranks."""
        path = Path(self.folder.name) / LOSSES
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def apart(job: Job, other: Job) -> float:
    """The largest difference of the losses of two jobs, over the steps that both computed."""
    theirs = {row["step"]: row["loss"] for row in other.losses()}
    return max(abs(row["loss"] - theirs[row["step"]]) for row in job.losses() if row["step"] in theirs)


def losses_figure(job: Job, uninterrupted: Job) -> go.Figure:
    """The losses of a job that was killed, in the colour of its number of ranks, over one that was not."""
    figure = go.Figure([lines.line("never killed", "#b3bac4", *_curve(uninterrupted.losses()))])
    for number, rows in enumerate(_parts(job)):
        ranks = rows[0]["ranks"]
        figure.add_trace(lines.points(f"start {number + 1}: {ranks} ranks", _COLOURS[ranks], *_curve(rows)))
    figure.update_xaxes(title_text="step").update_yaxes(title_text="loss")
    computed = Counter(row["step"] for row in job.losses())
    twice = sorted(step for step, times in computed.items() if times > 1)
    again = f"steps {twice[0]} to {twice[-1]} were computed twice" if twice else "no step was computed twice"
    title = f"Killed, and on with other ranks: losses differ by at most {apart(job, uninterrupted):.0e}"
    subtitle = f"Measured: the same 12 sequences in a step on any ranks; {again}"
    return titled(figure, title, subtitle, f"Losses over steps. {' '.join(job.parts)} {again}.", height=340)


def _curve(rows: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    return [row["step"] for row in rows], [row["loss"] for row in rows]


def _parts(job: Job) -> Iterator[list[dict[str, Any]]]:
    """The rows of each start: a step that is not after the one before begins another."""
    rows: list[dict[str, Any]] = []
    for row in job.losses():
        if rows and (row["step"] <= rows[-1]["step"] or row["ranks"] != rows[-1]["ranks"]):
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


# ---- for others


@doing("a small Llama on 2 ranks")
def export() -> Table | Note:
    """Train a small Llama of transformers on two ranks, write it as safetensors, open it with `from_pretrained`, and
    compare logits; a note where transformers is not installed.
    """
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        how = "pip install transformers safetensors, and run the cell again"
        return Note((f"transformers is not installed here: {how}.",))
    import torch

    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        told = _on_ranks("exported", 2, folder=folder)[0]
        files = {path.name: path.stat().st_size for path in sorted(Path(folder).iterdir())}
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            logits = model(input_ids=torch.arange(16).reshape(1, 16)).logits
    off = float((logits - told["logits"]).abs().max())
    rows = [[name, f"{nbytes / 1e3:.1f}"] for name, nbytes in files.items()]
    same = f"differ by {off:.0e}" if off else "are equal"
    caption = f"Measured: {told['names']} parameters. Logits of from_pretrained and of the ranks {same}."
    return table(["file", "kB"], rows, caption)
