"""Lesson 20 in the notebook's process: a step's order on the steady clock as a figure, and how far the learner is.

The function is the learner's where the last check passed, else the reference, and every figure says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdplab.figures.bars import Span, lane, named_axis
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import LANE_COLOURS, titled
from fsdplab.teaching.core.checking import solution_file
from fsdplab.teaching.core.course_state import current
from fsdplab.teaching.core.display import Table, table
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.core.functions_in_use import whose
from fsdplab.teaching.core.lesson_ranks import LessonRanks
from fsdplab.teaching.core.registry import find
from fsdplab.teaching.core.waiting import doing

from .leaderboard import STAGES, code_lines
from .steady_order import Bar, Moment, exposed_ms, replayed, waited_for_at_once

__all__ = ["StepOrder", "order", "standing"]

WHOLE = "20.fully_shard"
_on_ranks = LessonRanks(__file__)
_ROWS = {"compute": 2.0, "link": 1.0, "exposed": 0.0}
_NAMES = {"compute": "rank 0 computes", "link": "link", "exposed": "rank 0 waits"}
_COLOURS = {
    "forward": LANE_COLOURS["compute in forward"],
    "backward": LANE_COLOURS["compute in backward"],
    "all_gather": LANE_COLOURS["all_gather"],
    "reduce_scatter": LANE_COLOURS["reduce_scatter"],
    "exposed": LANE_COLOURS["exposed"],
}


@dataclass(frozen=True)
class StepOrder:
    """One step of a learner's function: what rank 0 issued, waited for and computed."""

    whose: str
    moments: Sequence[Moment]

    @property
    def exposed_ms(self) -> float:
        """Return what the rank waits on the steady clock."""
        return exposed_ms(replayed(self.moments))

    @property
    def exposed_at_once_ms(self) -> float:
        """Return what it would wait if each message were waited for as soon as it is issued."""
        return exposed_ms(replayed(waited_for_at_once(self.moments)))

    def figure(self, at_once: bool = False) -> go.Figure:
        """Draw the step on the steady clock; `at_once` waits for every message as soon as it is issued."""
        moments = self.moments
        if at_once:
            moments = waited_for_at_once(moments)
        return _figure(replayed(moments), self.whose, at_once)


@doing("three steps under fully_shard, as in the file")
def order(blocks: int = 4) -> StepOrder:
    """Return the order of a step under the learner's function, on two ranks."""
    # what rank 0 saw; both ranks make the same calls
    seen = _on_ranks("order_of", 2, file=str(solution_file(WHOLE)), blocks=blocks)[0]
    return StepOrder(whose(WHOLE), [Moment(*values) for values in seen])


def _figure(bars: Sequence[Bar], whose: str, at_once: bool) -> go.Figure:
    """Draw a lane each for computing, the link and waiting; the legend has a step's kinds.

    `whose` are the functions, in words; `at_once` says that every message is waited for at once.
    """
    # a trace for each kind of bar, in the order of the legend
    kinds = {_kind(bar) for bar in bars}
    figure = go.Figure()
    for kind in _COLOURS:
        if kind in kinds:
            figure.add_trace(_lane(kind, bars))
    end, waited = max(bar.end for bar in bars), exposed_ms(bars)
    figure.update_xaxes(title="ms on the steady clock", range=[0, 1.02 * end])
    # 2.0 is the top row: rank 0 computes, the link, rank 0 waits
    rows = {_ROWS[lane_name]: name for lane_name, name in _NAMES.items()}
    figure.update_yaxes(**named_axis(rows, -0.5, 2.5))
    figure.update_layout(barmode="overlay")

    # the sentences below say which of the two orders is drawn
    how = "every message waited for at once" if at_once else "in the order of the calls"
    title = f"{end:.1f} ms, of which the rank waits {waited:.1f}: {how}"
    subtitle = f"Simulated: the calls of one real step, {whose}, with fixed durations"
    listed = ", ".join(f"{bar.name} {bar.start:.1f} to {bar.end:.1f}" for bar in bars)
    alt = f"Bars of what rank 0 computes, what is on the link and when the rank waits, in ms: {listed}. {title}."
    return titled(figure, title, subtitle, alt, height=260)


def _kind(bar: Bar) -> str:
    """Return the key of a bar's colour: `forward` of `forward block 2`."""
    if bar.lane == "exposed":
        return "exposed"
    return bar.name.split()[0]


def _lane(kind: str, bars: Sequence[Bar]) -> go.Bar:
    """Return all bars of a kind; those of computing have their block's number."""
    spans = []
    for bar in bars:
        if _kind(bar) != kind:
            continue
        # "3" of "forward block 3"
        label = bar.name.split()[-1] if bar.lane == "compute" else ""
        hover = f"{bar.name}: {bar.start:.1f} to {bar.end:.1f} ms"
        spans.append(Span(_ROWS[bar.lane], bar.start, bar.end - bar.start, label, hover))
    return lane(kind.replace("_", "-"), _COLOURS[kind], spans, 0.8)


def standing() -> Table:
    """Return which stages the file passes as it is now, and how many lines it has."""
    workspace = current().workspace
    rows = []
    for stage in STAGES:
        state = "passed" if workspace.has_passed(stage) else "open"
        rows.append([stage, find(stage, Exercise).title, state])
    source = workspace.source_of(WHOLE)
    lines = f"{code_lines(source)} lines of code" if source else "no file yet"
    return table(["check", "", "this file"], rows, f"my_fsdp/{WHOLE}.py: {lines}.")
