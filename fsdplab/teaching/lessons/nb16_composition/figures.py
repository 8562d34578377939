"""Figures of lesson 16: ranks on a mesh, what each of them holds, and a pipeline's stages over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdplab.figures.lanes import named_axis
from fsdplab.figures.lines import points
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import EDGE, PHASE_COLOURS, ink_on, titled
from fsdplab.teaching.core.diagrams import mesh

_ROWS = ("#9cc3e6", "#f2c38b", "#a8d5a2", "#d7b5e0")  # a colour for each place on the first axis
_TAKES = {"forward": 1, "backward": 2}  # a backward computes twice as much
ORDERS = ("GPipe", "1F1B")
_LABELLED = 100  # turns: a browser takes as long for their numbers as for all else of the figure


def mesh_figure(axes: dict[str, int], holds: Callable[[int, int], str], title: str) -> go.Figure:
    """Ranks of a mesh of two axes: the first downwards, the second from left to right; `holds(row, column)` is written
    below the rank. ValueError for other than two axes.
    """
    if len(axes) != 2 or min(axes.values()) < 1:
        raise ValueError(
            f"a mesh of the axes {axes} cannot be drawn; expected two, rows and columns, with at least one rank each:"
            " {'dp': 2, 'tp': 2}"
        )
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


@dataclass(frozen=True)
class Turn:
    """One stage's forward or backward of one micro-batch; the forward of one takes one unit of time."""

    stage: int
    phase: str
    micro_batch: int
    start: int

    @property
    def end(self) -> int:
        """When it is over."""
        return self.start + _TAKES[self.phase]


def schedule(stages: int, micro_batches: int, order: str = "1F1B") -> list[Turn]:
    """GPipe's schedule (Huang et al. 2019): all forwards, then all backwards; or 1F1B (Narayanan et al. 2019): as many
    forwards as stages follow, then one backward, one forward, ...

    A turn starts when its stage is free and its input is there: `max(turn.end for turn in schedule(2, 1)) == 6`.
    """
    if order not in ORDERS or stages < 1 or micro_batches < 1:
        raise ValueError(
            f"there is no schedule {order!r} of {stages} stages and {micro_batches} micro-batches; expected"
            f" {' or '.join(ORDERS)}, at least one stage and at least one micro-batch"
        )
    first = [micro_batches if order == "GPipe" else stages - stage for stage in range(stages)]
    todo = [_order(forwards, micro_batches) for forwards in first]
    ended: dict[tuple[int, str, int], int] = {}
    free, found = [0] * stages, []
    while any(todo):
        for stage, left in enumerate(todo):
            while left and (ready := _ready(ended, stage, *left[0], stages)) is not None:
                phase, number = left.pop(0)
                turn = Turn(stage, phase, number, max(free[stage], ready))
                free[stage] = ended[stage, phase, number] = turn.end
                found.append(turn)
    return found


def _order(forwards: int, micro_batches: int) -> list[tuple[str, int]]:
    """(phase, micro-batch) in the order of a stage that begins with so many forwards."""
    first = min(forwards, micro_batches)
    turns = [("forward", number) for number in range(first)]
    for number in range(micro_batches):
        turns.append(("backward", number))
        turns += [("forward", first + number)] if first + number < micro_batches else []
    return turns


def _ready(ended: dict[tuple[int, str, int], int], stage: int, phase: str, number: int, stages: int) -> int | None:
    """When the turn's input is there; None where that is not known yet."""
    if phase == "forward":
        return 0 if stage == 0 else ended.get((stage - 1, phase, number))
    return ended.get((stage, "forward", number) if stage == stages - 1 else (stage + 1, phase, number))


def pipeline_figure(stages: int, micro_batches: int) -> go.Figure:
    """A lane a stage: forwards and backwards of each micro-batch, and white where the stage has nothing to do."""
    turns = schedule(stages, micro_batches)
    end = max(turn.end for turn in turns)
    idle = (stages - 1) / (micro_batches + stages - 1)
    of_phase = {phase: [turn for turn in turns if turn.phase == phase] for phase in _TAKES}
    figure = go.Figure([_labels(phase, own if len(turns) <= _LABELLED else []) for phase, own in of_phase.items()])
    names = {stage: f"stage {stage}" for stage in range(stages)}
    figure.update_layout(
        shapes=[_outline(phase, own, 1 if len(turns) <= _LABELLED else 0.5) for phase, own in of_phase.items()],
        xaxis=dict(title_text="time (a forward of one micro-batch is 1)", range=[0, 1.01 * end]),
        yaxis=named_axis(names, stages - 0.5, -0.5),
    )
    title = f"{stages} stages, {micro_batches} micro-batches: each stage is idle for {idle:.1%} of the time"
    where = "Computed: 1F1B, equal stages, a backward takes twice a forward, messages take no time"
    alt = f"Lanes of pipeline stages. {title}; the last stage waits at the start, the first before its last backwards."
    return titled(figure, title, where, alt, 66 + 34 * stages)


def _outline(phase: str, turns: Sequence[Turn], edge: float) -> dict[str, Any]:
    """All turns of a phase as one path: a browser takes three times as long to draw 2,000 bars."""
    boxes = (f"M{turn.start},{turn.stage - 0.43}H{turn.end}V{turn.stage + 0.43}H{turn.start}Z" for turn in turns)
    look = dict(fillcolor=PHASE_COLOURS[phase], line=dict(color=EDGE, width=edge))
    return dict(type="path", path="".join(boxes), layer="between", **look)


def _labels(phase: str, turns: Sequence[Turn]) -> go.Scatter:
    """The numbers of the micro-batches, and the phase's entry in the legend."""
    colour = PHASE_COLOURS[phase]
    return points(
        phase, colour, [(turn.start + turn.end) / 2 for turn in turns] or [-9], [turn.stage for turn in turns] or [0],
        mode="markers+text", marker=dict(symbol="square", size=13, line_width=0),
        customdata=[turn.start for turn in turns], text=[str(turn.micro_batch) for turn in turns],
        textfont=dict(size=13, color=ink_on(colour)),
        hovertemplate=f"{phase} of micro-batch %{{text}}, from %{{customdata}}<extra></extra>",
    )  # fmt: skip
