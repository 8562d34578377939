"""Lessons 05 and 06 in the notebook's process: whose functions are in use, one layer's life, and training under three
engines.

The functions are the learner's wherever their checks passed, else the references, and every run says which.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdplab.records import RunRecord, known
from fsdplab.sessions import RanksFailed, call_on_ranks
from fsdplab.teaching.core.checking import solution, solution_file
from fsdplab.teaching.core.course_state import current
from fsdplab.teaching.core.display import Note, Table, notebook_display, present, table
from fsdplab.teaching.core.waiting import doing
from fsdplab.teaching.core.workspace import load_function

from .engine import MiniFSDP, Wanted
from .exercises_06 import STEPS, parts_in_use
from .figures import choices_figure, gathered_figure, layer_figure
from .life_diagram import life_diagram
from .records import record_of
from .rows_figure import rows_figure
from .schedule_figure import schedule_figure
from .schedules import play
from .units import CHOICES, Plan, choices_table, largest_modules, plan

__all__ = [
    "choices_figure", "choices_table", "gathered_figure", "largest_modules", "layer_figure", "life_diagram",
    "life_of_a_layer", "plan", "read_dropped", "rows_figure", "run_schedule", "schedule_figure", "show_glue",
    "take_engine", "take_parts", "train",
]  # fmt: skip

ON_THE_RANKS = Path(__file__).with_name("on_ranks.py")
SCHEDULE_ON_RANKS = Path(__file__).with_name("schedule_on_ranks.py")
TIME_LIMIT = 150.0
IN_USE = "in_use.py"
WORK = {"batch_size": 2, "sequence_length": 64, "learning_rate": 3e-3, "seed": 0}


def take_parts() -> None:
    """Say whose functions of notebook 05 are in use, and let ranks say `from my_fsdp.in_use import shard, ...`."""
    workspace, lines = (
        current().workspace,
        [
            (
                '"""The functions in use, yours where their checks passed. Written by the course; edit the exercises'
                ' instead."""'
            ),
            "",
        ],
    )
    lines += [
        "from pathlib import Path",
        "",
        "from fsdplab.teaching.core.workspace import load_function",
        "",
        "HERE = Path(__file__).parent",
    ]
    for name in STEPS:
        solution(f"05.{name}")
        where = solution_file(f"05.{name}").relative_to(workspace.path).as_posix()
        lines.append(f'{name} = load_function(HERE / "{where}", "{name}")')
    workspace.open()
    (workspace.path / IN_USE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def take_engine() -> None:
    """Take your hooks as well where their check passed, and let ranks say `from my_fsdp.in_use import sharded`: the
    six functions as one engine, `sharded(model)`.
    """
    take_parts()
    solution("06.hooks")
    workspace = current().workspace
    where = solution_file("06.hooks").relative_to(workspace.path).as_posix()
    path = workspace.path / IN_USE
    path.write_text(path.read_text(encoding="utf-8") + _ENGINE.format(where=where), encoding="utf-8")


_ENGINE = """
from fsdplab.teaching.lessons.nb05_06_mini_fsdp.engine import MiniFSDP, Parts
from fsdplab.workloads import block_types

hooks = load_function(HERE / "{where}", "hooks")


def sharded(model, is_unit=None):
    \"\"\"The model under your engine: every block is a unit, or what `is_unit(name, module)` says.\"\"\"
    chosen = is_unit or (lambda name, module: isinstance(module, block_types(model)))
    return MiniFSDP(model, chosen, Parts(shard, unshard, reshard, guarded, reduce, hooks))
"""


@doing("one step on real ranks, in the order of the schedule")
def run_schedule(blocks: int = 4, width: int = 64, world_size: int = 2) -> Table:
    """One step of real blocks in the order of the learner's schedule (or the reference), with the functions in use."""
    path = solution_file("06.schedule")
    payload = {
        "workspace": str(current().workspace.path), "parts": parts_in_use(), "schedule": str(path),
        "blocks": blocks, "width": width,
    }  # fmt: skip
    by_rank = call_on_ranks(
        SCHEDULE_ON_RANKS, "scheduled", world_size=world_size, payload=payload, time_limit=TIME_LIMIT
    )
    computed = play(load_function(path, "schedule")(blocks), blocks)
    whose = "your" if path.parent == current().workspace.path else "the reference"
    rows = [
        [f"rank {rank}", f"{seen['differing']:,} of {seen['of']:,}", f"{seen['peak']:.2f}", str(computed.peak)]
        for rank, seen in enumerate(by_rank)
    ]
    header = ["", "gradients that differ from the twin's", "blocks in memory at most", "by the puzzle's arithmetic"]
    return table(header, rows, f"Measured on {world_size} real ranks with {whose} schedule. Time was not looked at.")


@doing("reading a tensor without memory, in a process of its own")
def read_dropped() -> None:
    """Read a tensor without memory, in a process of its own, and show how that process ends."""
    try:
        call_on_ranks(ON_THE_RANKS, "read_dropped", world_size=1, time_limit=TIME_LIMIT)
        outcome = "It returned a number: this torch noticed, or read whatever lay there."
    except RanksFailed as failure:
        outcome = failure.report.message.splitlines()[0]
    present(Note(("whole.untyped_storage().resize_(0); whole.sum()", outcome)))


@dataclass(frozen=True, repr=False)
class Life:
    """One layer's training step on rank 0: bytes held after each moment, and the differences from the whole layer."""

    weight_bytes: int
    ranks: int
    moments: tuple[dict[str, Any], ...]
    differences: dict[str, float]
    provenance: dict[str, str] = field(
        default_factory=lambda: {"bytes held by a layer": "measured", "difference from the whole layer": "measured"}
    )

    @property
    def peak_megabytes(self) -> float:
        """Most that the layer's weight and gradient held at once, MB."""
        return max(held(moment) for moment in self.moments) / 1e6

    def table(self) -> Table:
        """The largest difference from the unsharded layer, over all ranks."""
        rows = [[name, f"{value:g}"] for name, value in self.differences.items()]
        return table(["", "largest difference from the whole layer"], rows, f"Measured on {self.ranks} real ranks.")

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def held(moment: dict[str, Any]) -> int:
    """All bytes that a moment of a layer's life names."""
    return sum(value for name, value in moment.items() if name != "moment")


@doing("one layer's training step on real ranks")
def life_of_a_layer(rows: int = 1025, columns: int = 512, world_size: int = 2) -> Life:
    """One Linear of `rows` x `columns`, sharded, through a training step on real ranks with the functions in use."""
    payload = {"workspace": str(current().workspace.path), "parts": parts_in_use(), "rows": rows, "columns": columns}
    by_rank = call_on_ranks(ON_THE_RANKS, "layer_life", world_size=world_size, payload=payload, time_limit=TIME_LIMIT)
    worst = {name: max(each["differences"][name] for each in by_rank) for name in by_rank[0]["differences"]}
    return Life(4 * rows * columns, world_size, tuple(by_rank[0]["moments"]), worst)


def show_glue() -> None:
    """Show the part of the library that calls the four hooks."""
    present(_code(inspect.getsource(MiniFSDP._attach)))


def _code(source: str) -> object:
    """The source as a notebook colours it, as plain text everywhere else."""
    if notebook_display() is None:
        return source
    from IPython.display import Code

    return Code(source, language="python")


_ORIGINS = {
    "losses": "measured",
    "ledger": "measured",
    "gathered bytes": "measured",
    "formula_bytes_per_step": "computed",
}


@dataclass(frozen=True, repr=False)
class Training:
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
        """Most MB that the learner's engine had gathered at once on a rank."""
        return known(self.mine.summary.gathered_bytes) / 1e6

    def table(self) -> Table:
        """Losses, distance from the twin, collectives, bytes and gathered bytes, an engine a row."""
        rows = [
            [name, *_losses(losses), *self._distance(name), *self._traffic(name)]
            for name, losses in self.losses.items()
        ]
        formula = [
            "formula",
            "",
            "",
            "",
            "",
            f"{self.plan.collectives}",
            f"{self.mine.summary.formula_bytes_per_step:,}",
            f"{self.plan.peak:,}",
        ]
        header = [
            "",
            "first loss",
            "last loss",
            "largest difference from the twin",
            "floats that differ",
            "collectives a step",
            "bytes sent a step",
            "bytes gathered at most",
        ]
        return table(
            header,
            [*rows, formula],
            f"Measured on {self.mine.spec['world_size']} real ranks, {self.whose}. The formula is computed.",
        )

    def _distance(self, name: str) -> tuple[str, str]:
        if name not in self.differs:
            return "", ""
        differs = self.differs[name]
        return f"{differs['largest']:g}", f"{differs['floats']:,} of {differs['of']:,}"

    def _traffic(self, name: str) -> tuple[str, str, str]:
        if name not in self.records:
            return "", "", ""
        summary = self.records[name].summary
        return (
            str(summary.comm.collectives_per_step),
            f"{summary.comm.bytes_per_step:,}",
            f"{summary.gathered_bytes:,}",
        )

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _losses(losses: Sequence[float]) -> tuple[str, str]:
    return f"{losses[0]:.6f}", f"{losses[-1]:.6f}"


@doing("training under each engine in turn")
def train(
    model: str = "gpt-tiny",
    steps: int = 5,
    engines: Sequence[str] = ("mine", "lab", "twin"),
    units: str | None = None,
    prefetch: int = 1,
    world_size: int = 2,
) -> Training:
    """Train a preset on the course's text under the learner's engine, and under the lab's and as the unsharded twin
    beside it.

    Blocks are units, or what the function of exercise `units` chooses. `prefetch` is the lab's: units gathered ahead.
    """
    parts = parts_in_use("hooks")
    chosen = str(solution_file(units)) if units else ""
    work = {**WORK, "ranks": world_size, "model": model, "steps": steps}
    payload = {
        "workspace": str(current().workspace.path),
        "parts": parts,
        "units": chosen,
        "work": work,
        "engines": list(engines),
        "prefetch": prefetch,
    }
    by_rank = call_on_ranks(ON_THE_RANKS, "train_all", world_size=world_size, payload=payload, time_limit=TIME_LIMIT)
    return _training(by_rank, work, plan(model, _predicate(units)), parts)


def _predicate(units: str | None) -> Wanted:
    return CHOICES["every block"] if units is None else solution(units)


def _training(by_rank: list[dict[str, Any]], work: dict[str, Any], computed: Plan, parts: dict[str, str]) -> Training:
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
    return Training(
        _whose(parts), records, losses, differs, {named: runs[0]["rows"] for named, runs in ran.items()}, computed
    )


def _mean(by_rank: Sequence[Sequence[float]]) -> list[float]:
    return [sum(losses) / len(losses) for losses in zip(*by_rank, strict=True)]


def _whose(parts: dict[str, str]) -> str:
    """Whose functions ran: `"with your shard, reshard and the reference unshard"`."""
    mine = [name for name, path in parts.items() if Path(path).parent == current().workspace.path]
    others = [name for name in parts if name not in mine]
    named = [f"your {', '.join(mine)}"] if mine else []
    return "with " + " and ".join([*named, *([f"the reference {', '.join(others)}"] if others else [])])
