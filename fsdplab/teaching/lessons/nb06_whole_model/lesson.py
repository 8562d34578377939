"""Lesson 06 in the notebook's process: a whole model in training under the learner's engine, beside the lab's and the
unsharded twin, and a schedule of their own on real blocks.

The functions are the learner's wherever their checks passed, else the references, and every run says which.
"""

from __future__ import annotations

import inspect
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
from fsdplab.teaching.core.functions_in_use import functions, whose
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
    """Take your hooks as well where their check passed, and let ranks import the six functions as one engine.

    Cells on ranks say `from my_fsdp.in_use import sharded`, and then `sharded(model)`.
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
        """Return the record of the learner's engine."""
        return self.records["my_fsdp"]

    @property
    def gathered_megabytes(self) -> float:
        """Return the most MB that the learner's engine had unsharded at once on a rank."""
        return known(self.mine.summary.gathered_bytes) / 1e6

    def table(self) -> Table:
        """Return losses, distance from the twin, collectives, bytes and unsharded bytes, an engine a row."""
        rows = []
        for name, losses in self.losses.items():
            # two losses, two cells of the distance from the twin, three of one step's messages and memory
            row = [name, f"{losses[0]:.6f}", f"{losses[-1]:.6f}", "", "", "", "", ""]
            if name in self.differs:
                differs = self.differs[name]
                row[3:5] = [f"{differs['largest']:g}", f"{differs['floats']:,} of {differs['of']:,}"]
            if name in self.records:
                summary = self.records[name].summary
                sent = summary.comm
                row[5:] = [f"{sent.collectives_per_step}", f"{sent.bytes_per_step:,}", f"{summary.gathered_bytes:,}"]
            rows.append(row)
        bytes_sent = f"{self.mine.summary.formula_bytes_per_step:,}"
        rows.append(["formula", "", "", "", "", f"{self.plan.collectives}", bytes_sent, f"{self.plan.peak:,}"])
        header = [
            "",
            "first loss",
            "last loss",
            "largest difference from the twin",
            "floats that differ",
            "collectives a step",
            "bytes sent a step",
            "bytes unsharded at most",
        ]
        ranks = self.mine.spec["world_size"]
        return table(header, rows, f"Measured on {ranks} real ranks, {self.whose}. The formula is computed.")


@doing("training under each engine in turn")
def train(
    model: str = "gpt-tiny",
    steps: int = 5,
    engines: Sequence[str] = ("mine", "lab", "twin"),
    own_units: bool = False,
    prefetch: int = 1,
    world_size: int = 2,
) -> Training:
    """Train a preset on the course's text under the learner's engine, the lab's, and as the unsharded twin.

    Blocks are units, or with `own_units` what the learner's `choose_units` chooses. `prefetch` is the lab's: units
    unsharded ahead.
    """
    work = {**WORK, "ranks": world_size, "model": model, "steps": steps}
    is_unit = CHOICES["every block"]
    if own_units:
        is_unit = solution("06.choose_units")
    computed = plan(model, is_unit)
    names = ["my_fsdp" if name == "mine" else name for name in engines]
    by_rank = _trained(work, names, own_units=own_units, prefetch=prefetch)

    losses, records, differs, rows = {}, {}, {}, {}
    if "twin" in names:
        losses["twin"] = _mean(by_rank[0]["twin"])
    for name in names:
        if name == "twin":
            continue
        # what each rank saw under this engine; the record is of rank 0
        runs = [rank[name] for rank in by_rank]
        losses[name] = _mean([run["losses"] for run in runs])
        records[name] = record_of(name, runs[0], losses[name], work, computed)
        rows[name] = runs[0]["rows"]
        if "twin" in names:
            # of the rank that is farthest from the twin
            differs[name] = max((run["differs"] for run in runs), key=lambda differs: differs["largest"])
    return Training(whose(*PARTS, "06.hooks"), records, losses, differs, rows, computed)


def _trained(
    work: dict[str, Any], engines: Sequence[str], peaks: bool = False, own_units: bool = False, prefetch: int = 1
) -> list[dict[str, Any]]:
    """Train under each engine on ranks; return what each rank saw, by engine."""
    options = {"engines": list(engines), "peaks": peaks, "own_units": own_units, "prefetch": prefetch}
    return _on_ranks("train_all", work["ranks"], work=work, **options)


def _mean(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean over the ranks of each step's loss; `by_rank` is `[rank][step]`."""
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
        """Return the MB at the peak of the worst rank under `"my_fsdp"`, `"DDP"` or `"fully_shard"`."""
        return self.peaks[engine] / 1e6

    def table(self) -> Table:
        """Return the mean loss of the ranks in each step, and the peak, an engine a row."""
        rows = []
        for name, losses in self.losses.items():
            rows.append([name, *(f"{loss:.6f}" for loss in losses), f"{self.megabytes(name):.0f}"])
        steps = len(rows[0]) - 2
        header = ["", *(f"loss, step {step}" for step in range(steps)), "peak, MB"]
        return table(header, rows, f"Measured on 2 real ranks, {self.model} in fp32; my_fsdp {self.whose}.")


@doing("training under the engine of six functions, under DDP and under fully_shard")
def beside_ddp(model: str = "gpt-20m", steps: int = 3) -> Beside:
    """Train a preset under the learner's engine, and under torch's DDP and fully_shard, on the same text."""
    work = {**WORK, "model": model, "steps": steps, "ranks": 2}
    by_rank = _trained(work, ("my_fsdp", "DDP", "fully_shard"), peaks=True)
    losses, peaks = {}, {}
    for name in by_rank[0]:
        losses[name] = _mean([rank[name]["losses"] for rank in by_rank])
        peaks[name] = max(rank[name]["peak"] for rank in by_rank)
    return Beside(whose(*PARTS, "06.hooks"), model, losses, peaks)


_KINDS = {"unshard": "all_gather", "reduce": "reduce_scatter"}
_PROVENANCE = {"losses": "measured", "ledger": "measured", "formula_bytes_per_step": "simulated"}


def ledger(rows: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Return the rows of a learner's log as a ledger: one row a collective, with the bytes that its calls sent.

    `logical_bytes` are those of the whole unit, `wire_bytes` what this rank sends by the textbook.
    """
    entries = []
    for row in rows:
        if row["what"] not in _KINDS:
            continue
        sent = sum(bytes_sent(Call(*call), ranks) for call in row["calls"])
        entries.append(
            {
                "rank": 0,
                "step": row["step"],
                "unit": row["unit"],
                "phase": row["phase"],
                "kind": _KINDS[row["what"]],
                # `bytes` are those of this rank's shard
                "logical_bytes": row["bytes"] * ranks,
                "wire_bytes": round(sent),
            }
        )
    return entries


def record_of(engine: str, run: dict[str, Any], losses: list[float], work: dict[str, Any], plan: Plan) -> RunRecord:
    """Return the record of one engine's run on rank 0.

    `run` has `losses` and `rows` (of the engine's log), and `ledger` where the engine keeps its own; `losses` are the
    mean over the ranks. The formula's bytes are those of `plan`.
    """
    ranks, last = work["ranks"], work["steps"] - 1
    rows = [{"rank": 0, **row} for row in run["ledger"] or ()]
    if not rows:
        rows = ledger(run["rows"], ranks)
    last_step = [row for row in rows if row["step"] == last]
    sent = sum(row["wire_bytes"] for row in last_step)
    # after each call the bytes of all units together
    unsharded = [sum(row["unsharded"].values()) for row in run["rows"]]
    summary = Summary(
        losses=tuple(losses),
        comm=Comm(bytes_per_step=sent, collectives_per_step=len(last_step)),
        formula_bytes_per_step=plan.traffic(ranks),
        gathered_bytes=max(unsharded),
    )
    spec = {"strategy": "full_shard", "engine": engine, "world_size": ranks, "model": work["model"]}
    steps = [{"rank": 0, "step": index, "loss": loss} for index, loss in enumerate(run["losses"])]
    tables = {"ledger": rows, "steps": steps}
    return RunRecord(Path("unsaved"), spec=spec, summary=summary, provenance=_PROVENANCE, tables=tables)


def gathered_figure(training: Training, engine: str = "my_fsdp") -> go.Figure:
    """Draw the unsharded bytes after every unshard and reshard of the last step, stacked by unit, in time order."""
    all_rows = training.rows[engine]
    last_step = all_rows[-1]["step"]
    rows = [row for row in all_rows if row["step"] == last_step and row["what"] != "reduce"]

    ends, described, totals = {}, [], []
    for number, row in enumerate(rows, 1):
        name = f"{number}  {row['what']} {row['unit']}"
        total = sum(row["unsharded"].values())
        totals.append(total)
        ends[name] = f"<b>{size(total)}</b>"
        described.append(f"{name} {size(total)}")

    parts = []
    colours = chain(COLOURS[:1], cycle(COLOURS[1:]))  # the root, which is last, has the first one
    for (unit, _), colour in zip(reversed(training.plan.units), colours):
        # one value a bar, which is a call; 0 where this unit is sharded
        megabytes = [row["unsharded"].get(unit, 0) / 1e6 for row in rows]
        parts.append(Part(unit, colour, megabytes))
    whole = sum(nbytes for _, nbytes in training.plan.units)
    levels = {f"whole model: {size(whole)}": whole / 1e6}
    figure = stacked_bars(ends, parts, "unsharded parameters on one rank (MB)", "%{x:.3f} MB", levels=levels)

    spec = training.records[engine].spec
    how = "storages after each call" if engine == "my_fsdp" else "as its events announce"
    subtitle = f"Measured on rank 0 of {spec['world_size']} CPU ranks, {spec['model']}, last step: {how}"
    title = f"{engine}: at most {size(max(totals))} of {size(whole)} unsharded at once"
    alt = f"Bars from top to bottom in time order: {'; '.join(described)}."
    return titled(figure, title, subtitle, alt, height=140 + 30 * len(ends))


# ---- a schedule on real blocks


@doing("one step on real ranks, in the order of the schedule")
def run_schedule(blocks: int = 4, width: int = 64, world_size: int = 2) -> Table:
    """Take one step of real blocks in the order of the learner's schedule (or the reference), with those functions."""
    by_rank = _on_ranks("scheduled", world_size, blocks=blocks, width=width)
    computed = play(functions("06.schedule")["schedule"](blocks), blocks)
    rows = []
    for rank, seen in enumerate(by_rank):
        differing = f"{seen['differing']:,} of {seen['of']:,}"
        rows.append([f"rank {rank}", differing, f"{seen['peak']:.2f}", str(computed.peak)])
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
    """One choice of units, computed.

    `units` are (name, bytes) of each, the root last. `chain` are the bytes of the largest unit together with the units
    around it, without the root; `collectives` are those of a step.
    """

    units: tuple[tuple[str, int], ...]
    chain: int
    collectives: int
    shapes: tuple[UnitShapes, ...]

    @property
    def root(self) -> int:
        """Return the bytes of the root unit: unsharded from the beginning of the forward to the backward's end."""
        return dict(self.units).get("root", 0)

    @property
    def peak(self) -> int:
        """Return the most bytes that are unsharded at once."""
        return self.root + self.chain

    def traffic(self, ranks: int) -> int:
        """Return the bytes that one rank sends in a step of full_shard, by the textbook's formula."""
        return sum(entry.step_bytes for entry in step_traffic(self.shapes, "full_shard", ranks))


def plan(model_name: str, is_unit: Wanted) -> Plan:
    """Compute one choice, without a tensor: `plan("gpt-tiny", lambda name, module: False).collectives == 2`."""
    units, nbytes = [], {}
    for name, _, parameters in chosen(build_model(model_name, device="meta"), is_unit):
        shapes, elements = [], 0
        for index, parameter in enumerate(parameters):
            shapes.append((str(index), tuple(parameter.shape)))
            elements += parameter.numel()
        units.append(UnitShapes(name, tuple(shapes)))
        nbytes[name] = FLOAT * elements
    below_root = [name for name in nbytes if name != "root"]
    chain = 0
    for name in below_root:
        # a unit inside other units computes while these are unsharded too
        around = [other for other in below_root if f"{name}.".startswith(f"{other}.")]
        chain = max(chain, sum(nbytes[other] for other in around))
    collectives = 3 * len(below_root)  # two all-gathers and a reduce-scatter each
    if "root" in nbytes:
        collectives += 2  # the root stays unsharded from forward to backward
    return Plan(tuple(nbytes.items()), chain, collectives, tuple(units))


def choices_table(model: str = "gpt-20m", **more: Wanted) -> Table:
    """Return ready-made choices of units (and `more`) beside each other, computed."""
    rows = []
    for name, is_unit in {**CHOICES, **more}.items():
        choice = plan(model, is_unit)
        rows.append(
            [
                name,
                f"{len(choice.units):,}",
                size(choice.root),
                size(choice.chain) if choice.chain else MISSING,
                size(choice.peak),
                f"{choice.collectives:,}",
                size(choice.traffic(2) // choice.collectives),
            ]
        )
    header = ["units", "how many", "root", "largest other unit", "unsharded at most"]
    header += ["collectives a step", "sent by each, on average"]
    return table(header, rows, f"Computed for {model} in fp32 on 2 ranks, with nothing unsharded ahead.")


def choices_figure(
    model: str = "gpt-20m", target: int | None = None, measured: dict[str, float] | None = None, **more: Wanted
) -> go.Figure:
    """Draw root and largest unit of each choice of units, with a target line and measured peaks (MB).

    The whole model as one unit is left out.
    """
    plans = {}
    for name, is_unit in {**CHOICES, **more}.items():
        if name != "the whole model":
            plans[name.replace("_", " ")] = plan(model, is_unit)
    ends = {name: f"<b>{size(choice.peak)} · {choice.collectives} collectives</b>" for name, choice in plans.items()}
    parts = [
        Part("root", COLOURS[0], [choice.root / 1e6 for choice in plans.values()]),
        Part("largest unit, with units around it", COLOURS[1], [choice.chain / 1e6 for choice in plans.values()]),
    ]
    levels = {f"target {size(target)}": target / 1e6} if target else {}
    figure = stacked_bars(ends, parts, "unsharded parameters at the peak (MB)", "%{x:.3f} MB", levels=levels)
    where = f"Computed for {model} in fp32, nothing unsharded ahead"
    if measured:
        where = f"{where}; ticks are measured on CPU ranks"
        figure.add_trace(_ticks(measured))
    bars = "; ".join(
        f"{name} {size(choice.peak)} with {choice.collectives} collectives" for name, choice in plans.items()
    )
    alt = f"Bars of unsharded bytes: {bars}."
    # the level that a learner's own choice must stay under
    if target:
        alt = f"{alt} Target {size(target)}."
    title = _choices_title(plans, target, names_last=bool(more))
    return titled(figure, title, where, alt, height=140 + 52 * len(plans))


def _ticks(measured: dict[str, float]) -> go.Scatter:
    """Return measured peaks as ticks across the bars of their choices."""
    names = [name.replace("_", " ") for name in measured]
    marker = dict(symbol="line-ns", line=dict(color=DARK_INK, width=3))
    hover = "%{y}<br>measured %{x:.3f} MB<extra></extra>"
    return points("measured", DARK_INK, list(measured.values()), names, 26, marker=marker, hovertemplate=hover)


def _choices_title(plans: dict[str, Plan], target: int | None, names_last: bool) -> str:
    """Return a title with the choices of highest and lowest peak, or with the last choice and the target."""
    if not names_last:
        # the choice with the highest peak and the one with the lowest
        ranked = sorted(plans.items(), key=lambda named: -named[1].peak)
        ends = [f"{name}: {size(choice.peak)} and {choice.collectives}" for name, choice in (ranked[0], ranked[-1])]
        return " collectives; ".join(ends)
    name, last = list(plans.items())[-1]
    title = f"{name}: {size(last.peak)} unsharded in {last.collectives} collectives"
    if not target:
        return title
    side = "under" if last.peak <= target else "over"
    return f"{title}, {side} the target"
