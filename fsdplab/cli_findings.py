"""What profiled runs lost time to, in words, at the end of a report."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from fsdplab.figures.view import view
from fsdplab.records import RunRecord


def print_findings(console: Console, records: Sequence[RunRecord]) -> None:
    """At most five findings for every run that was profiled, the costliest first, each with its remedy."""
    from fsdplab.profiling.diagnosis import findings

    for record in records:
        if not record.table("breakdown"):
            continue
        console.print(f"\n[bold]{view(record).label}[/]: what a step lost time to, and what fills its memory", highlight=False)
        for number, finding in enumerate(findings(record), start=1):
            console.print(f"  {number}. {finding.title}. {finding.text}", highlight=False, markup=False)
            console.print(f"     -> {finding.remedy}", highlight=False, markup=False, style="dim")
