"""Lesson 06 in the notebook's process: a whole model in training under the learner's engine, beside the lab's and the
unsharded twin, and a schedule of their own on real blocks.

The functions are the learner's wherever their checks passed, else the references, and every run says which.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle
from pathlib import Path
from typing import Any

from fsdplab.common.sizes import size
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import titled
from fsdplab.records import RunRecord, Summary, known
from fsdplab.records.summary import Comm
from fsdplab.teaching.core.checking import solution, use
from fsdplab.teaching.core.comm_log import bytes_sent
from fsdplab.teaching.core.display import HasTable, Table, notebook_display, present, table
from fsdplab.teaching.core.exercise import Call
from fsdplab.teaching.core.in_use import functions, whose
from fsdplab.teaching.core.lesson_ranks import LessonRanks
from fsdplab.teaching.core.waiting import doing

from .engine import MiniFSDP
from .on_ranks import PARTS
from .schedules import play, schedule_figure
from .units import CHOICES, COLOURS, Plan, choices_figure, choices_table, largest_modules, plan

__all__ = [
    "beside_ddp", "choices_figure", "choices_table", "gathered_figure", "largest_modules", "run_schedule",
    "schedule_figure", "show_glue", "take_engine", "train",
]  # fmt: skip

_on_ranks = LessonRanks(__file__)
WORK = {"batch_size": 2, "sequence_length": 64, "learning_rate": 3e-3, "seed": 0}
_ENGINE = '''
from fsdplab.teaching.lessons.nb06_whole_model.engine import MiniFSDP, Parts
from fsdplab.workloads import block_types


def sharded(model, is_unit=None):
    """The model under your engine: every block is a unit, or what `is_unit(name, module)` says."""
    chosen = is_unit or (lambda name, module: isinstance(module, block_types(model)))
    return MiniFSDP(model, chosen, Parts(shard, unshard, reshard, guarded, reduce, hooks))
'''


def take_engine() -> None:
    """Take your hooks as well where their check passed, and let ranks say `from my_fsdp.in_use import sharded`: the
    six functions as one engine, `sharded(model)`.
    """
    use(*PARTS, "06.hooks", more=_ENGINE)


def show_glue() -> None:
    """Show the part of the library that calls the four hooks."""
    present(_code(inspect.getsource(MiniFSDP._attach)))


def _code(source: str) -> object:
    """The source as a notebook colours it, as plain text everywhere else."""
    if notebook_display() is None:
        return source
    from IPython.display import Code

    return Code(source, language="python")


# ---- a training under each engine

_ORIGINS = {**dict.fromkeys(("losses", "ledger", "unsharded bytes"), "measured"), "formula_bytes_per_step": "computed"}


@dataclass(frozen=True, repr=False)
class Training(HasTable):
    """One training under the learner's engine, beside the lab's and the twin's where they ran too."""

    whose: str
    records: dict[str, RunRecord]
    losses: dict[str, list[float]]
    differs: dict[str, dict[str, Any]]
    rows: dict[str, list[dict[str, Any]]]
    plan: Plan
    provenance: dict[str, str] = field(default_factory=lambda: dict(_ORIGINS))

    @property
    def mine(self) -> RunRecord:
        """The record of the learner's engine."""
        return self.records["my_fsdp"]

    @property
    def gathered_megabytes(self) -> float:
        """Most MB that the learner's engine had unsharded at once on a rank."""
        return known(self.mine.summary.gathered_bytes) / 1e6

    def table(self) -> Table:
        """Losses, distance from the twin, collectives, bytes and unsharded bytes, an engine a row."""
        rows = [
            [name, f"{losses[0]:.6f}", f"{losses[-1]:.6f}", *self._distance(name), *self._traffic(name)]
            for name, losses in self.losses.items()
        ]
        bytes_sent = f"{self.mine.summary.formula_bytes_per_step:,}"
        formula = ["formula", *[""] * 4, f"{self.plan.collectives}", bytes_sent, f"{self.plan.peak:,}"]
        header = ["", "first loss", "last loss", "largest difference from the twin", "floats that differ"]
        header += ["collectives a step", "bytes sent a step", "bytes unsharded at most"]
        how = f"Measured on {self.mine.spec['world_size']} real ranks, {self.whose}. The formula is computed."
        return table(header, [*rows, formula], how)

    def _distance(self, name: str) -> tuple[str, str]:
        if name not in self.differs:
            return "", ""
        differs = self.differs[name]
        return f"{differs['largest']:g}", f"{differs['floats']:,} of {differs['of']:,}"

    def _traffic(self, name: str) -> tuple[str, str, str]:
        if name not in self.records:
            return "", "", ""
        summary = self.records[name].summary
        comm, unsharded = summary.comm, summary.gathered_bytes
        return str(comm.collectives_per_step), f"{comm.bytes_per_step:,}", f"{unsharded:,}"


@doing("training under each engine in turn")
def train(
    model: str = "gpt-tiny",
    steps: int = 5,
    engines: Sequence[str] = ("mine", "lab", "twin"),
    own_units: bool = False,
    prefetch: int = 1,
    world_size: int = 2,
) -> Training:
    """Train a preset on the course's text under the learner's engine, and under the lab's and as the unsharded twin
    beside it.

    Blocks are units, or with `own_units` what the learner's `choose_units` chooses. `prefetch` is the lab's: units
    unsharded ahead.
    """
    work = {**WORK, "ranks": world_size, "model": model, "steps": steps}
    asked = {"work": work, "engines": list(engines), "own_units": own_units, "prefetch": prefetch}
    by_rank = _on_ranks("train_all", world_size, **asked)
    return _training(by_rank, work, plan(model, solution("06.choose_units") if own_units else CHOICES["every block"]))


def _training(by_rank: list[dict[str, Any]], work: dict[str, Any], computed: Plan) -> Training:
    names = {"mine": "my_fsdp", "lab": "lab"}
    ran = {named: [each[engine] for each in by_rank] for engine, named in names.items() if engine in by_rank[0]}
    losses = {named: _mean([run["losses"] for run in runs]) for named, runs in ran.items()}
    if "twin" in by_rank[0]:
        losses = {"twin": _mean(by_rank[0]["twin"]["by_rank"]), **losses}
    records = {named: record_of(named, runs[0], losses[named], work, computed) for named, runs in ran.items()}
    differs = {
        named: max((run["differs"] for run in runs), key=lambda found: found["largest"])
        for named, runs in ran.items()
        if "differs" in runs[0]
    }
    rows = {named: runs[0]["rows"] for named, runs in ran.items()}
    return Training(whose(*PARTS, "06.hooks"), records, losses, differs, rows, computed)


def _mean(by_rank: Sequence[Sequence[float]]) -> list[float]:
    return [sum(losses) / len(losses) for losses in zip(*by_rank, strict=True)]


@dataclass(frozen=True, repr=False)
class Beside(HasTable):
    """One training under the learner's engine, under DDP and under PyTorch's fully_shard: losses, peaks of a rank."""

    whose: str
    model: str
    losses: dict[str, list[float]]
    peaks: dict[str, int]
    provenance: dict[str, str] = field(default_factory=lambda: dict.fromkeys(("losses", "peak memory"), "measured"))

    def megabytes(self, engine: str) -> float:
        """MB at the peak of the worst rank under `"my_fsdp"`, `"DDP"` or `"fully_shard"`."""
        return self.peaks[engine] / 1e6

    def table(self) -> Table:
        """The mean loss of the ranks in each step, and the peak, an engine a row."""
        rows = [
            [name, *(f"{loss:.6f}" for loss in losses), f"{self.megabytes(name):.0f}"]
            for name, losses in self.losses.items()
        ]
        header = ["", *(f"loss, step {step}" for step in range(len(rows[0]) - 2)), "peak, MB"]
        return table(header, rows, f"Measured on 2 real ranks, {self.model} in fp32; my_fsdp {self.whose}.")


@doing("training under your engine, under DDP and under fully_shard")
def beside_ddp(model: str = "gpt-20m", steps: int = 3) -> Beside:
    """Train a preset under the learner's engine, and under torch's DDP and fully_shard, on the same text."""
    work = {**WORK, "model": model, "steps": steps, "ranks": 2}
    by_rank = _on_ranks("losses_and_peaks", 2, work=work)
    losses = {name: _mean([seen[name]["losses"] for seen in by_rank]) for name in by_rank[0]}
    peaks = {name: max(seen[name]["peak"] for seen in by_rank) for name in by_rank[0]}
    return Beside(whose(*PARTS, "06.hooks"), model, losses, peaks)


_KINDS = {"unshard": "all_gather", "reduce": "reduce_scatter"}
_PROVENANCE = {"losses": "measured", "ledger": "measured", "formula_bytes_per_step": "simulated"}


def ledger(rows: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """The rows of a learner's log as a ledger: one row a collective, with the bytes that its calls sent."""
    return [
        {
            "rank": 0, "step": row["step"], "unit": row["unit"], "phase": row["phase"], "kind": _KINDS[row["what"]],
            "logical_bytes": row["bytes"] * ranks,
            "wire_bytes": round(sum(bytes_sent(Call(*call), ranks) for call in row["calls"])),
        }
        for row in rows
        if row["what"] in _KINDS
    ]  # fmt: skip


def record_of(engine: str, run: dict[str, Any], losses: list[float], work: dict[str, Any], plan: Plan) -> RunRecord:
    """The record of one engine's run on rank 0; `run` holds `rows`, and `ledger` where the engine keeps its own."""
    ranks, last = work["ranks"], work["steps"] - 1
    rows = [{"rank": 0, **row} for row in run["ledger"]] if "ledger" in run else ledger(run["rows"], ranks)
    step = [row for row in rows if row["step"] == last]
    summary = Summary(
        losses=tuple(losses),
        comm=Comm(bytes_per_step=sum(row["wire_bytes"] for row in step), collectives_per_step=len(step)),
        formula_bytes_per_step=plan.traffic(ranks),
        gathered_bytes=max(sum(row["unsharded"].values()) for row in run["rows"]),
    )
    spec = {"strategy": "full_shard", "engine": engine, "world_size": ranks, "model": work["model"]}
    steps = [{"rank": 0, "step": index, "loss": loss} for index, loss in enumerate(run["losses"])]
    return RunRecord(
        Path("unsaved"), spec=spec, summary=summary, provenance=_PROVENANCE, tables={"ledger": rows, "steps": steps}
    )


def gathered_figure(training: Training, engine: str = "my_fsdp") -> go.Figure:
    """Unsharded bytes after every unshard and reshard of the last step, stacked by unit, in time order from the top."""
    rows = training.rows[engine]
    rows = [row for row in rows if row["step"] == rows[-1]["step"] and row["what"] != "reduce"]
    names = [f"{number}  {row['what']} {row['unit']}" for number, row in enumerate(rows, 1)]
    totals = [sum(row["unsharded"].values()) for row in rows]
    colours = dict(zip((name for name, _ in reversed(training.plan.units)), chain(COLOURS[:1], cycle(COLOURS[1:]))))
    whole = sum(nbytes for _, nbytes in training.plan.units)
    parts = [
        Part(unit, colour, [row["unsharded"].get(unit, 0) / 1e6 for row in rows]) for unit, colour in colours.items()
    ]
    ends = {name: f"<b>{size(total)}</b>" for name, total in zip(names, totals)}
    levels = {f"whole model: {size(whole)}": whole / 1e6}
    figure = stacked_bars(ends, parts, "unsharded parameters on one rank (MB)", "%{x:.3f} MB", levels=levels)
    summary = "; ".join(f"{name} {size(total)}" for name, total in zip(names, totals))
    spec = training.records[engine].spec
    how = "storages after each call" if engine == "my_fsdp" else "as its events announce"
    subtitle = f"Measured on rank 0 of {spec['world_size']} CPU ranks, {spec['model']}, last step: {how}"
    title = f"{engine}: at most {size(max(totals))} of {size(whole)} unsharded at once"
    alt = f"Bars from top to bottom in time order: {summary}."
    return titled(figure, title, subtitle, alt, height=140 + 30 * len(names))


# ---- a schedule on real blocks


@doing("one step on real ranks, in the order of the schedule")
def run_schedule(blocks: int = 4, width: int = 64, world_size: int = 2) -> Table:
    """One step of real blocks in the order of the learner's schedule (or the reference), with the functions in use."""
    by_rank = _on_ranks("scheduled", world_size, blocks=blocks, width=width)
    computed = play(functions("06.schedule")["schedule"](blocks), blocks)
    rows = [
        [f"rank {rank}", f"{seen['differing']:,} of {seen['of']:,}", f"{seen['peak']:.2f}", str(computed.peak)]
        for rank, seen in enumerate(by_rank)
    ]
    header = ["", "gradients that differ from the twin's", "blocks in memory at most", "by the puzzle's arithmetic"]
    return table(header, rows, f"Measured on {world_size} real ranks {whose('06.schedule')}. Time was not looked at.")
