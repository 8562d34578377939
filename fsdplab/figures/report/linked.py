"""The linked view on a page: a slider moves the cursor and fills the map of slices, with no server behind it.

The states of every unit travel as compact JSON (an instant in ms and a state's number for each change); a few lines of
script look them up. The page that embeds the fragment brings plotly, `plots.js` and `linked.css`.
"""

from __future__ import annotations

import json
from typing import Any

from fsdplab.figures.plots import shard_map
from fsdplab.figures.plots.linked import linked_view, peak_instant
from fsdplab.figures.plots.shard_map import STATE_COLOURS, UnitStates
from fsdplab.figures.profile_data import MS
from fsdplab.figures.report.parts import plot, rendered
from fsdplab.figures.style import template
from fsdplab.records import RunRecord

MARKS = 900  # of the timeline and of the lives each


def linked_html(record: RunRecord, standalone: bool = False) -> str:
    """The linked view with a slider as an HTML fragment; `standalone` adds plotly and the script, for a page or a cell
    of its own.

    Needs `timeline`, `memory` and `life` (ValueError with the remedy).
    `Path("step.html").write_text(linked_html(record, standalone=True))`.
    """
    start, life = peak_instant(record), shard_map.unit_states(record)
    length = life.length / MS
    slices = shard_map.cells_figure(life, start).update_layout(
        template=template(), height=70 + shard_map.map_height(life), margin=dict(l=16, r=28, t=34, b=16), legend_y=1,
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
    looks = dict(colours=list(STATE_COLOURS.values()), words=[shard_map.state_words(state) for state in STATE_COLOURS])
    return dict(ranks=life.shown, units=life.units, changes=changes, **looks)
