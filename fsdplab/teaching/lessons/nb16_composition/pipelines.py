"""A pipeline's stages over time: the schedules of GPipe and 1F1B, idle time, and what stage 0 must keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fsdplab.figures.lanes import named_axis
from fsdplab.figures.lines import points
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import CATEGORY_COLOURS, EDGE, PHASE_COLOURS, STEP_COLOURS, ink_on, titled
from fsdplab.teaching.core.diagrams import HeldCell, cells_in_time

ORDERS = ("GPipe", "1F1B")
MOST_MOMENTS = 36  # of a diagram: a page's width holds so many with a number in each
_TAKES = {"forward": 1, "backward": 2}  # a backward computes twice as much
_LABELLED = 100  # turns: a browser takes as long for their numbers as for all else of the figure
_IDLE, _KEPT = "idle: the bubble", "micro-batches whose activations stage 0 keeps"
_KINDS = {
    "forward": PHASE_COLOURS["forward"],
    "backward": PHASE_COLOURS["backward"],
    _IDLE: STEP_COLOURS["other"],
    _KEPT: CATEGORY_COLOURS["activations"],
}


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


def bubble(stages: int, micro_batches: int) -> go.Figure:
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


# ---- both orders, with a play button


def pipeline_cells(order: str, stages: int, micro_batches: int) -> Iterator[HeldCell]:
    """Every turn of an order, every moment in which a stage has none, and how many micro-batches stage 0 keeps then."""
    turns = schedule(stages, micro_batches, order)
    end = max(turn.end for turn in turns)
    for turn in turns:
        yield HeldCell(_row(order, turn.stage), turn.start, turn.phase, str(turn.micro_batch), turn.end - turn.start)
    for stage in range(stages):
        busy = {moment for turn in turns if turn.stage == stage for moment in range(turn.start, turn.end)}
        yield from (HeldCell(_row(order, stage), moment, _IDLE) for moment in range(end) if moment not in busy)
    yield from (
        HeldCell(_kept_row(order), moment, _KEPT, str(count)) for moment, count in enumerate(kept(turns)) if count
    )


def kept(turns: list[Turn]) -> list[int]:
    """Micro-batches on stage 0 at each moment, from the start of their forward to the end of their backward."""
    began = {turn.micro_batch: turn.start for turn in turns if turn.stage == 0 and turn.phase == "forward"}
    ended = {turn.micro_batch: turn.end for turn in turns if turn.stage == 0 and turn.phase == "backward"}
    return [sum(began[each] <= moment < ended[each] for each in began) for moment in range(max(ended.values()))]


def _row(order: str, stage: int) -> str:
    return f"{order}: stage {stage}"


def _kept_row(order: str) -> str:
    return f"{order}: kept on stage 0"


def pipeline_diagram(stages: int = 3, micro_batches: int = 6) -> go.Figure:
    """Both orders on one clock, with a play button; a moment is a forward of one micro-batch.

    ValueError for fewer than two stages, no micro-batch, or a schedule too long for a page.
    """
    end = 3 * (micro_batches + stages - 1)
    if stages < 2 or micro_batches < 1 or end > MOST_MOMENTS or stages > 4:
        raise ValueError(
            f"{stages} stages and {micro_batches} micro-batches cannot be drawn; expected 2 to 4 stages, and so many"
            f" micro-batches that 3 (m + p - 1) is at most {MOST_MOMENTS}: pipeline_diagram(3, 6)"
        )
    most = {order: max(kept(schedule(stages, micro_batches, order))) for order in ORDERS}
    rows = [row for order in ORDERS for row in (*(_row(order, stage) for stage in range(stages)), _kept_row(order))]
    return cells_in_time(
        [cell for order in ORDERS for cell in pipeline_cells(order, stages, micro_batches)],
        rows, [str(moment) for moment in range(end)], _KINDS,
        "GPipe and 1F1B: the same forwards and backwards in two orders",
        f"Computed: {stages} equal stages, {micro_batches} micro-batches; a moment is a forward, a backward takes two,"
        " messages take no time",
        f"Lanes of {stages} pipeline stages over {end} moments, in two orders. GPipe runs all forwards, then all"
        " backwards. 1F1B runs a few forwards, then one backward and one forward in turn. In both orders each stage is"
        f" idle for {3 * (stages - 1)} of the moments: the last stage at the start, the first before its backwards."
        f" Stage 0 keeps the activations of at most {most['GPipe']} micro-batches under GPipe and {most['1F1B']} under"
        " 1F1B.",
    )  # fmt: skip
