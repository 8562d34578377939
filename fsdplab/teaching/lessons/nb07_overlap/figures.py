"""Lesson 07's own figure: which part of a step's communication is exposed, over the speed of the link."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fsdplab.common.sizes import seconds
from fsdplab.figures.lines import line
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import GRID, titled

# (MB/s of the link, exposed ms, ms of all communication) points by the schedule's name
Curves = Mapping[str, list[tuple[int, float, float]]]
_LINES = (("#e01f3d", 3, "solid"), ("#4aa3e0", 3, "solid"), ("#6b7380", 2, "dash"))  # colour, width, dash


def exposed_curves(curves: Curves, link: int, tokens: int) -> go.Figure:
    """Exposed part of the communication (y) over the link (x), a line a schedule; `link` is marked, and the title has
    its ms.

    The axis is in doublings of the slowest link: as much width from 25 to 50 MB/s as from 3,200 to 6,400.
    """
    links = sorted({at for points in curves.values() for at, _, _ in points})
    places = {at: math.log2(at / links[0]) for at in links}
    lines = zip(curves.items(), _LINES, strict=True)
    figure = go.Figure([_line(name, points, places, look) for (name, points), look in lines])
    names = dict(tickmode="array", tickvals=list(places.values()), ticktext=[f"{at:,}" for at in links])
    figure.update_xaxes(title_text="link (MB/s)", range=[-0.3, places[links[-1]] + 0.3], **names)
    figure.update_yaxes(title_text="exposed, % of communication", range=[-3, 105])
    figure.add_shape(
        type="line", x0=places[link], x1=places[link], y0=0, y1=1, yref="paper", line=dict(color=GRID, width=4)
    )
    title, where, alt = _words(curves, link, tokens)
    return titled(figure, title, where, alt, 324)


def _line(
    name: str, points: list[tuple[int, float, float]], places: dict[int, float], look: tuple[str, int, str]
) -> go.Scatter:
    colour, width, dash = look
    shares = [100 * shown / moved for _, shown, moved in points]
    return line(
        name, colour, [places[at] for at, _, _ in points], shares, width, dash,
        customdata=[list(point) for point in points],
        hovertemplate=f"{name}, %{{customdata[0]}} MB/s<br>%{{customdata[1]:.1f}} of %{{customdata[2]:.1f}} ms"
        "<extra></extra>",
    )  # fmt: skip


def _words(curves: Curves, link: int, tokens: int) -> tuple[str, str, str]:
    """(title, conditions, alternative text) with the numbers of the marked link."""
    here = {name: next(each[1:] for each in points if each[0] == link) for name, points in curves.items()}
    parts = {name: seconds(shown / 1e3) if shown else "0 ms" for name, (shown, _) in here.items()}
    moved = seconds(next(iter(here.values()))[1] / 1e3)
    exposed = ", ".join(f"{part} ({name})" for name, part in list(parts.items())[:2])
    title = f"{link:,} MB/s, {tokens} tokens: messages take {moved}; exposed are {exposed}"
    least = f"at least {list(parts.values())[-1]} under any schedule"
    where = f"{least}; a step on the steady card, simulated with the engine's own schedule"
    return title, where, f"Lines of exposed time over the link. {title}; {least}."
