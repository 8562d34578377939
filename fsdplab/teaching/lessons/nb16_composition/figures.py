"""Figures of lesson 16: ranks on a mesh, what each of them holds, and a pipeline's stages over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdplab.figures.lanes import Span, lane
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import PHASE_COLOURS, titled
from fsdplab.teaching.core.diagrams import mesh

_ROWS = ("#9cc3e6", "#f2c38b", "#a8d5a2", "#d7b5e0")  # a colour for each place on the first axis
_TAKES = {"forward": 1, "backward": 2}  # a backward computes twice as much
ORDERS = ("GPipe", "1F1B")


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
    figure = go.Figure([_lane(phase, [turn for turn in turns if turn.phase == phase], end) for phase in _TAKES])
    figure.update_layout(barmode="overlay", xaxis_title="time (a forward of one micro-batch is 1)")
    figure.update_xaxes(range=[0, 1.01 * end])
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    title = f"{stages} stages, {micro_batches} micro-batches: each stage is idle for {idle:.1%} of the time"
    where = "Computed: 1F1B, equal stages, a backward takes twice a forward, messages take no time"
    alt = f"Lanes of pipeline stages. {title}; the last stage waits at the start, the first before its last backwards."
    return titled(figure, title, where, alt, 66 + 34 * stages)


def _lane(phase: str, turns: Sequence[Turn], end: int) -> go.Bar:
    spans = [
        Span(f"stage {turn.stage}", turn.start, _TAKES[phase], str(turn.micro_batch) if end <= 110 else "")
        for turn in turns
    ]
    hover = f"{phase} of micro-batch %{{text}}, from %{{base}}<extra></extra>"
    return lane(phase, PHASE_COLOURS[phase], spans, hovertemplate=hover)
