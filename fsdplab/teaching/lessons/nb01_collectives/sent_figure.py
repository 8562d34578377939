"""How many bytes a rank sends, over the number of ranks: what the sliders of lesson 01 draw."""

from __future__ import annotations

from fsdplab.common.sizes import three_digits
from fsdplab.figures.lines import line
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import COLLECTIVE_COLOURS, mark_level, titled

RANKS = (2, 3, 4, 8, 16, 64, 512)
_ROUNDS = {"all_gather, reduce_scatter": 1, "all_reduce": 2}
_COLOURS = {
    "all_gather, reduce_scatter": COLLECTIVE_COLOURS["all_gather"],
    "all_reduce": COLLECTIVE_COLOURS["all_reduce"],
}


def sent(rounds: int, megabytes: float, ranks: int) -> float:
    """MB that one rank sends: `sent(1, 48, 4) == 36`, `sent(2, 48, 4) == 72`."""
    return rounds * megabytes * (ranks - 1) / ranks


def sent_figure(megabytes: float, ranks: int) -> go.Figure:
    """MB that one rank sends in each collective on a payload of P = `megabytes` MB, for few and many ranks; `ranks` is
    marked. Dashed: what it comes near to with ever more ranks, P and 2 P.
    """
    places = [str(count) for count in RANKS]
    sizes = [18 if count == ranks else 7 for count in RANKS]
    figure = go.Figure(
        [
            line(
                name, _COLOURS[name], places, [sent(rounds, megabytes, count) for count in RANKS],
                mode="lines+markers", marker_size=sizes,
                hovertemplate=name + " on %{x} ranks: %{y:.2f} MB<extra></extra>",
            )
            for name, rounds in _ROUNDS.items()
        ]
    )  # fmt: skip
    for rounds, label in ((1, "P"), (2, "2 P")):
        mark_level(figure, rounds * megabytes, label, "y", colour="#808488")
    figure.update_xaxes(title="ranks", type="category")
    figure.update_yaxes(title="MB sent by one rank", range=[0, 2.3 * megabytes])
    one, both = (three_digits(sent(rounds, megabytes, ranks)) for rounds in (1, 2))
    title = f"P = {megabytes:g} MB on {ranks} ranks: all_gather and reduce_scatter {one} MB, all_reduce {both} MB"
    alt = f"Two lines of MB sent by one rank over the number of ranks, which rise towards P and 2 P. {title}."
    return titled(figure, title, "Computed: P (n-1)/n, and 2 P (n-1)/n for all_reduce", alt, 270)
