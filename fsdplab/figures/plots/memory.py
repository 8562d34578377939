"""Memory by category: the peak of each run, as measured and as predicted, and one rank's memory through a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdplab.common.names import category_titles
from fsdplab.common.sizes import size
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.conclusion import most_sharded, verdict
from fsdplab.figures.fastest import listed
from fsdplab.figures.lines import line, peak
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import MS, Row
from fsdplab.figures.style import ALARM, CATEGORY_COLOURS, DARK_ALARM, card_words, mark_level, titled
from fsdplab.figures.table import OVER
from fsdplab.figures.view import CATEGORY_NAMES, UNSPLIT, Runs, RunView, how_and_where, missing, view, views
from fsdplab.records import CATEGORIES, RunRecord, known

MB = 1e6
_PALE = 0.55  # opacity of what is predicted
_UNSPLIT_COLOUR = "rgba(128,132,136,0.35)"


def memory_by_category(runs: Runs) -> go.Figure:
    """Stacked bars of each run's peak memory on its worst rank, with the card as a line.

    `runs`: records, or a comparison dict. Example: `memory_by_category(compare(specs))`.
    """
    every = views(runs)
    shown = [run for run in every if run.peak]
    if not shown:
        raise ValueError("no run has a memory measurement to draw; run with memory=True")
    over = [run.label for run in shown if run.over_card]
    ends = {run.label: f"<b>{size(run.peak)}</b>{f' · {_over(run)}' if run.over_card else ''}" for run in shown}
    splits = [{**run.split, UNSPLIT: max(0, known(run.peak) - sum(run.split.values()))} for run in shown]
    cards = sorted({run.card for run in shown if run.card})
    far = [card for card in cards if card > 2.5 * max(known(run.peak) for run in shown)]  # bars would be tiny beside it
    emulated = any(run.card_emulated for run in shown)
    levels = {card_words(card, emulated): card / MB for card in cards if card not in far}
    figure = stacked_bars(
        ends, _parts(splits, shown), "peak memory of the worst rank (MB)", levels=levels, alarming=over
    )
    where = f"{how_and_where(shown)}, split at the instant of the peak{_emulated(shown)}"
    if far and _emulated(shown):
        where += f" and holds {size(far[0])}, beyond this axis"
    where = "; ".join(filter(None, [where, missing(every, shown, "has no measured peak")]))
    peaks = "; ".join(f"{run.label} {size(run.peak)}{_mostly(run)}" for run in shown)
    card = next((f" The card holds {size(run.card)}." for run in shown if run.card), "")
    alt = f"Bars of peak memory per rank: {peaks}.{card}"
    return titled(figure, _finding(shown), where, alt, 86 + 43 * len(shown))


def _over(run: RunView) -> str:
    """A run over an emulated card goes on to its end; earlier versions ended it there, as a real card does."""
    return "out of memory" if run.status == "out_of_memory" else OVER


def _parts(splits: Sequence[Mapping[str, int]], shown: Sequence[RunView] = ()) -> list[Part]:
    """The categories that at least one of the bars holds, in MB, as they are called of these runs."""
    names = category_titles(run.spec for run in shown)
    held = [name for name in (*CATEGORIES, UNSPLIT) if any(split.get(name) for split in splits)]
    looks = [(names.get(name, name), CATEGORY_COLOURS.get(name, _UNSPLIT_COLOUR)) for name in held]
    return [Part(*look, [split.get(name, 0) / MB for split in splits]) for look, name in zip(looks, held)]


def _emulated(shown: Sequence[RunView]) -> str:
    return "; the card is emulated" if any(run.card and run.card_emulated for run in shown) else ""


def _mostly(run: RunView) -> str:
    """The largest category of a run, for the alternative text, and whether it is over its card."""
    over = f", {_over(run)}" if run.over_card else ""
    if not any(run.split.values()):
        return over
    largest = max(run.split, key=lambda name: run.split[name])
    return f", mostly {category_titles([run.spec]).get(largest, largest)} ({size(run.split[largest])}){over}"


def _finding(shown: list[RunView]) -> str:
    over = [run for run in shown if run.over_card]
    if len(over) == len(shown):
        return "No run fits the card"
    low, high = (pick(shown, key=lambda run: known(run.peak)) for pick in (min, max))
    sharded = most_sharded(shown)  # what the page is about, also where another row needs a little less
    if sharded is not None and sharded is not high:
        low = sharded
    peaks = f"{low.label} peaks at {size(low.peak)}"
    if over:
        names = listed(over) if len(over) <= 3 else f"{len(over)} runs"
        return f"{names} {'is' if len(over) == 1 else 'are'} over the card; {peaks}"
    return peaks + (f", {high.label} at {size(high.peak)}" if high is not low else "")


def predicted_memory(runs: Runs) -> go.Figure:
    """Stacked bars of each run's peak by category, the measured one above the predicted one, which is paler.

    `runs`: records, or a comparison dict. ValueError where no run has both.
    """
    every = views(runs)
    shown = [run for run in every if run.peak and run.predicted_peak]
    if not shown:
        raise ValueError(
            "no run has both a measured and a predicted peak; memory is predicted for the lab's engine on CPU ranks"
        )
    ends = {}
    for run in shown:
        ratio = known(run.predicted_peak) / known(run.peak)
        ends[run.label] = f"<b>{size(run.peak)}</b>"
        ends[f"{run.label}, predicted"] = f"{size(run.predicted_peak)}, {ratio:.2f} of it"
    splits = [split for run in shown for split in (run.split, run.predicted_split)]  # a run's two together
    figure = stacked_bars(ends, _parts(splits), "peak memory of the worst rank (MB)")
    figure.update_traces(marker_opacity=[1.0, _PALE] * len(shown)).update_layout(bargap=0.18)
    what = f"{how_and_where(shown)}; predicted by playing the engine's allocations, before the run"
    what = "; ".join(filter(None, [what, missing(every, shown, "lacks one of the two peaks")]))
    peaks = [f"{run.label} {size(run.peak)}, predicted {size(run.predicted_peak)}" for run in shown]
    alt = f"Bars of measured and predicted peak memory: {'; '.join(peaks)}."
    return titled(figure, verdict(shown), what, alt, 80 + 76 * len(shown))


def memory_timeline(record: RunRecord, rank: int = 0) -> go.Figure:
    """One rank's live bytes through one step, stacked by category, with the peak marked and the card as a line.

    `record`: a run record with a `memory` table. ValueError names the ranks there are if `rank` has no rows.
    """
    table = record.table("memory")
    rows = [row for row in table if int(row["rank"]) == rank]
    if not rows:
        ranks = sorted({int(row["rank"]) for row in table})
        raise ValueError(
            f"no memory timeline of rank {rank}; the record has ranks {ranks}; run with memory=True or choose one of"
            " these"
        )
    rows.sort(key=lambda row: float(row["time_ns"]))
    run = view(record)
    times = [float(row["time_ns"]) / MS for row in rows]
    totals = [total(row) for row in rows]
    figure = go.Figure(bands(rows, times, category_titles([run.spec])))
    top = max(range(len(rows)), key=totals.__getitem__)
    figure.add_trace(peak(times[top], totals[top] / MB))
    words = dict(text=f"<b>peak {size(totals[top])}</b>", showarrow=False, yshift=18, font=dict(color=ALARM))
    figure.add_annotation(x=times[top], y=totals[top] / MB, **words)
    if run.card:
        behind = "rgba(255, 255, 255, 0.85)"  # the name lies on the bands, whose colours it could not be read on
        mark_level(
            figure,
            run.card / MB,
            card_words(run.card, run.card_emulated),
            "y",
            bgcolor=behind,
            font=dict(color=DARK_ALARM, size=14),
        )
    figure.update_layout(xaxis_title="time since the step began (ms)", yaxis_title="live memory (MB)")
    figure.update_xaxes(range=[times[0], times[-1]], showgrid=False)
    figure.update_yaxes(range=[0, 1.18 * max(totals[top], run.card or 0) / MB])
    title = f"{run.label}: rank {rank} peaks at {size(totals[top])} after {times[top]:.0f} ms"
    where = f"{how_and_where([run])}, one step{_emulated([run])}"
    return titled(figure, title, where, f"Stacked area of memory through one step. {title}.", 360)


def total(row: Row) -> float:
    """Bytes of a row of memory, all categories together."""
    return sum(float(row[name]) for name in CATEGORIES)


def bands(
    rows: list[Row], times: list[float], names: Mapping[str, str] = CATEGORY_NAMES, **more: str
) -> list[go.Scatter]:
    """The stack of the categories that the rows hold, in MB; each holds its level until the next event."""
    found = []
    for category in (name for name in CATEGORIES if any(float(row[name]) for row in rows)):
        name, colour = names[category], CATEGORY_COLOURS[category]
        edge = line(name, colour, times, [float(row[category]) / MB for row in rows], 0.6, line_shape="hv", **more)
        hover = f"{name}: %{{y:.1f}} MB<extra></extra>"
        found.append(edge.update(stackgroup="memory", fillcolor=colour, hovertemplate=hover))
    return found
