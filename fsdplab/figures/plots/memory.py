"""Memory by category: the peak of each run, as measured and as predicted, and one rank's memory through a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdplab.common.names import category_titles
from fsdplab.common.sizes import seconds, size
from fsdplab.figures.axis_units import MEGABYTES, AxisUnit, byte_unit, time_unit
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.conclusion import most_sharded, verdict
from fsdplab.figures.fastest import listed
from fsdplab.figures.lines import line, peak
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import Row
from fsdplab.figures.style import ALARM, CATEGORY_COLOURS, DARK_ALARM, card_words, mark_level, titled
from fsdplab.figures.table import OVER
from fsdplab.figures.view import CATEGORY_NAMES, UNSPLIT, Runs, RunView, how_and_where, missing, view, views
from fsdplab.records import CATEGORIES, RunRecord, known

PALE = 0.75  # opacity of what is predicted: less would make its categories look alike
_UNSPLIT_COLOUR = "rgba(128,132,136,0.35)"
_BEHIND_NAME = "rgba(255, 255, 255, 0.85)"  # ground of a name that lies on coloured bands
_FAR = 2.5  # times the highest peak: a card further off would make bars tiny
_AXIS = "peak memory of the worst rank ({})"


def memory_by_category(runs: Runs) -> go.Figure:
    """Draw stacked bars of each run's peak memory on its worst rank, with the card as a line.

    `runs`: records, or a comparison dict. Example: `memory_by_category(compare(specs))`.
    """
    every_run = views(runs)
    shown = [run for run in every_run if run.peak]
    if not shown:
        raise ValueError("no run has a memory measurement to draw; run with memory=True")
    # several cards where runs had different ones: each gets a line
    near_cards, far_cards = _cards(shown)
    emulated = any(run.card_emulated for run in shown)
    unit = byte_unit(known(run.peak) for run in shown)
    levels = {card_words(card, emulated): unit.of(card) for card in near_cards}
    ends, splits = {}, []
    over = []  # their words are red
    for run in shown:
        ends[run.label] = _end(run)
        splits.append(_split(run))
        if run.over_card:
            over.append(run.label)
    parts = _parts(splits, unit, shown)
    axis = _AXIS.format(unit.symbol)
    figure = stacked_bars(ends, parts, axis, unit.hover("x"), levels=levels, alarming=over)
    where = f"{how_and_where(shown)}, split at the instant of the peak{_emulated(shown)}"
    # continues "; the card is emulated", since the card's line is not on the axis
    if far_cards and _emulated(shown):
        where += f" and holds {size(far_cards[0])}, beyond this axis"
    left_out = missing(every_run, shown, "has no measured peak")
    if left_out:
        where += f"; {left_out}"
    return titled(figure, _finding(shown), where, _alt(shown), 86 + 43 * len(shown))


def _cards(shown: Sequence[RunView]) -> tuple[list[int], list[int]]:
    """Return (the cards that the axis reaches, those that are far beyond it), the smallest first."""
    farthest = _FAR * max(known(run.peak) for run in shown)
    cards = {run.card for run in shown if run.card}
    near: list[int] = []
    far: list[int] = []
    for card in sorted(cards):
        if card <= farthest:
            near.append(card)
        else:
            far.append(card)
    return near, far


def _split(run: RunView) -> dict[str, int]:
    """Return the peak by category, and what of it has none."""
    # other engines do not tell what all of their memory is for: grey at the bar's end
    without_category = known(run.peak) - sum(run.split.values())
    return {**run.split, UNSPLIT: max(0, without_category)}


def _end(run: RunView) -> str:
    words = f"<b>{size(run.peak)}</b>"
    if run.over_card:
        words += f" · {_over(run)}"
    return words


def _over(run: RunView) -> str:
    """Say that a run is over its card: it goes on to its end, but earlier versions ended it, as a real card does."""
    return "out of memory" if run.status == "out_of_memory" else OVER


def _parts(splits: Sequence[Mapping[str, int]], unit: AxisUnit, shown: Sequence[RunView] = ()) -> list[Part]:
    """Return the categories that at least one of the bars holds, as they are called of these runs."""
    titles = category_titles(run.spec for run in shown)
    parts = []
    for category in (*CATEGORIES, UNSPLIT):
        # a category that no run holds has no entry in the legend
        if any(split.get(category) for split in splits):
            lengths = [unit.of(split.get(category, 0)) for split in splits]
            colour = CATEGORY_COLOURS.get(category, _UNSPLIT_COLOUR)
            parts.append(Part(titles.get(category, category), colour, lengths))
    return parts


def _emulated(shown: Sequence[RunView]) -> str:
    return "; the card is emulated" if any(run.card and run.card_emulated for run in shown) else ""


def _alt(shown: Sequence[RunView]) -> str:
    peaks, cards = [], []
    for run in shown:
        peaks.append(f"{run.label} {size(run.peak)}{_mostly(run)}")
        if run.card:
            cards.append(run.card)
    alt = f"Bars of peak memory per rank: {'; '.join(peaks)}."
    if cards:
        alt += f" The card holds {size(cards[0])}."
    return alt


def _mostly(run: RunView) -> str:
    """Say for the alternative text what a run's largest category is, and whether the run is over its card."""
    words = ""
    if any(run.split.values()):
        largest = max(run.split, key=lambda name: run.split[name])
        title = category_titles([run.spec]).get(largest, largest)
        words = f", mostly {title} ({size(run.split[largest])})"
    if run.over_card:
        words += f", {_over(run)}"
    return words


def _finding(shown: list[RunView]) -> str:
    """Return the title: which runs are over the card, and the peaks of the most and the least sharded run."""
    over = [run for run in shown if run.over_card]
    if len(over) == len(shown):
        return "No run fits the card"
    low = min(shown, key=lambda run: known(run.peak))
    high = max(shown, key=lambda run: known(run.peak))
    # the most sharded run is what the page is about, also where another needs a little less
    sharded = most_sharded(shown)
    if sharded is not None and sharded is not high:
        low = sharded
    # with runs over the card, the title has one peak only: that of the run that is worth choosing
    peaks = f"{low.label} peaks at {size(low.peak)}"
    if over:
        names = listed(over) if len(over) <= 3 else f"{len(over)} runs"
        are = "is" if len(over) == 1 else "are"
        return f"{names} {are} over the card; {peaks}"
    if high is low:
        return peaks
    return f"{peaks}, {high.label} at {size(high.peak)}"


# ---- predicted beside measured


def predicted_memory(runs: Runs) -> go.Figure:
    """Draw stacked bars of each run's peak by category, the measured one above the predicted one, which is paler.

    `runs`: records, or a comparison dict. ValueError where no run has both.
    """
    every_run = views(runs)
    shown = [run for run in every_run if run.peak and run.predicted_peak]
    if not shown:
        raise ValueError(
            "no run has both a measured and a predicted peak; memory is predicted for the lab's engine on CPU ranks"
        )
    ends, splits, peaks = {}, [], []
    for run in shown:  # a run's two bars stand together
        # above 1: more was predicted than measured
        ratio = known(run.predicted_peak) / known(run.peak)
        measured, predicted = size(run.peak), size(run.predicted_peak)
        ends[run.label] = f"<b>{measured}</b>"
        ends[f"{run.label}, predicted"] = f"{predicted}, {ratio:.2f} of it"
        splits.append(run.split)
        splits.append(run.predicted_split)
        peaks.append(f"{run.label} {measured}, predicted {predicted}")
    unit = byte_unit(known(run.peak) for run in shown)
    figure = stacked_bars(ends, _parts(splits, unit), _AXIS.format(unit.symbol), unit.hover("x"))
    # rows alternate: measured, predicted, measured, predicted, ...
    figure.update_traces(marker_opacity=[1.0, PALE] * len(shown))
    figure.update_layout(bargap=0.18)
    where = f"{how_and_where(shown)}; predicted by playing the engine's allocations, before the run"
    left_out = missing(every_run, shown, "lacks one of the two peaks")
    if left_out:
        where += f"; {left_out}"
    alt = f"Bars of measured and predicted peak memory: {'; '.join(peaks)}."
    return titled(figure, verdict(shown), where, alt, 80 + 76 * len(shown))


# ---- through one step


def memory_timeline(record: RunRecord, rank: int = 0) -> go.Figure:
    """Draw one rank's live bytes through one step, stacked by category, with the peak marked and the card as a line.

    `record`: a run record with a `memory` table. ValueError names the ranks there are if `rank` has no rows.
    """
    run = view(record)
    rows = _memory_of_rank(record, rank)
    times_s = [float(row["time_ns"]) / 1e9 for row in rows]
    clock = time_unit(times_s)
    times = [clock.of(time_s) for time_s in times_s]
    totals = [total(row) for row in rows]
    top = max(range(len(rows)), key=totals.__getitem__)
    peaks_at, peak_bytes = times[top], totals[top]
    titles = category_titles([run.spec])
    unit = byte_unit(totals)
    figure = go.Figure(bands(rows, times, titles, unit))
    figure.add_trace(peak(peaks_at, peak_bytes, unit))
    name = f"<b>peak {size(peak_bytes)}</b>"
    red = dict(color=ALARM)
    figure.add_annotation(x=peaks_at, y=unit.of(peak_bytes), text=name, showarrow=False, yshift=18, font=red)
    if run.card:
        name = card_words(run.card, run.card_emulated)
        font = dict(color=DARK_ALARM, size=14)
        mark_level(figure, unit.of(run.card), name, "y", bgcolor=_BEHIND_NAME, font=font)
    time_title = f"time since the step began ({clock.symbol})"
    figure.update_layout(xaxis_title=time_title, yaxis_title=f"live memory ({unit.symbol})")
    figure.update_xaxes(range=[times[0], times[-1]], showgrid=False)
    # a card above the peak must be on the axis, with its line
    highest = max(peak_bytes, run.card or 0)
    figure.update_yaxes(range=[0, 1.18 * unit.of(highest)])  # with space for the words over it
    title = f"{run.label}: rank {rank} peaks at {size(peak_bytes)} after {seconds(times_s[top])}"
    where = f"{how_and_where([run])}, one step{_emulated([run])}"
    alt = f"Stacked area of memory through one step. {title}."
    return titled(figure, title, where, alt, 360)


def _memory_of_rank(record: RunRecord, rank: int) -> list[Row]:
    """Return a rank's rows in the order of time; ValueError names the ranks there are where it has none."""
    table = record.table("memory")
    rows = [row for row in table if int(row["rank"]) == rank]
    if not rows:
        ranks = sorted({int(row["rank"]) for row in table})
        raise ValueError(
            f"no memory timeline of rank {rank}; the record has ranks {ranks}; run with memory=True or choose one of"
            " these"
        )
    return sorted(rows, key=lambda row: float(row["time_ns"]))


def total(row: Row) -> float:
    """Return the bytes of a row of memory, all categories together."""
    return sum(float(row[name]) for name in CATEGORIES)


def bands(
    rows: list[Row],
    times: list[float],
    names: Mapping[str, str] = CATEGORY_NAMES,
    unit: AxisUnit = MEGABYTES,
    **more: str,
) -> list[go.Scatter]:
    """Draw the stack of the categories that the rows hold; each holds its level until the next event."""
    stack = []
    for category in CATEGORIES:
        heights = [unit.of(float(row[category])) for row in rows]
        # an empty band would only lengthen the legend
        if not any(heights):
            continue
        name, colour = names[category], CATEGORY_COLOURS[category]
        # "hv": the level of a row holds until the next row, as memory changes in steps at allocations
        edge = line(name, colour, times, heights, 0.6, line_shape="hv", **more)
        hover = f"{name}: {unit.hover('y')}<extra></extra>"
        # one stackgroup: plotly adds each band to those below it
        stack.append(edge.update(stackgroup="memory", fillcolor=colour, hovertemplate=hover))
    return stack
