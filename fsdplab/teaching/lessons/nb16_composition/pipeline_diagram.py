"""A pipeline in two orders as a picture: GPipe and 1F1B, each stage's idle time, and what stage 0 must keep."""

from __future__ import annotations

from collections.abc import Iterator

from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import CATEGORY_COLOURS, PHASE_COLOURS, STEP_COLOURS
from fsdplab.teaching.core.diagrams import HeldCell, cells_in_time

from .figures import ORDERS, Turn, schedule

MOST_MOMENTS = 36  # that a page's width holds with a number in each
_IDLE, _KEPT = "idle: the bubble", "micro-batches whose activations stage 0 keeps"
_KINDS = {
    "forward": PHASE_COLOURS["forward"],
    "backward": PHASE_COLOURS["backward"],
    _IDLE: STEP_COLOURS["other"],
    _KEPT: CATEGORY_COLOURS["activations"],
}


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
