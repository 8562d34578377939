"""What profiled runs lost time to, in words, at the end of a report."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from fsdplab.records import RunRecord


def print_findings(console: Console, records: Sequence[RunRecord]) -> None:
    """At most five findings for every run that was profiled, the costliest first, each with its remedy."""
    from fsdplab.figures.findings import findings_by_run

    for label, found in findings_by_run(records):
        console.print(f"\n[bold]{label}[/]: what a step lost time to, and what fills its memory", highlight=False)
        for number, finding in enumerate(found, start=1):
            console.print(f"  {number}. {finding.title}. {finding.text}", highlight=False, markup=False)
            console.print(f"     -> {finding.remedy}", highlight=False, markup=False, style="dim")
