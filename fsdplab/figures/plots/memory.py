"""Memory by category: the peak of each run, and one rank's memory through a step."""

from __future__ import annotations

from fsdplab.common.sizes import size
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import Row
from fsdplab.figures.style import ALARM, CATEGORY_COLOURS, EDGE, card_line, titled
from fsdplab.figures.view import CATEGORY_NAMES, UNSPLIT, Runs, RunView, how_and_where, views
from fsdplab.records import CATEGORIES, RunRecord

MB = 1e6
_LEGEND_ROW = 21  # pixels


def memory_by_category(runs: Runs) -> go.Figure:
    """Stacked bars of each run's peak memory on its worst rank, with the card as a line.

    `runs`: records, or a comparison dict. Example: `memory_by_category(compare(specs))`.
    """
    shown = [run for run in views(runs) if run.peak]
    if not shown:
        raise ValueError("no run has a memory measurement to draw; run with memory=True")
    figure = go.Figure([_category_bar(shown, name) for name in _present(shown)])
    figure.update_layout(barmode="stack", xaxis_title="peak memory of the worst rank (MB)")
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    cards = [card for card in _cards(shown) if not _far(card, shown)]
    widest = max(*(run.known_peak for run in shown), *cards, 0) / MB
    figure.update_xaxes(range=[0, 1.3 * widest])
    for run in shown:
        _total_label(figure, run, margin=0.1 * widest)
    for card in cards:
        card_line(figure, card, emulated=any(run.card_emulated for run in shown))
    more = _LEGEND_ROW * max(0, _legend_rows(len(figure.data), shown) - 2)
    height = 260 + 52 * len(shown) + more
    return titled(figure, _finding(shown), _conditions(shown), _alt(shown), height=height, top=160 + more)


def _legend_rows(entries: int, shown: list[RunView]) -> int:
    """Rows of the legend in a notebook: long names of runs leave it a column less."""
    columns = 3 if max(len(run.label) for run in shown) > 16 else 4
    return -(-entries // columns)


def _present(shown: list[RunView]) -> list[str]:
    """Categories that at least one run holds, in the stack's order."""
    names = [name for name in CATEGORIES if any(run.split.get(name) for run in shown)]
    return names + [UNSPLIT] if any(_unsplit(run) for run in shown) else names


def _unsplit(run: RunView) -> int:
    """Bytes of the peak that no category accounts for: all of a peer engine's if unknown."""
    return max(0, run.known_peak - sum(run.split.values()))


def _bytes_of(run: RunView, name: str) -> int:
    return _unsplit(run) if name == UNSPLIT else run.split.get(name, 0)


def _category_bar(shown: list[RunView], name: str) -> go.Bar:
    """One category's segment in every run's bar."""
    colour = CATEGORY_COLOURS.get(name, "rgba(128,132,136,0.35)")
    label = CATEGORY_NAMES.get(name, name)
    return go.Bar(
        name=label,
        orientation="h",
        y=[run.label for run in shown],
        x=[_bytes_of(run, name) / MB for run in shown],
        marker=dict(color=colour, line=dict(color=EDGE, width=1)),
        hovertemplate="%{y}<br>" + label + ": %{x:.1f} MB<extra></extra>",
    )


def _total_label(figure: go.Figure, run: RunView, margin: float) -> None:
    """The total at the bar's end, in the alarm colour where the card is exceeded; `margin` (MB) keeps it off the card
    line.
    """
    end, card = run.known_peak / MB, (run.card or 0) / MB
    figure.add_annotation(
        x=card if 0 <= card - end < margin else end,
        y=run.label,
        text=f"<b>{size(run.peak)}</b>" + (" · out of memory" if run.over_card else ""),
        font=dict(color=ALARM) if run.over_card else None,
        showarrow=False,
        xanchor="left",
        xshift=6,
    )


def _cards(shown: list[RunView]) -> list[int]:
    """The sizes of card that occur."""
    return sorted({run.card for run in shown if run.card})


def _far(card: int, shown: list[RunView]) -> bool:
    """Whether a card is so much larger than the runs that the bars would become too small."""
    return card > 2.5 * max(run.known_peak for run in shown)


def _finding(shown: list[RunView]) -> str:
    """The title: which runs exceed the card, which fit."""
    over = [run for run in shown if run.over_card]
    low = min(shown, key=lambda run: run.known_peak)
    if over and len(over) < len(shown):
        return (
            f"{_listed(over)} {'exceeds' if len(over) == 1 else 'exceed'} the card; {low.label} peaks at"
            f" {size(low.peak)}"
        )
    if over:
        return "No run fits the card"
    high = max(shown, key=lambda run: run.known_peak)
    return f"{low.label} peaks at {size(low.peak)}" + (
        f", {high.label} at {size(high.peak)}" if high is not low else ""
    )


def _listed(runs: list[RunView]) -> str:
    """`"a, b and c"`; beyond three names, how many."""
    names = [run.label for run in runs]
    if len(names) > 3:
        return f"{len(names)} runs"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _conditions(shown: list[RunView]) -> str:
    emulated = "; the card is emulated" if any(run.card and run.card_emulated for run in shown) else ""
    far = [f" and holds {size(card)}, beyond this axis" for card in _cards(shown) if _far(card, shown)]
    return f"{how_and_where(shown)}, split at the instant of the peak{emulated}{far[0] if far and emulated else ''}"


def _alt(shown: list[RunView]) -> str:
    """The alternative text: each run's total and its largest category."""
    parts = []
    for run in shown:
        largest = max(run.split, key=lambda name: run.split[name]) if any(run.split.values()) else None
        inside = f", mostly {CATEGORY_NAMES.get(largest, largest)} ({size(run.split[largest])})" if largest else ""
        parts.append(f"{run.label} {size(run.peak)}{inside}{', out of memory' if run.over_card else ''}")
    card = next((f" The card holds {size(run.card)}." for run in shown if run.card), "")
    return f"Bars of peak memory per rank: {'; '.join(parts)}.{card}"


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
    run = views(record)[0]
    drawn = envelope(rows)
    times = [float(row["time_ns"]) / 1e6 for row in drawn]
    totals = [_total(row) for row in drawn]
    figure = go.Figure([band(drawn, times, name) for name in CATEGORIES if any(float(row[name]) for row in drawn)])
    top = max(range(len(drawn)), key=totals.__getitem__)
    _peak_marker(figure, times[top], totals[top])
    if run.card:
        _card_level(figure, run.card, run.card_emulated)
    figure.update_layout(xaxis_title="time since the step began (ms)", yaxis_title="live memory (MB)")
    figure.update_xaxes(range=[times[0], times[-1]], showgrid=False)
    figure.update_yaxes(range=[0, 1.18 * max(totals[top], run.card or 0) / MB])
    title = f"{run.label}: rank {rank} peaks at {size(totals[top])} after {times[top]:.0f} ms"
    where = f"{how_and_where([run])}, one step" + ("; the card is emulated" if run.card and run.card_emulated else "")
    return titled(figure, title, where, f"Stacked area of memory through one step. {title}.", height=520)


def _total(row: Row) -> float:
    return sum(float(row[name]) for name in CATEGORIES)


def envelope(rows: list[Row], limit: int = 500) -> list[Row]:
    """At most about twice `limit` of a rank's rows, in order of time: of each equal share of the step, the highest and
    the last.

    A step has tens of thousands of allocations, a screen about a thousand columns; the peak and the level at the end of
    every column stay.
    """
    if len(rows) <= 2 * limit:
        return rows
    begin, length = float(rows[0]["time_ns"]), max(1.0, float(rows[-1]["time_ns"]) - float(rows[0]["time_ns"]))
    shares: dict[int, list[Row]] = {}
    for row in rows:
        shares.setdefault(int((float(row["time_ns"]) - begin) / length * (limit - 1)), []).append(row)
    kept = [place for share in shares.values() for place in (max(share, key=_total), share[-1])]
    return list({id(row): row for row in [rows[0], *kept]}.values())


def band(rows: list[Row], times: list[float], name: str) -> go.Scatter:
    """One category's band; memory holds its level until the next event, so the edge is a step."""
    return go.Scatter(
        name=CATEGORY_NAMES[name],
        x=times,
        y=[float(row[name]) / MB for row in rows],
        stackgroup="memory",
        mode="lines",
        line=dict(shape="hv", width=0.6, color=CATEGORY_COLOURS[name]),
        fillcolor=CATEGORY_COLOURS[name],
        hovertemplate=CATEGORY_NAMES[name] + ": %{y:.1f} MB<extra></extra>",
    )


def _peak_marker(figure: go.Figure, time_ms: float, total: float) -> None:
    """A dot and the number at the peak's instant."""
    figure.add_trace(
        go.Scatter(
            x=[time_ms], y=[total / MB], mode="markers", name="peak", showlegend=False,
            marker=dict(symbol="circle", size=12, color=ALARM, line=dict(color="white", width=1.5)),
            hovertemplate="peak %{y:.1f} MB<extra></extra>",
        )
    )  # fmt: skip
    figure.add_annotation(
        x=time_ms, y=total / MB, text=f"<b>peak {size(total)}</b>", showarrow=False, yshift=18, font=dict(color=ALARM)
    )


def _card_level(figure: go.Figure, card: int, emulated: bool) -> None:
    figure.add_shape(
        type="line",
        x0=0,
        x1=1,
        xref="paper",
        y0=card / MB,
        y1=card / MB,
        line=dict(color=ALARM, width=2.5, dash="dash"),
    )
    figure.add_annotation(
        x=0, xref="paper", y=card / MB, text=f"card {size(card)}{' (emulated)' if emulated else ''}",
        showarrow=False, xanchor="left", yanchor="bottom", xshift=6, font=dict(color=ALARM, size=14),
    )  # fmt: skip
