"""Lesson 06 in the notebook's process: a whole model in training under the learner's engine, beside the lab's and the
unsharded twin, and a schedule of their own on real blocks.

The functions are the learner's wherever their checks passed, else the references, and every run says which.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from fsdplab.common.sizes import size
from fsdplab.common.words import MISSING
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.lines import points
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import DARK_INK, titled
from fsdplab.planning import UnitShapes, step_traffic
from fsdplab.records import RunRecord, Summary, known
from fsdplab.records.summary import Comm
from fsdplab.teaching.core.checking import solution, use
from fsdplab.teaching.core.comm_log import bytes_sent
from fsdplab.teaching.core.display import HasTable, Table, notebook_display, present, table
from fsdplab.teaching.core.exercise import Call
from fsdplab.teaching.core.in_use import functions, whose
from fsdplab.teaching.core.lesson_ranks import LessonRanks
from fsdplab.teaching.core.waiting import doing
from fsdplab.workloads import build_model

from .engine import MiniFSDP, Wanted, chosen
from .on_ranks import PARTS
from .schedules import play, schedule_figure  # noqa: F401 (the notebook calls the figure)

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
    source: object = inspect.getsource(MiniFSDP._attach)
    if notebook_display() is not None:
        from IPython.display import Code

        source = Code(source, language="python")
    present(source)


# ---- a training under each engine


@dataclass(frozen=True, repr=False)
class Training(HasTable):
    """One training under the learner's engine, beside the lab's and the twin's where they ran too."""

    provenance: ClassVar = {
        **dict.fromkeys(("losses", "ledger", "unsharded bytes"), "measured"),
        "formula_bytes_per_step": "computed",
    }
    whose: str
    records: dict[str, RunRecord]
    losses: dict[str, list[float]]
    differs: dict[str, dict[str, Any]]
    rows: dict[str, list[dict[str, Any]]]
    plan: Plan

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
        rows = []
        for name, losses in self.losses.items():
            far, record = self.differs.get(name), self.records.get(name)
            cells = [f"{far['largest']:g}", f"{far['floats']:,} of {far['of']:,}"] if far else ["", ""]
            seen = record and record.summary
            sent = [f"{seen.comm.collectives_per_step}", f"{seen.comm.bytes_per_step:,}"] if seen else ["", ""]
            unsharded = f"{seen.gathered_bytes:,}" if seen else ""
            rows.append([name, f"{losses[0]:.6f}", f"{losses[-1]:.6f}", *cells, *sent, unsharded])
        bytes_sent = f"{self.mine.summary.formula_bytes_per_step:,}"
        formula = ["formula", *[""] * 4, f"{self.plan.collectives}", bytes_sent, f"{self.plan.peak:,}"]
        header = ["", "first loss", "last loss", "largest difference from the twin", "floats that differ"]
        header += ["collectives a step", "bytes sent a step", "bytes unsharded at most"]
        how = f"Measured on {self.mine.spec['world_size']} real ranks, {self.whose}. The formula is computed."
        return table(header, [*rows, formula], how)


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
    computed = plan(model, solution("06.choose_units") if own_units else CHOICES["every block"])
    names = ["my_fsdp" if name == "mine" else name for name in engines]
    by_rank = _trained(work, names, own_units=own_units, prefetch=prefetch)
    losses = {"twin": _mean(by_rank[0]["twin"])} if "twin" in names else {}
    ran = {name: [each[name] for each in by_rank] for name in names if name != "twin"}
    losses |= {name: _mean([run["losses"] for run in runs]) for name, runs in ran.items()}
    records = {name: record_of(name, runs[0], losses[name], work, computed) for name, runs in ran.items()}
    differing = {name: [run["differs"] for run in runs] for name, runs in ran.items() if "twin" in names}
    differs = {name: max(found, key=lambda each: each["largest"]) for name, found in differing.items()}
    rows = {name: runs[0]["rows"] for name, runs in ran.items()}
    return Training(whose(*PARTS, "06.hooks"), records, losses, differs, rows, computed)


def _trained(
    work: dict[str, Any], engines: Sequence[str], peaks: bool = False, own_units: bool = False, prefetch: int = 1
) -> list[dict[str, Any]]:
    asked = {"engines": list(engines), "peaks": peaks, "own_units": own_units, "prefetch": prefetch}
    return _on_ranks("train_all", work["ranks"], work=work, **asked)


def _mean(by_rank: Sequence[Sequence[float]]) -> list[float]:
    return [sum(losses) / len(losses) for losses in zip(*by_rank, strict=True)]


@dataclass(frozen=True, repr=False)
class Beside(HasTable):
    """One training under the learner's engine, under DDP and under PyTorch's fully_shard: losses, peaks of a rank."""

    whose: str
    model: str
    losses: dict[str, list[float]]
    peaks: dict[str, int]
    provenance: ClassVar = dict.fromkeys(("losses", "peak memory"), "measured")

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
    by_rank = _trained(work, ("my_fsdp", "DDP", "fully_shard"), peaks=True)
    losses = {name: _mean([seen[name]["losses"] for seen in by_rank]) for name in by_rank[0]}
    peaks = {name: max(seen[name]["peak"] for seen in by_rank) for name in by_rank[0]}
    return Beside(whose(*PARTS, "06.hooks"), model, losses, peaks)


_KINDS = {"unshard": "all_gather", "reduce": "reduce_scatter"}
_PROVENANCE = {"losses": "measured", "ledger": "measured", "formula_bytes_per_step": "simulated"}


def ledger(rows: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """The rows of a learner's log as a ledger: one row a collective, with the bytes that its calls sent."""
    return [
        {
            "rank": 0,
            "step": row["step"],
            "unit": row["unit"],
            "phase": row["phase"],
            "kind": _KINDS[row["what"]],
            "logical_bytes": row["bytes"] * ranks,
            "wire_bytes": round(sum(bytes_sent(Call(*call), ranks) for call in row["calls"])),
        }
        for row in rows
        if row["what"] in _KINDS
    ]


def record_of(engine: str, run: dict[str, Any], losses: list[float], work: dict[str, Any], plan: Plan) -> RunRecord:
    """The record of one engine's run on rank 0; `run` holds `rows`, and `ledger` where the engine keeps its own."""
    ranks, last = work["ranks"], work["steps"] - 1
    rows = [{"rank": 0, **row} for row in run["ledger"]] if run["ledger"] else ledger(run["rows"], ranks)
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


# ---- choices of units and their cost by arithmetic

FLOAT = 4
COLOURS = ("#0064c8", "#6cc4f0", "#f09a1a", "#0aa06c", "#cc7fa8", "#ebdf6a", "#b84a0a")  # the root's, then the others'

CHOICES: dict[str, Wanted] = {
    "the whole model": lambda name, module: False,
    "every block": lambda name, module: type(module).__name__ == "GPTBlock",
    "every Linear": lambda name, module: isinstance(module, nn.Linear),
}


@dataclass(frozen=True)
class Plan:
    """One choice of units: (name, bytes) of each, root last; the bytes of the largest chain without the root;
    collectives.
    """

    units: tuple[tuple[str, int], ...]
    chain: int
    collectives: int
    shapes: tuple[UnitShapes, ...]

    @property
    def root(self) -> int:
        """Bytes of the root unit: unsharded from the beginning of the forward to the end of the backward."""
        return dict(self.units).get("root", 0)

    @property
    def peak(self) -> int:
        """Most bytes unsharded at once."""
        return self.root + self.chain

    def traffic(self, ranks: int) -> int:
        """Bytes that one rank sends in a step of full_shard, by the textbook's formula."""
        return sum(entry.step_bytes for entry in step_traffic(self.shapes, "full_shard", ranks))


def plan(model_name: str, is_unit: Wanted) -> Plan:
    """The arithmetic of one choice, without a tensor: `plan("gpt-tiny", lambda name, module:
    False).collectives == 2`.
    """
    shapes = {
        name: [(str(index), tuple(parameter.shape)) for index, parameter in enumerate(own)]
        for name, _, own in chosen(build_model(model_name, device="meta"), is_unit)
    }
    held = {name: FLOAT * sum(math.prod(shape) for _, shape in own) for name, own in shapes.items()}
    below = [name for name in held if name != "root"]
    chain = max(
        (sum(held[other] for other in below if f"{name}.".startswith(f"{other}.")) for name in below), default=0
    )
    units = tuple(UnitShapes(name, tuple(own)) for name, own in shapes.items())
    return Plan(tuple(held.items()), chain, 3 * len(below) + 2 * ("root" in held), units)


def choices_table(model: str = "gpt-20m", **more: Wanted) -> Table:
    """Ready-made choices of units (and `more`) beside each other, computed."""
    plans = {name: plan(model, is_unit) for name, is_unit in {**CHOICES, **more}.items()}
    rows = []
    for name, each in plans.items():
        held = [size(each.root), size(each.chain) if each.chain else MISSING, size(each.peak)]
        sent = size(each.traffic(2) // each.collectives)
        rows.append([name, f"{len(each.units):,}", *held, f"{each.collectives:,}", sent])
    header = ["units", "how many", "root", "largest other unit", "unsharded at most"]
    header += ["collectives a step", "sent by each, on average"]
    return table(header, rows, f"Computed for {model} in fp32 on 2 ranks, with nothing unsharded ahead.")


def largest_modules(model: str = "gpt-20m") -> Table:
    """The modules of one block and of the root with their sizes: what can be a unit."""
    built = build_model(model, device="meta")
    rows = []
    for name, module in built.named_modules():
        parameters = sum(parameter.numel() for parameter in module.parameters())
        if parameters and (name.startswith("blocks.0") or "." not in name and name not in ("", "blocks")):
            rows.append([name, type(module).__name__, size(FLOAT * parameters)])
    caption = f"Computed for {model} in fp32: one of its {built.config.layers} blocks, and what lies outside them."
    return table(["name", "class", "unsharded"], rows, caption)


def choices_figure(
    model: str = "gpt-20m", target: int | None = None, measured: dict[str, float] | None = None, **more: Wanted
) -> go.Figure:
    """Root and largest unit of each choice of units (the whole model left out), with a target line and measured peaks
    (MB).
    """
    asked = {name: is_unit for name, is_unit in {**CHOICES, **more}.items() if name != "the whole model"}
    plans = {name.replace("_", " "): plan(model, is_unit) for name, is_unit in asked.items()}
    ends = {name: f"<b>{size(each.peak)} · {each.collectives} collectives</b>" for name, each in plans.items()}
    parts = [
        Part("root", COLOURS[0], [each.root / 1e6 for each in plans.values()]),
        Part("largest unit, with units around it", COLOURS[1], [each.chain / 1e6 for each in plans.values()]),
    ]
    levels = {f"target {size(target)}": target / 1e6} if target else {}
    figure = stacked_bars(ends, parts, "unsharded parameters at the peak (MB)", "%{x:.3f} MB", levels=levels)
    if measured:
        names, tick = [name.replace("_", " ") for name in measured], dict(color=DARK_INK, width=3)
        hover = "%{y}<br>measured %{x:.3f} MB<extra></extra>"
        look = dict(marker=dict(symbol="line-ns", line=tick), hovertemplate=hover)
        figure.add_trace(points("measured", DARK_INK, list(measured.values()), names, 26, **look))
    ranked = sorted(plans.items(), key=lambda each: -each[1].peak)
    both = [f"{name}: {size(each.peak)} and {each.collectives}" for name, each in (ranked[0], ranked[-1])]
    title = " collectives; ".join(both)
    if more:
        name, last = list(plans.items())[-1]
        verdict = "" if not target else ", under the target" if last.peak <= target else ", over the target"
        title = f"{name}: {size(last.peak)} unsharded in {last.collectives} collectives{verdict}"
    where = f"Computed for {model} in fp32, nothing unsharded ahead"
    where += "; ticks are measured on CPU ranks" if measured else ""
    said = "; ".join(f"{name} {size(each.peak)} with {each.collectives} collectives" for name, each in plans.items())
    alt = f"Bars of unsharded bytes: {said}." + (f" Target {size(target)}." if target else "")
    return titled(figure, title, where, alt, height=140 + 52 * len(plans))
