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
    """Return the bytes that each rank holds of the parameters, by the form of the state dict."""
    return _on_ranks("forms", ranks, model=model)


def forms_figure(held: Sequence[dict[str, int]]) -> go.Figure:
    """Draw a bar for each form and rank: what it holds. `held` has the bytes by form, for each rank."""
    # a bar for each form and rank, form after form
    values, ends, bars = [], {}, []
    for form in held[0]:
        for rank, nbytes in enumerate(held):
            name = f"{form}: rank {rank}"
            megabytes = nbytes[form] / 1e6
            values.append(megabytes)
            ends[name] = f"<b>{megabytes:.0f}</b>"
            bars.append(f"{name} {megabytes:.0f} MB")
    parts = [Part("parameters", CATEGORY_COLOURS["sharded_parameters"], values)]
    figure = stacked_bars(ends, parts, "MB of parameters", "%{x:.1f} MB")

    of_rank_0 = held[0]
    whole, shard = size(of_rank_0["full, on rank 0"]), size(of_rank_0["sharded"])
    title = f"A full state dict puts {whole} on rank 0, a sharded one {shard}"
    subtitle = f"Measured on {len(held)} ranks; parameters alone, Adam's state is twice as much again"
    return titled(figure, title, subtitle, f"Bars: {'; '.join(bars)}.", height=60 + 28 * len(ends))


@doing("a checkpoint of 4 ranks, loaded on other numbers")
def reshaped(numbers: Sequence[int] = (2, 3, 1)) -> Table:
    """Save a checkpoint on 4 ranks and load it on others: what each rank holds, and whether bits are those saved."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for how, ranks in (("saved", 4), *(("loaded", number) for number in numbers)):
            by_rank = _on_ranks("save_and_read", ranks, folder=folder, saves=how == "saved")
            kilobytes = ", ".join(f"{seen['bytes'] / 1e3:.0f}" for seen in by_rank)
            # rank 0 alone has the whole, and the others nothing to compare
            are_equal = all(seen["equal"] for seen in by_rank)
            rows.append([f"{how} on {ranks}", kilobytes, "all equal" if are_equal else "differ"])
    return table(["", "each rank holds, kB", "bits"], rows, "Measured: gpt-tiny after two steps, full_shard.")


# ---- a job that is killed


@dataclass
class Job:
    """A training with a folder of checkpoints, which goes on wherever it was; `parts` tells how each start ended."""

    folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)
    parts: list[str] = field(default_factory=list)

    @doing("training on ranks")
    def run(self, ranks: int, steps: int = STEPS, kill: tuple[int, int] | None = None, every: int = EVERY) -> Note:
        """Train to `steps` on so many ranks, with a checkpoint every `every` steps.

        With `kill=(rank, step)` that rank dies while it writes the checkpoint of that step.
        """
        # the step that this start goes on from
        begins = self.newest()
        kills = kill and list(kill)
        try:
            by_rank = _on_ranks("train", ranks, folder=self.folder.name, steps=steps, every=every, kill=kills)
            how = f"{ranks} ranks went from step {begins} to {steps}."
            steps_behind = by_rank[0]
            if steps_behind:
                most = max(steps_behind)
                how = f"{how} A checkpoint was whole on the disk {most} steps after its save began, or earlier."
        except RanksFailed as error:
            how = f"{ranks} ranks began at step {begins}. {str(error).split('. ')[0]}."
        self.parts.append(how)
        return Note((how, f"In the folder: {', '.join(self.contents()) or 'nothing'}"))

    def contents(self) -> list[str]:
        """Return the names in the folder of checkpoints, hidden ones too."""
        checkpoints = Path(self.folder.name) / "checkpoints"
        if not checkpoints.is_dir():
            return []
        return sorted(path.name for path in checkpoints.iterdir())

    def newest(self) -> int:
        """Return the step of the newest complete checkpoint; 0 for none."""
        steps = [int(name.removeprefix("step-")) for name in self.contents() if name.startswith("step-")]
        return max(steps, default=0)

    def losses(self) -> list[dict[str, Any]]:
        """Return a row for each step that was computed, also those that were lost: step, loss, ranks."""
        path = Path(self.folder.name) / LOSSES
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def apart(job: Job, other: Job) -> float:
    """Return the largest difference of the losses of two jobs, over the steps that both computed."""
    other_losses = {row["step"]: row["loss"] for row in other.losses()}
    distances = []
    for row in job.losses():
        if row["step"] in other_losses:
            distances.append(abs(row["loss"] - other_losses[row["step"]]))
    return max(distances)


def losses_figure(job: Job, uninterrupted: Job) -> go.Figure:
    """Draw the losses of a job that was killed, in the colour of its number of ranks, over one that was not."""
    figure = go.Figure()
    steps, losses = _curve(uninterrupted.losses())
    figure.add_trace(lines.line("never killed", "#b3bac4", steps, losses))
    for number, rows in enumerate(_parts(job), 1):
        ranks = rows[0]["ranks"]
        steps, losses = _curve(rows)
        figure.add_trace(lines.points(f"start {number}: {ranks} ranks", _COLOURS[ranks], steps, losses))
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="loss")

    times_computed = Counter(row["step"] for row in job.losses())
    # steps after the newest checkpoint, which were lost and computed again
    twice = sorted(step for step, times in times_computed.items() if times > 1)
    again = "no step was computed twice"
    if twice:
        again = f"steps {twice[0]} to {twice[-1]} were computed twice"
    title = f"Killed, and on with other ranks: losses differ by at most {apart(job, uninterrupted):.0e}"
    subtitle = f"Measured: the same 12 sequences in a step on any ranks; {again}"
    return titled(figure, title, subtitle, f"Losses over steps. {' '.join(job.parts)} {again}.", height=340)


def _curve(rows: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Return the steps and the losses of some rows."""
    return [row["step"] for row in rows], [row["loss"] for row in rows]


def _parts(job: Job) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each start: a step that is not after the one before begins another."""
    rows: list[dict[str, Any]] = []
    for row in job.losses():
        if rows:
            last = rows[-1]
            # a step that is computed again, or another number of ranks
            if row["step"] <= last["step"] or row["ranks"] != last["ranks"]:
                yield rows
                rows = []
        rows.append(row)
    if rows:
        yield rows


# ---- for others


@doing("a small Llama on 2 ranks")
def export() -> Table | Note:
    """Train a small Llama of transformers on two ranks, write it as safetensors, and compare what others open.

    `from_pretrained` opens the file, and its logits are compared with the ranks'. A note says so where transformers is
    not installed.
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
        exported = _on_ranks("exported", 2, folder=folder)[0]
        rows = []
        for path in sorted(Path(folder).iterdir()):
            rows.append([path.name, f"{path.stat().st_size / 1e3:.1f}"])
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            logits = model(input_ids=torch.arange(16).reshape(1, 16)).logits
    distance = float((logits - exported["logits"]).abs().max())
    same = f"differ by {distance:.0e}" if distance else "are equal"
    caption = f"Measured: {exported['names']} parameters. Logits of from_pretrained and of the ranks {same}."
    return table(["file", "kB"], rows, caption)
