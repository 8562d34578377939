"""Lesson 16, the part in the notebook's process: meshes, and models composed of several parallelisms beside their
twins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import titled
from fsdplab.teaching.core.diagrams import mesh
from fsdplab.teaching.core.display import Table, table
from fsdplab.teaching.core.lesson_ranks import LessonRanks
from fsdplab.teaching.core.waiting import doing
from fsdplab.workloads import MOE_PRESETS

from .pipelines import bubble, pipeline_diagram
from .token_diagram import token_diagram

__all__ = [
    "Composed", "bubble", "expert_map", "experts", "mesh_map", "pipeline", "pipeline_diagram", "tensor",
    "token_diagram",
]  # fmt: skip

_ROWS = ("#9cc3e6", "#f2c38b", "#a8d5a2", "#d7b5e0")  # a colour for each place on a mesh's first axis
EXPERTS = MOE_PRESETS["moe-tiny"].experts


@dataclass(frozen=True)
class Composed:
    """The training of a composed model compared with its twin, on rank 0; each method is a table of it."""

    what: str
    seen: dict[str, Any]

    def at_rest(self) -> Table:
        """The part of a parameter that each rank holds between two steps."""
        return table(
            ["parameter of block 0", "at rest", "rank 0 holds"], self.seen["at rest"], f"Measured: {self.what}."
        )

    def rows_at_rest(self, parameter: str) -> int:
        """Rows of a parameter of block 0 that rank 0 holds between two steps."""
        shapes = {name: shape for name, _, shape in self.seen["at rest"]}
        return int(shapes[parameter].strip("[]").split(",")[0])

    def beside_twin(self) -> Table:
        """Loss of each step, and how far the parameters are from the twin's in the end."""
        rows = [[step, f"{ours:.6f}", f"{twins:.6f}"] for step, (ours, twins) in enumerate(self.seen["losses"])]
        caption = f"Measured: {self.what}. The farthest parameter ends {self.seen['drift']:.0e} from the twin's."
        return table(["step", "loss", "the twin's"], rows, caption)

    def gradients(self) -> Table:
        """The norm of each matrix's first gradient over the twin's."""
        rows = [[name, f"{ratio:.4f}"] for name, ratio in sorted(self.seen["ratios"].items())]
        return table(["gradient of", "norm over the twin's"], rows, f"Measured: {self.what}, first step.")

    def traffic(self) -> Table:
        """Bytes that rank 0 sends in a step, by mesh axis."""
        rows = [[axis, f"{nbytes / 1000:,.1f}"] for axis, nbytes in sorted(self.seen["bytes"].items())]
        return table(["over the axis", "kB a step"], rows, f"Measured: {self.what}, last step.")

    def kilobytes(self, axis: str) -> float:
        """kB that rank 0 sends in a step over one axis."""
        return self.seen["bytes"][axis] / 1000


def tensor() -> Composed:
    """GPT-tiny on a 2 x 2 mesh (dp, tp), as the learner's `compose` does it where its check passed,
    else the reference.
    """
    return Composed("gpt-tiny, dp = 2 x tp = 2", _call("tensor"))


def experts(divide: float) -> Composed:
    """MoE-tiny on a 2 x 2 mesh (efsdp, ep), expert gradients divided by `divide`."""
    what = f"moe-tiny, efsdp = 2 x ep = 2, expert gradients divided by {divide:g}"
    return Composed(what, _call("experts", divide=float(divide)))


@doing("three steps on 4 ranks, and the twin beside them")
def _call(function: str, **payload: Any) -> dict[str, Any]:
    found: dict[str, Any] = LessonRanks(__file__)(function, 4, **payload)[0]
    return found


@doing("one step of two stages on 4 ranks, and the twin beside it")
def pipeline() -> Table:
    """Two stages x two data ranks, four micro-batches (1F1B): collectives of rank 0, drift from the twin."""
    found = LessonRanks(__file__, "stages_on_ranks.py")("stages", 4)[0]
    rows = [[way, seen["all_gather"], seen["reduce_scatter"], f"{seen['drift']:.1e}"] for way, seen in found.items()]
    header = ["after each forward", "all-gathers", "reductions", "farthest from the twin"]
    return table(header, rows, "Measured: rank 0 of 4, one step of 4 micro-batches.")


def mesh_map() -> go.Figure:
    """The notebook's mesh of two axes, and what a rank of it holds of a matrix of 64 rows that both axes cut."""
    part = lambda dp, tp: f"rows {32 * tp + 16 * dp} to {32 * tp + 16 * dp + 15} of query"  # noqa: E731
    return _mesh_figure({"dp": 2, "tp": 2}, part, "tp cuts the 64 rows of query in two, dp cuts each half again")


def expert_map() -> go.Figure:
    """The mesh of the experts, and which experts a rank holds shards of."""
    half = EXPERTS // 2
    part = lambda efsdp, ep: f"shard {efsdp + 1} of 2 of experts {half * ep} to {half * ep + half - 1}"  # noqa: E731
    title = "Tokens travel along a row; the ranks of a column share their experts"
    return _mesh_figure({"efsdp": 2, "ep": 2}, part, title)


def _mesh_figure(axes: dict[str, int], holds: Callable[[int, int], str], title: str) -> go.Figure:
    """Ranks of a mesh of two axes: the first downwards, the second from left to right; `holds(row, column)` is written
    below the rank.
    """
    (down, rows), (right, columns) = axes.items()
    names = [
        [f"rank {row * columns + column}: {holds(row, column)}" for column in range(columns)] for row in range(rows)
    ]
    colours = [_ROWS[row % len(_ROWS)] for row in range(rows)]
    owners = [[row] * columns for row in range(rows)]
    headings = [f"{right} {column}" for column in range(columns)]
    figure = mesh(headings, [f"{down} {row}" for row in range(rows)], owners, names, colours)
    figure.update_xaxes(title_text=f"{right}: ranks of a row (neighbours)").update_yaxes(title_text=down)
    where = f"Computed: {rows} x {columns} ranks; a collective over {right} joins a row, one over {down} a column"
    listed = "; ".join(name for row in names for name in row)
    return titled(figure, title, where, f"Ranks on a mesh. {title}. {listed}.", height=76 + 70 * rows)
