"""From templates to HTML, and the pieces that pages and notebooks share: tables, figures that are drawn when they are
first seen, notes, pictures.

Everything that is put into a template of `templates/` is escaped. `parts.html` holds the small pieces as macros; the
other HTML files are each one fragment or the page. CSS and JavaScript are plain files, which go in as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fsdplab.common.sizes import size
from fsdplab.figures.plotly_go import go
from fsdplab.figures.plots.linked import (
    STATE_COLOURS,
    UnitStates,
    cells_figure,
    linked_view,
    map_height,
    peak_instant,
    state_words,
    unit_states,
)
from fsdplab.figures.profile_data import MS
from fsdplab.figures.style import ALARM, DARK_TEXT, FONT, TEXT, alt_text, bare, legend_of, template
from fsdplab.figures.table import cells
from fsdplab.figures.view import RunView
from fsdplab.records import RunRecord

What = ParamSpec("What")
Texts: TypeAlias = Sequence[str]
# the attributes of a cell's tag by its column's place and its text (None: the column's heading): classes where there is
# a style sheet, styles where there is none
Look: TypeAlias = Callable[[int, str | None], Mapping[str, str]]


@lru_cache
def _templates() -> Environment:
    loader = PackageLoader("fsdplab.figures.report")
    made = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )  # fmt: skip
    made.globals.update(verbatim=_verbatim, size=size, ink=TEXT, ink_on_dark=DARK_TEXT, alarm=ALARM, font=FONT)
    made.filters["in_script"] = in_script
    return made


def rendered(template: str, **values: Any) -> Markup:
    """The HTML of a whole template: `rendered("tabs.html", panels={"Summary": body})`."""
    return Markup(_templates().get_template(template).render(values))


def part(macro: str, **values: Any) -> Markup:
    """The HTML of a macro of `parts.html`: `part("note", text="a < b") == "<figure><p>a &lt; b</p></figure>"`."""
    made: Markup = getattr(_templates().get_template("parts.html").module, macro)(**values)
    return made


def in_script(json_text: str) -> Markup:
    """JSON that no text in it can end: `in_script('"</script>"')` has `\\u003c` for `<`, which JSON reads back."""
    return Markup(json_text.replace("<", "\\u003c"))


def _verbatim(file: str) -> Markup:
    return Markup(Path(__file__).with_name("templates").joinpath(file).read_text(encoding="utf-8"))


def table(head: Texts, rows: Iterable[Texts], look: Look, caption: str = "", **attributes: str) -> Markup:
    """An HTML table; `attributes` are those of its own tag: `table(["rank"], [["0"], ["1"]], lambda *cell: {})`."""
    header = [(text, look(place, None)) for place, text in enumerate(head)]
    body = [[(text, look(place, text)) for place, text in enumerate(row)] for row in rows]
    return part("table", head=header, rows=body, attributes=attributes, caption=caption)


def number_table(head: Texts, rows: Iterable[Texts], caption: str = "") -> Markup:
    """A table whose cells are numbers, set flush right, after the first column's."""
    return table(head, rows, lambda place, text: {"class": "number"} if place else {}, caption)


def folded(title: str, body: str) -> Markup:
    """A part that opens when its title is clicked; nothing where there is no body."""
    return part("folded", title=title, body=body) if body else Markup("")


def comparison_table(runs: Sequence[RunView], look: Look, columns: Sequence[str], **attributes: str) -> Markup:
    """The table of a comparison, one row a run, in columns that the terminal prints too."""
    return table(columns, (cells(run, columns) for run in runs), look, **attributes)


def drawn(draw: Callable[What, go.Figure], *what: What.args, **how: What.kwargs) -> Markup:
    """A figure for the page, or the one line that says why there is none and what to do."""
    try:
        return plot(draw(*what, **how))
    except ValueError as reason:
        return note(str(reason))


def plot(figure: go.Figure) -> Markup:
    """A figure as JSON beside an empty place, drawn when it is first seen; title, conditions and legend are HTML."""
    words = (figure.layout.title.text, figure.layout.title.subtitle.text)
    title, conditions = (Markup((each or "").replace("<br>", " ")).striptags() for each in words)
    from plotly.io.json import to_json_plotly

    shown = bare(figure)
    return part(
        "plot", title=title, conditions=conditions, alt=alt_text(figure), height=shown["layout"]["height"],
        keys=legend_of(figure), data=to_json_plotly(shown),
    )  # fmt: skip


def note(text: str) -> Markup:
    """One line in a figure's place."""
    return part("note", text=text)


# ---- the linked view: a slider moves the cursor and fills the map of slices, with no server behind it
#
# The states of every unit travel as compact JSON (an instant in ms and a state's number for each change); a few lines
# of script look them up. The page that embeds the fragment brings plotly, `plots.js` and `linked.css`.


MARKS = 900  # of the timeline and of the lives each


def linked_html(record: RunRecord, standalone: bool = False) -> str:
    """The linked view with a slider as an HTML fragment; `standalone` adds plotly and the script, for a page or a cell
    of its own.

    Needs `timeline`, `memory` and `life` (ValueError with the remedy).
    `Path("step.html").write_text(linked_html(record, standalone=True))`.
    """
    start, life = peak_instant(record), unit_states(record)
    length = life.length / MS
    slices = cells_figure(life, start).update_layout(
        template=template(), height=70 + map_height(life), margin=dict(l=16, r=28, t=34, b=16), legend_y=1,
        meta=dict(alt="Which slice lives where at the cursor."),
    )  # fmt: skip
    fragment = rendered(
        "linked.html",
        plot=plot(linked_view(record, MARKS)),
        slices=plot(slices),
        start=f"{start / MS:.4f}",
        end=f"{length:.4f}",
        step=f"{length / 2000:.6f}",
        states=json.dumps(_states(life), separators=(",", ":")),
    )
    if standalone:
        from plotly.offline import get_plotlyjs

        fragment = rendered("linked_alone.html", linked=fragment, plotly_js=get_plotlyjs())
    return str(fragment)


def _states(life: UnitStates) -> dict[str, Any]:
    """Ranks, units and every unit's changes, and the words and the colour of each state.

    `[[0, 0], [1.2, 1], [3.4, 2]]` is sharded, from 1.2 ms unsharding, from 3.4 ms unsharded.
    """
    number = {state: place for place, state in enumerate(STATE_COLOURS)}
    changes = [
        [[[round(since / MS, 3), number[state]] for since, state in life.states[rank, unit]] for unit in life.units]
        for rank in life.shown
    ]
    looks = dict(colours=list(STATE_COLOURS.values()), words=[state_words(state) for state in STATE_COLOURS])
    return dict(ranks=life.shown, units=life.units, changes=changes, **looks)
