"""A learner's schedule as a picture: what the rank and the link do, and what is in memory meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdplab.figures.lanes import CLOCK, lane
from fsdplab.figures.lanes import Span as Drawn
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import ALARM, CATEGORY_COLOURS, LANE_COLOURS, titled

from .schedules import MEMORY_TARGET, Played, ScheduleError, Span, play, shortest, waits

_COLOURS = {
    "forward": LANE_COLOURS["compute in forward"],
    "backward": LANE_COLOURS["compute in backward"],
    "gather": LANE_COLOURS["all_gather"],
    "reduce": LANE_COLOURS["reduce_scatter"],
    "waits for": ALARM,
    "gathered": CATEGORY_COLOURS["gathered_parameters"],
    "gradient": CATEGORY_COLOURS["whole_gradients"],
}
_NAMES = {"waits for": "waits", "gathered": "gathered block in memory", "gradient": "whole gradient in memory"}


def schedule_figure(steps: Any, blocks: int = 4) -> go.Figure:
    """What a schedule does: `schedule_figure(schedule(4))`. One that cannot run gives a figure that says why."""
    try:
        played = play(steps, blocks)
    except ScheduleError as error:
        empty = go.Figure().update_xaxes(visible=False).update_yaxes(visible=False)
        return titled(empty, "This schedule cannot run", str(error), f"No schedule to draw: {error}.", height=20)
    spans = [*played.actions, *waits(played), *played.memory]
    rows = _rows(blocks)
    figure = go.Figure([_bars(what, spans, rows) for what in _COLOURS if any(span.what == what for span in spans)])
    end = max(played.milliseconds, shortest(blocks))
    figure.update_xaxes(title="ms, by the puzzle's clock", range=[0, 1.02 * end])
    figure.update_yaxes(range=[-0.5, len(rows) - 0.5], tickvals=list(rows.values()), ticktext=list(rows), **CLOCK)
    figure.update_layout(barmode="overlay")
    return titled(figure, _title(played), _subtitle(played), _alt(played), height=140 + 34 * len(rows))


def _rows(blocks: int) -> dict[str, float]:
    """Each lane's height, from the top: rank, link, then the memory of every block and of its gradient."""
    names = ["rank", "link", *(f"{thing} {block}" for block in range(blocks) for thing in ("block", "gradient"))]
    return {name: float(len(names) - 1 - index) for index, name in enumerate(names)}


def _row_of(span: Span) -> str:
    if span.what in ("gather", "reduce"):
        return "link"
    kept = {"gathered": f"block {span.block}", "gradient": f"gradient {span.block}"}
    return kept.get(span.what, "rank")


def _bars(what: str, spans: Sequence[Span], rows: dict[str, float]) -> go.Bar:
    name, labelled = _NAMES.get(what, what), what not in _NAMES
    own = [span for span in spans if span.what == what]
    hovers = [f"{name}, block {span.block}: {span.start} to {span.end} ms" for span in own]
    drawn = [
        Drawn(rows[_row_of(span)], span.start, span.end - span.start, str(span.block) if labelled else "", hover)
        for span, hover in zip(own, hovers)
    ]
    return lane(name, _COLOURS[what], drawn, 0.8)


def _title(played: Played) -> str:
    time, best = played.milliseconds, shortest(played.blocks)
    memory = f"{played.peak} blocks in memory at most"
    return f"{time} ms (target {best}), {memory} (target {MEMORY_TARGET})"


def _subtitle(played: Played) -> str:
    waited = sum(span.end - span.start for span in waits(played))
    return f"Computed from the schedule; the rank waits {waited} ms for gathers"


def _alt(played: Played) -> str:
    order = ", ".join(
        f"{span.what} {span.block} from {span.start} to {span.end}"
        for span in sorted(played.actions, key=lambda span: span.start)
    )
    return f"Bars of a rank and its link over time, in ms: {order}. {_title(played)}."
