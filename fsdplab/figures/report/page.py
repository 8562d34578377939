"""A comparison as one standalone page: opens offline, with the table, figures and what was real in it; of records, with
tabs.

plotly.js is inlined once; everything else stays under a megabyte. The page follows the reader's light or dark setting
and has a switch for lecture rooms.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fsdplab.common.sizes import seconds, size
from fsdplab.figures.fastest import core_words
from fsdplab.figures.plots.memory import memory_by_category, predicted_memory
from fsdplab.figures.plots.steps import step_time
from fsdplab.figures.predicted import gaps
from fsdplab.figures.profile_data import is_record
from fsdplab.figures.report.parts import Attributes, Look, comparison_table, drawn, number_table
from fsdplab.figures.report.rendering import rendered
from fsdplab.figures.report.tabs import tabbed
from fsdplab.figures.table import SHORT, WRAPPED, beside, mood
from fsdplab.figures.view import CATEGORY_NAMES, Runs, RunView, provenance, ranks_and_device, views, with_verdicts
from fsdplab.records import CATEGORIES, RunRecord, drift_sentence

if TYPE_CHECKING:
    from fsdplab.profiling.findings import Finding
    from fsdplab.profiling.tables import TablesOf


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

    records = list(records if records is not None else [run for run in runs or () if is_record(run)])
    runs = records if len(records) == len(comparison["runs"]) else runs  # records know what tells namesakes apart
    summary = _summary(comparison, comparison if runs is None else with_verdicts(runs, comparison))
    shown = views(runs if runs is not None else comparison)
    page = rendered(
        "page.html",
        title=_title(shown),
        plotly_js=get_plotlyjs(),
        setting=_setting(comparison.get("spec") or {}, shown),
        cores=core_words(shown),
        content=tabbed(summary, records, findings, tables_of) if records else summary,
        comparison=json.dumps(comparison, separators=(",", ":")),
    )
    return f"{page}\n"


def _title(runs: Sequence[RunView]) -> str:
    """What the page is about: strategies, run or simulated, or somebody's traces."""
    if runs and all(run.simulated for run in runs):
        return "What each sharding strategy would cost, simulated"
    traced = [run for run in runs if run.traced is not None]
    if not traced or len(traced) < len(runs):
        return "What each sharding strategy costs"
    return f"What the traces of {' and '.join(run.strategy for run in traced)} show"


def _summary(comparison: Mapping[str, Any], source: Runs) -> Markup:
    """The table, the figures that every run has, what was real, what was run and where."""
    shown = views(source)
    measured = any(run.traced is None for run in shown)  # traces know of no memory by category
    return rendered(
        "summary.html",
        comparison=comparison_table(shown, _LOOK),
        drift=drift_sentence(comparison),
        figures=[drawn(draw, source) for draw in ((memory_by_category, step_time) if measured else (step_time,))],
        categories=_categories_table(shown) if measured else None,
        prediction=_prediction(shown, source),
        real=provenance(shown),
        simulated=all(run.simulated for run in shown),
        run=_flat(comparison.get("spec") or {}),
        place=_flat(comparison.get("environment") or {}),
    )


def _prediction(shown: list[RunView], source: Runs) -> dict[str, Any]:
    """What the page says of predictions; nothing where none of the runs has one."""
    known = [run for run in shown if run.predicted_peak]
    if not known:
        return {}
    reasons = [f"{run.label}: not predicted: {why}" for run in shown if (why := run.summary.predicted.why_not)]
    explained = [gap.text for run in known for gap in gaps(run)]
    alike = "Every category is within 10% of what was measured, or less than 0.5% of the peak off."
    return {
        "table": _predictions_table(shown),
        "figure": drawn(predicted_memory, source),
        "lines": [*(explained or [alike]), *reasons],
    }


def _predictions_table(shown: list[RunView]) -> Markup:
    """Peak, bytes and step of every run: as predicted, and in brackets over what was measured."""
    rows = [
        [
            run.label,
            beside(run.predicted_peak, run.peak, size),
            beside(run.formula_bytes, run.summary.comm.bytes_per_step, size),
            beside(run.summary.predicted.step_time_s, run.step_median, seconds),
        ]
        for run in shown
    ]
    caption = "Predicted, and in brackets predicted over measured."
    return number_table(["run", "peak", "sent in a step", "step"], rows, caption)


def _setting(spec: Mapping[str, Any], runs: Sequence[RunView]) -> str:
    """One sentence on what was trained, of the fields that the spec has; of traces, whose they are."""
    if len(runs) == 1 and runs[0].traced is not None:
        return ranks_and_device(list(runs))
    return ", ".join(form.format(spec[name]) for name, form in _SETTING.items() if spec.get(name) is not None)


def _classes(column: str, text: str) -> Attributes:
    """A cell is coloured where it is a verdict, and may break where it is long."""
    names = [mood(text), "long" if column in WRAPPED else "short" if column in SHORT else ""]
    return {"class": " ".join(filter(None, names))} if any(names) else {}


_LOOK = Look(table={}, heading=lambda column: {}, cell=_classes)


def _categories_table(shown: list[RunView]) -> Markup:
    """Every category of every run, in full."""
    rows = [[run.label, *(size(run.split.get(name)) for name in CATEGORIES)] for run in shown]
    return number_table(["run", *(CATEGORY_NAMES[name] for name in CATEGORIES)], rows)


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Settings as (name, text) pairs, without those that are not set: `{"a": {"b": 1}}` gives `[("a b", "1")]`."""
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
