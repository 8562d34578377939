"""From templates to HTML, and the pieces that pages and notebooks share: tables, figures that are drawn when they are
first seen, notes, pictures.

Everything that is put into a template of `templates/` is escaped. `parts.html` holds the small pieces as macros; the
other HTML files are each one fragment or the page. CSS and JavaScript are plain files, which go in as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fsdplab.common.page_colours import readable
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
from fsdplab.figures.style import page as page_width
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
    made = Environment(
        loader=PackageLoader("fsdplab.figures.report"),
        autoescape=True,
        # a value that a template lacks is an error, not an empty place
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals.update(
        verbatim=_verbatim, size=size, ink=TEXT, ink_on_dark=DARK_TEXT, alarm=ALARM, font=FONT, readable=readable
    )
    made.filters["in_script"] = in_script
    return made


def rendered(template: str, **values: Any) -> Markup:
    """Return the HTML of a whole template: `rendered("tabs.html", panels={"Summary": body})`."""
    return Markup(_templates().get_template(template).render(values))


def part(macro: str, **values: Any) -> Markup:
    """Return the HTML of a macro of `parts.html`.

    `part("note", text="a < b") == "<figure><p>a &lt; b</p></figure>"`.
    """
    made: Markup = getattr(_templates().get_template("parts.html").module, macro)(**values)
    return made


def in_script(json_text: str) -> Markup:
    """Return JSON that no text in it can end.

    `in_script('"</script>"')` has `\\u003c` for `<`, which JSON reads back.
    """
    return Markup(json_text.replace("<", "\\u003c"))


def _verbatim(file: str) -> Markup:
    return Markup(Path(__file__).with_name("templates").joinpath(file).read_text(encoding="utf-8"))


def table(head: Texts, rows: Iterable[Texts], look: Look, caption: str = "", **attributes: str) -> Markup:
    """Return an HTML table; `attributes` are those of its own tag.

    `table(["rank"], [["0"], ["1"]], lambda *cell: {})`.
    """
    # (text, attributes of its tag) for each cell
    header = [(text, look(place, None)) for place, text in enumerate(head)]
    body = [[(text, look(place, text)) for place, text in enumerate(row)] for row in rows]
    return part("table", head=header, rows=body, attributes=attributes, caption=caption)


def number_table(head: Texts, rows: Iterable[Texts], caption: str = "") -> Markup:
    """Return a table whose cells are numbers, set flush right, after the first column's."""
    return table(head, rows, lambda place, text: {"class": "number"} if place else {}, caption)


def folded(title: str, body: str) -> Markup:
    """Return a part that opens when its title is clicked; nothing where there is no body."""
    return part("folded", title=title, body=body) if body else Markup("")


def comparison_table(runs: Sequence[RunView], look: Look, columns: Sequence[str], **attributes: str) -> Markup:
    """Return the table of a comparison, one row a run, in columns that the terminal prints too."""
    return table(columns, (cells(run, columns) for run in runs), look, **attributes)


def drawn(draw: Callable[What, go.Figure], *what: What.args, **how: What.kwargs) -> Markup:
    """Draw a figure for the page, or write the one line that says why there is none and what to do."""
    try:
        return plot(draw(*what, **how))
    except ValueError as reason:
        return note(str(reason))


def plot(figure: go.Figure) -> Markup:
    """Return a figure as JSON beside an empty place, where it is drawn when that is first seen; title, conditions and
    legend are HTML.
    """
    title = _plain(figure.layout.title.text)
    conditions = _plain(figure.layout.title.subtitle.text)
    from plotly.io.json import to_json_plotly

    # title, conditions and legend are set in HTML around it
    shown = bare(figure)
    return part(
        "plot",
        title=title,
        conditions=conditions,
        alt=alt_text(figure),
        height=shown["layout"]["height"],
        keys=legend_of(figure),
        data=to_json_plotly(shown),
    )


def page_of(figure: go.Figure) -> str:
    """Return a page of its own that shows one figure, also without a network; a button saves the figure as an SVG."""
    from plotly.io.json import to_json_plotly
    from plotly.offline import get_plotlyjs

    page = rendered(
        "figure.html",
        title=_plain(figure.layout.title.text),
        plotly_js=get_plotlyjs(),
        figure=plot(figure),
        # what is saved has title and legend in the picture
        whole=to_json_plotly(figure),
        width=page_width(),
    )
    return f"{page}\n"


def _plain(words: str | None) -> str:
    """Return a figure's text without its tags and its breaks of lines."""
    return Markup((words or "").replace("<br>", " ")).striptags()


def note(text: str) -> Markup:
    """Return one line in a figure's place."""
    return part("note", text=text)


# ---- the linked view: a slider moves the cursor and fills the map of slices, with no server behind it
#
# The states of every unit travel as compact JSON (an instant in ms and a state's number for each change); a few lines
# of script look them up. The page that embeds the fragment brings plotly, `plots.js` and `linked.css`.


MARKS = 900  # of the timeline and of the lives each


def linked_html(record: RunRecord, standalone: bool = False) -> str:
    """Return the linked view with a slider as an HTML fragment; `standalone` adds plotly and the script, for a page or
    a cell of its own.

    Needs `timeline`, `memory` and `life` (ValueError with the remedy).
    `Path("step.html").write_text(linked_html(record, standalone=True))`.
    """
    # the cursor begins where memory is at its peak
    start, life = peak_instant(record), unit_states(record)
    length = life.length / MS
    slices = cells_figure(life, start).update_layout(
        template=template(),
        height=70 + map_height(life),
        margin=dict(l=16, r=28, t=34, b=16),
        legend_y=1,
        meta=dict(alt="Which slice lives where at the cursor."),
    )
    fragment = rendered(
        "linked.html",
        plot=plot(linked_view(record, MARKS)),
        slices=plot(slices),
        start=f"{start / MS:.4f}",
        end=f"{length:.4f}",
        # the slider has 2000 places
        step=f"{length / 2000:.6f}",
        states=json.dumps(_states(life).as_json(), separators=(",", ":")),
    )
    if standalone:
        from plotly.offline import get_plotlyjs

        fragment = rendered("linked_alone.html", linked=fragment, plotly_js=get_plotlyjs())
    return str(fragment)


@dataclass(frozen=True)
class _States:
    """What the linked view's script (`plots.js`) looks up: a state is a number, its place in `colours` and `words`.

    `changes` has, of each rank and unit, (ms since the step began, state's number): `[[0, 0], [1.2, 1], [3.4, 2]]` is
    sharded, from 1.2 ms unsharding, from 3.4 ms unsharded.
    """

    ranks: list[int]
    units: list[str]
    changes: list[list[list[tuple[float, int]]]]
    colours: list[str]
    words: list[str]

    def as_json(self) -> dict[str, Any]:
        """Return the object that the script reads, by these names."""
        return {name: getattr(self, name) for name in ("ranks", "units", "changes", "colours", "words")}


def _states(life: UnitStates) -> _States:
    # state -> the number by which the script has it
    number = {state: place for place, state in enumerate(STATE_COLOURS)}
    changes = []
    for rank in life.shown:
        of_rank = []
        for unit in life.units:
            # to the microsecond, to keep the page small
            of_rank.append([(round(since / MS, 3), number[state]) for since, state in life.states[rank, unit]])
        changes.append(of_rank)
    words = [state_words(state) for state in STATE_COLOURS]
    return _States(life.shown, life.units, changes, list(STATE_COLOURS.values()), words)
