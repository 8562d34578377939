"""What profiled runs lost time to, in words, at the end of a report."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from fsdplab.figures.view import views
from fsdplab.records import RunRecord


def findings_of(records: Sequence[RunRecord]) -> list[dict[str, str]]:
    """The findings of all profiled runs as a page shows them, each under its run's name."""
    from fsdplab.profiling.diagnosis import findings

    return [
        {"title": f"{label}: {finding.title}", "text": finding.text, "remedy": finding.remedy}
        for label, record in _profiled(records)
        for finding in findings(record)
    ]


def _profiled(records: Sequence[RunRecord]) -> list[tuple[str, RunRecord]]:
    """Profiled runs, each under the name that tells it from the others."""
    return [(run.label, record) for run, record in zip(views(records), records) if record.table("breakdown")]


def print_findings(console: Console, records: Sequence[RunRecord]) -> None:
    """At most five findings for every run that was profiled, the costliest first, each with its remedy."""
    from fsdplab.profiling.diagnosis import findings

    for label, record in _profiled(records):
        console.print(f"\n[bold]{label}[/]: what a step lost time to, and what fills its memory", highlight=False)
        for number, finding in enumerate(findings(record), start=1):
            console.print(f"  {number}. {finding.title}. {finding.text}", highlight=False, markup=False)
            console.print(f"     -> {finding.remedy}", highlight=False, markup=False, style="dim")
