"""The linked view on a page: a slider moves the cursor and the map of slices, with no server behind it.

The states of every unit travel as compact JSON (an instant in ms and a state's number for each change); a few lines of
script look them up. The page that embeds the fragment brings plotly and `page_script.PLOTS`.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

from fsdplab.figures.plots.linked import peak_instant, with_cursor
from fsdplab.figures.plots.shard_map import SLICE_COLOURS, STATES, Lives, lives
from fsdplab.figures.profile_data import MS
from fsdplab.figures.report.script import PLOTS, plot_div
from fsdplab.figures.style import FONT
from fsdplab.records import RunRecord

MARKS = 900  # of the timeline and of the lives each
# the page's rules for the fragment alone: a notebook's own type and colours stay
_ALONE = (
    f".linked {{ font-family: {FONT}; }} .linked figure {{ margin: 0; }} .cursor {{ display: flex; gap: 12px;"
    " align-items: center; } .cursor input { flex: 1; accent-color: #d0105a; } .cursor output { min-width: 92px;"
    " } .slices svg { width: 100%; height: auto; } .key { display: flex; gap: 22px; font-size: 14px; } .key i {"
    " display: inline-block; width: 14px; height: 14px; margin-right: 6px; border: 1px solid #3c4046; vertical-align:"
    " -2px; }"
)


def linked_html(record: RunRecord, standalone: bool = False) -> str:
    """The linked view with a slider as an HTML fragment; `standalone` adds plotly and the script, for a page or a cell
    of its own.

    Needs `timeline`, `memory` and `life` (ValueError with the remedy).
    `Path("step.html").write_text(linked_html(record, standalone=True))`.
    """
    start = peak_instant(record)
    life = lives(record)
    data = json.dumps(states_json(life), separators=(",", ":")).replace("<", "\\u003c")
    length = life.length / MS
    span = f'min="0" max="{length:.4f}" step="{length / 2000:.6f}" value="{start / MS:.4f}"'
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in SLICE_COLOURS.items()
    )
    fragment = (
        f'<div class="linked" data-at="{start / MS:.4f}">{plot_div(with_cursor(record, start, MARKS))}<label'
        f' class="cursor">time <input type="range" {span}> <output></output></label><div class="slices" role="img"'
        f' aria-label="which slice lives where at the cursor"></div><div class="key">{legend}</div><script'
        f' type="application/json" class="states">{data}</script></div>'
    )
    return _alone(fragment) if standalone else fragment


def states_json(life: Lives) -> dict[str, Any]:
    """Ranks, units and every unit's changes: `[[0, 0], [1.2, 1], [3.4, 2]]` is sharded, from 1.2 ms unsharding, from
    3.4 ms unsharded.
    """
    changes = [
        [
            [[round(since / MS, 3), STATES.index(state)] for since, state in life.states[rank, unit]]
            for unit in life.units
        ]
        for rank in life.shown
    ]
    return {
        "ranks": life.shown,
        "shares": len(life.ranks),
        "units": life.units,
        "changes": changes,
        "colours": list(SLICE_COLOURS.values()),
    }


def _alone(fragment: str) -> str:
    from plotly.offline import get_plotlyjs

    return (
        f"<style>{_ALONE}</style><script>{get_plotlyjs()}</script>{fragment}<script>{PLOTS}\ndrawIn(document);</script>"
    )
