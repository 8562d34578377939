"""A comparison as one standalone page: opens offline, with the table, figures and what was real in it; of records, with
tabs.

plotly.js is inlined once; everything else stays under a megabyte. The page follows the reader's light or dark setting
and has a switch for lecture rooms.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fsdplab.common.sizes import seconds, size
from fsdplab.figures.fastest import core_words
from fsdplab.figures.plots.memory import memory_by_category, predicted_memory
from fsdplab.figures.plots.steps import step_time
from fsdplab.figures.predicted import gaps
from fsdplab.figures.report.parts import comparison_table, drawn, number_table, rendered
from fsdplab.figures.report.tabs import tabbed
from fsdplab.figures.style import on_page
from fsdplab.figures.table import COLUMNS, SHORT, WRAPPED, beside, mood
from fsdplab.figures.view import CATEGORY_NAMES, Runs, RunView, provenance, ranks_and_device, views, with_verdicts
from fsdplab.records import CATEGORIES, RunRecord, drift_sentence

if TYPE_CHECKING:
    from fsdplab.profiling.findings import Finding
    from fsdplab.profiling.tables import TablesOf


_WIDTH = 1100  # pixels of a page's figures in a window of 1280
# what was trained, in the order of the sentence
_SETTING = {
    "model": "model {}", "world_size": "{} ranks", "batch_size": "batch {} a rank",
    "sequence_length": "{} tokens a sequence", "steps": "{} steps", "seed": "seed {}",
}  # fmt: skip


def comparison_page(
    comparison: Mapping[str, Any],
    runs: Sequence[RunRecord | RunView] | None = None,
    findings: Sequence[Finding | Mapping[str, Any]] = (),
    records: Sequence[RunRecord] | None = None,
    tables_of: TablesOf | None = None,
) -> str:
    """The page of a comparison (the dict that `--json` writes); `runs` adds what only records know, such as statuses.

    With records (as `runs`, or as `records` beside RunViews) the page has tabs: timeline, exposed time, memory,
    traffic, Pareto, difference, and `findings` (objects or dicts with `title`, `text`, `remedy`). `tables_of` gives the
    tables of a record's traces where they are made already. Example:
    `Path("compare.html").write_text(comparison_page(comparison_json(records, reference), records), encoding="utf-8")`.
    """
    from plotly.offline import get_plotlyjs

    records = list(records if records is not None else [run for run in runs or () if isinstance(run, RunRecord)])
    runs = records if len(records) == len(comparison["runs"]) else runs  # records know what tells namesakes apart
    shown = views(runs if runs is not None else comparison)
    with on_page(_WIDTH):
        summary = _summary(comparison, comparison if runs is None else with_verdicts(runs, comparison))
        content = tabbed(summary, records, findings, tables_of) if records else summary
    page = rendered(
        "page.html",
        title=_title(shown),
        plotly_js=get_plotlyjs(),
        setting=_setting(comparison.get("spec") or {}, shown),
        cores=core_words(shown),
        content=content,
        comparison=json.dumps(comparison, separators=(",", ":")),
    )
    return f"{page}\n"


def _title(runs: Sequence[RunView]) -> str:
    """What the page is about: strategies, run or simulated, or somebody's traces."""
    if runs and all(run.simulated for run in runs):
        return "What each sharding strategy would cost, simulated"
    if runs and all(run.traced for run in runs):
        return f"What the traces of {' and '.join(run.strategy for run in runs)} show"
    return "What each sharding strategy costs"


def _summary(comparison: Mapping[str, Any], source: Runs) -> Markup:
    shown = views(source)
    measured = not all(run.traced for run in shown)  # traces know of no memory by category
    categories = [[run.label, *(size(run.split.get(name)) for name in CATEGORIES)] for run in shown]
    return rendered(
        "summary.html",
        comparison=comparison_table(shown, _look),
        drift=drift_sentence(comparison),
        figures=[drawn(draw, source) for draw in ((memory_by_category, step_time) if measured else (step_time,))],
        categories=measured and number_table(["run", *map(CATEGORY_NAMES.__getitem__, CATEGORIES)], categories),
        prediction=_prediction(shown, source),
        real=provenance(shown),
        simulated=all(run.simulated for run in shown),
        run=_flat(comparison.get("spec") or {}),
        place=_flat(comparison.get("environment") or {}),
    )


def _look(place: int, text: str | None) -> dict[str, str]:
    """The class of a cell of the comparison: coloured where it is a verdict, and it may break where it is long."""
    column = COLUMNS[place]
    names = [] if text is None else [mood(text), "long" * (column in WRAPPED), "short" * (column in SHORT)]
    return {"class": " ".join(filter(None, names))} if any(names) else {}


def _prediction(shown: list[RunView], source: Runs) -> dict[str, Any]:
    known = [run for run in shown if run.predicted_peak]
    if not known:
        return {}
    reasons = [f"{run.label}: not predicted: {why}" for run in shown if (why := run.summary.predicted.why_not)]
    explained = [gap.text for run in known for gap in gaps(run)]
    alike = "Every category is within 10% of what was measured, or less than 0.5% of the peak off."
    rows = [
        [
            run.label,
            beside(run.predicted_peak, run.peak, size),
            beside(run.summary.formula_bytes_per_step, run.summary.comm.bytes_per_step, size),
            beside(run.summary.predicted.step_time_s, run.step_median, seconds),
        ]
        for run in shown
    ]
    caption = "Predicted; (1.00) is predicted / measured."
    return {
        "table": number_table(["run", "peak", "sent in a step", "step"], rows, caption),
        "figure": drawn(predicted_memory, source),
        "lines": [*(explained or [alike]), *reasons],
    }


def _setting(spec: Mapping[str, Any], runs: Sequence[RunView]) -> str:
    """One sentence on what was trained, of the fields that the spec has; of traces, whose they are."""
    if len(runs) == 1 and runs[0].traced:
        return ranks_and_device(list(runs))
    return ", ".join(form.format(spec[name]) for name, form in _SETTING.items() if spec.get(name) is not None)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings as (name, text) pairs, without those that are not set: `{"a": {"b": 1}}` gives `("a b", "1")`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name} ")
        elif value not in (None, []):
            yield f"{prefix}{name}".replace("_", " "), _shown(name, value)


def _shown(name: str, value: object) -> str:
    """A setting's value as a reader wants it: lists joined, bytes in MB."""
    if name.endswith(("bytes", "card")) and isinstance(value, int):
        return size(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key.replace('_', ' ')} {_shown(key, part)}" for key, part in value.items())
    return "; ".join(_shown(name, part) for part in value) if isinstance(value, (list, tuple)) else str(value)
