"""A comparison as one standalone page: opens offline, with the table, figures and what was real in it; of records, with
tabs.

plotly.js is inlined once; everything else stays under a megabyte. The page follows the reader's light or dark setting
and has a switch for lecture rooms.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

from fsdplab.common.sizes import size
from fsdplab.common.words import MISSING
from fsdplab.figures.plots.memory import memory_by_category
from fsdplab.figures.plots.steps import step_time
from fsdplab.figures.profile_data import is_record
from fsdplab.figures.report.script import PAGE, PLOTS, STYLE
from fsdplab.figures.report.tabs import drawn, tabbed
from fsdplab.figures.table import AGREE, COLUMNS, DIFFER, EQUAL, LEGEND, cells, verdict
from fsdplab.figures.view import CATEGORY_NAMES, Runs, RunView, provenance, views
from fsdplab.records import CATEGORIES, RunRecord

if TYPE_CHECKING:
    from fsdplab.profiling.diagnosis import Finding


def comparison_page(
    comparison: Mapping[str, Any],
    runs: Sequence[RunRecord | RunView] | None = None,
    findings: Sequence[Finding | Mapping[str, Any]] = (),
    records: Sequence[RunRecord] | None = None,
) -> str:
    """The page of a comparison (the dict that `--json` writes); `runs` adds what only records know, such as statuses.

    With records (as `runs`, or as `records` beside RunViews) the page has tabs: timeline, exposed time, memory,
    traffic, Pareto, difference, and `findings` (objects or dicts with `title`, `text`, `remedy`). Example:
    `Path("compare.html").write_text(comparison_page(comparison_json(records, reference), records), encoding="utf-8")`.
    """
    records = list(records if records is not None else [run for run in runs or () if is_record(run)])
    runs = records if len(records) == len(comparison["runs"]) else runs  # records know what tells namesakes apart
    source = comparison if runs is None else with_verdicts(runs, comparison)
    summary = _summary(comparison, source)
    body = [
        '<button id="switch" type="button">dark page</button>',
        "<h1>What each sharding strategy costs</h1>",
        f'<p class="soft">{escape(_setting(comparison.get("spec") or {}))}</p>',
        tabbed(summary, records, findings) if records else summary,
    ]
    return _document("\n".join(body), comparison)


def with_verdicts(runs: Sequence[RunRecord | RunView], comparison: Mapping[str, Any]) -> list[RunView]:
    """The runs as figures read them; where only the comparison judged their losses, with its verdict."""
    entries = comparison.get("runs") or []
    judged = [entry.get("matches_reference") for entry in entries] if len(entries) == len(runs) else [None] * len(runs)
    return [
        run if run.matches is not None else replace(run, matches=matches) for run, matches in zip(views(runs), judged)
    ]


def _summary(comparison: Mapping[str, Any], source: Runs) -> str:
    """The table, the figures that every run has, what was real, what was run and where."""
    shown = views(source)
    return "\n".join([
        f'<div class="wide">{_table(shown)}</div>',
        *(drawn(draw, source) for draw in (memory_by_category, step_time)),
        "<h2>The peak by category</h2>",
        f'<div class="wide">{_categories_table(shown)}</div>',
        "<h2>What was real here</h2>",
        _pairs(provenance(shown)),
        f'<div class="beside"><section><h2>What was run</h2>{_pairs(_flat(comparison.get("spec") or {}))}</section>',
        f'<section><h2>Where it ran</h2>{_pairs(_flat(comparison.get("environment") or {}))}</section></div>',
    ])  # fmt: skip


def _document(body: str, comparison: Mapping[str, Any]) -> str:
    """The whole HTML document; the comparison itself is embedded as JSON so that the page carries its data."""
    from plotly.offline import get_plotlyjs

    data = json.dumps(comparison, separators=(",", ":")).replace("<", "\\u003c")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>fsdplab'
        f" comparison</title><style>{STYLE}</style>"
    )
    return (
        "<!doctype html>\n<html"
        f' lang="en"><head>{head}<script>{get_plotlyjs()}</script></head>\n<body>\n{body}\n<script'
        f' type="application/json" id="comparison">{data}</script>\n<script>{PLOTS}{PAGE}</script>\n</body></html>\n'
    )


def _setting(spec: Mapping[str, Any]) -> str:
    """One sentence on what was trained, of the fields that the spec has."""
    words = {
        "model": "model {}",
        "world_size": "{} ranks",
        "batch_size": "batch {} a rank",
        "sequence_length": "{} tokens a sequence",
        "steps": "{} steps",
        "seed": "seed {}",
    }
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
        f"<tr><td>{escape(run.label)}</td>"
        + "".join(f'<td class="number">{_amount(run, name)}</td>' for name in CATEGORIES)
        + "</tr>"
        for run in shown
    )
    return f"<table><thead><tr><th>run</th>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _amount(run: RunView, name: str) -> str:
    return size(run.split[name]) if name in run.split else MISSING


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (name, text) pairs: `{"a": {"b": 1}}` gives `[("a b", "1")]`; unset ones or empty ones are
    left out.
    """
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
