"""A comparison as one standalone page: opens offline, with the table, two figures and what was real in it.

plotly.js is inlined once; everything else stays under a megabyte. The page follows the reader's light or dark setting
and has a switch for lecture rooms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from fsdplab.figures.memory import memory_by_category
from fsdplab.figures.static import svg
from fsdplab.figures.steps import step_time
from fsdplab.figures.style import DARK_TEXT, FONT, TEXT, alt_text
from fsdplab.figures.table import AGREE, COLUMNS, DIFFER, EQUAL, LEGEND, cells, verdict
from fsdplab.figures.units import MISSING, size
from fsdplab.figures.view import CATEGORY_NAMES, RunView, provenance, views
from fsdplab.records import CATEGORIES

_STYLE = f"""
:root {{ --paper: #ffffff; --ink: {TEXT}; --soft: #5a616b; --line: #d9dce1; --panel: #f5f6f8; --good: #00704f; --bad: #c01f25; }}
:root.dark {{ --paper: #12151a; --ink: {DARK_TEXT}; --soft: #aab2bd; --line: #333a44; --panel: #1a1f26; --good: #3fd0a0; --bad: #ff6a6a; }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 28px 32px 64px; max-width: 1320px; background: var(--paper); color: var(--ink); font: 17px/1.5 {FONT}; }}
h1 {{ font-size: 30px; margin: 0 0 4px; }} h2 {{ font-size: 21px; margin: 36px 0 8px; }}
p.soft, caption, footer {{ color: var(--soft); }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 15px; }}
caption {{ caption-side: bottom; text-align: left; padding-top: 6px; font-size: 14px; }}
th, td {{ text-align: left; padding: 7px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }} .wide td {{ white-space: nowrap; }}
th {{ background: var(--panel); }} td.number {{ text-align: right; white-space: nowrap; }}
.good {{ color: var(--good); font-weight: 600; }} .bad {{ color: var(--bad); font-weight: 600; }}
figure {{ margin: 20px 0; border: 1px solid var(--line); border-radius: 8px; padding: 8px; }}
.wide {{ overflow-x: auto; }} .beside {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 0 40px; }}
button {{ float: right; font: inherit; font-size: 15px; color: var(--ink); background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 4px 12px; cursor: pointer; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 0; }} dt {{ color: var(--soft); }} dd {{ margin: 0; overflow-wrap: anywhere; }}
"""

_SWITCH = f"""
function paper(dark) {{
  document.documentElement.classList.toggle("dark", dark);
  document.getElementById("switch").textContent = dark ? "light page" : "dark page";
  for (const plot of document.querySelectorAll(".js-plotly-plot"))
    Plotly.relayout(plot, {{"font.color": dark ? "{DARK_TEXT}" : "{TEXT}"}});
}}
document.getElementById("switch").onclick = () => paper(!document.documentElement.classList.contains("dark"));
paper(matchMedia("(prefers-color-scheme: dark)").matches);
"""


def comparison_page(comparison: Mapping, runs: Sequence[object] | None = None) -> str:
    """The page of a comparison (the dict that `--json` writes); `runs` adds what only records know, such as statuses.

    Example: `Path("compare.html").write_text(comparison_page(comparison_json(records, reference)), encoding="utf-8")`.
    """
    shown = views(comparison if runs is None else runs)
    body = [
        '<button id="switch" type="button">dark page</button>',
        "<h1>What each sharding strategy costs</h1>",
        f'<p class="soft">{escape(_setting(comparison.get("spec") or {}))}</p>',
        f'<div class="wide">{_table(shown)}</div>',
        *_figures(comparison if runs is None else runs),
        "<h2>The peak by category</h2>",
        f'<div class="wide">{_categories_table(shown)}</div>',
        "<h2>What was real here</h2>",
        _pairs(provenance(shown)),
        f'<div class="beside"><section><h2>What was run</h2>{_pairs(_flat(comparison.get("spec") or {}))}</section>',
        f'<section><h2>Where it ran</h2>{_pairs(_flat(comparison.get("environment") or {}))}</section></div>',
    ]
    return _document("\n".join(body), comparison)


def _document(body: str, comparison: Mapping) -> str:
    """The whole HTML document; the comparison itself is embedded as JSON so that the page carries its data."""
    data = json.dumps(comparison, separators=(",", ":")).replace("<", "\\u003c")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>fsdplab comparison</title><style>{_STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<script>{get_plotlyjs()}</script></head>\n<body>\n{body}\n'
        f'<script type="application/json" id="comparison">{data}</script>\n<script>{_SWITCH}</script>\n</body></html>\n'
    )


def _setting(spec: Mapping) -> str:
    """One sentence on what was trained, of the fields that the spec has."""
    words = {"model": "model {}", "world_size": "{} ranks", "batch_size": "batch {} a rank", "sequence_length": "{} tokens a sequence", "steps": "{} steps", "seed": "seed {}"}
    return ", ".join(form.format(spec[name]) for name, form in words.items() if spec.get(name) is not None)


def _table(shown: list[RunView]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    rows = "".join(f"<tr>{''.join(map(_cell, cells(run)))}</tr>" for run in shown)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody><caption>{escape(LEGEND)}.</caption></table>"


def _cell(text: str) -> str:
    """A table cell, coloured where it is a verdict."""
    kind = {AGREE: "good", EQUAL: "good", DIFFER: "bad", "out of memory": "bad", "failed": "bad"}.get(verdict(text))
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"


def _categories_table(shown: list[RunView]) -> str:
    """Every category of every run, in full."""
    head = "".join(f"<th>{escape(CATEGORY_NAMES[name])}</th>" for name in CATEGORIES)
    rows = "".join(
        f"<tr><td>{escape(run.label)}</td>" + "".join(f'<td class="number">{_amount(run, name)}</td>' for name in CATEGORIES) + "</tr>"
        for run in shown
    )
    return f"<table><thead><tr><th>run</th>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _amount(run: RunView, name: str) -> str:
    return size(run.split[name]) if name in run.split else MISSING


def _figures(runs: object) -> list[str]:
    """The page's figures, each with its static picture for readers without scripts; one that has no data says why."""
    return [_figure(draw, runs) for draw in (memory_by_category, step_time)]


def _figure(draw: Callable[[object], go.Figure], runs: object) -> str:
    try:
        figure = draw(runs)
    except ValueError as reason:
        return f"<figure><p>{escape(str(reason))}</p></figure>"
    div = figure.to_html(full_html=False, include_plotlyjs=False, default_width="100%", config={"displayModeBar": False, "responsive": True})
    return f'<figure role="img" aria-label="{escape(alt_text(figure), quote=True)}">{div}<noscript>{svg(figure)}</noscript></figure>'


def _flat(values: Mapping, prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (name, text) pairs: `{"a": {"b": 1}}` gives `[("a b", "1")]`; unset ones or empty ones are left out."""
    pairs = []
    for name, value in values.items():
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{label} ")
        elif value not in (None, []):
            pairs.append((label, _shown(name, value)))
    return pairs


def _shown(name: str, value: object) -> str:
    """A setting's value as a reader wants it: lists joined, bytes in MB."""
    if name.endswith(("bytes", "card")) and isinstance(value, int):
        return size(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key.replace('_', ' ')} {_shown(key, part)}" for key, part in value.items())
    return "; ".join(_shown(name, part) for part in value) if isinstance(value, (list, tuple)) else str(value)


def _pairs(pairs: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs) + "</dl>"
