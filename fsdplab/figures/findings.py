"""Findings of several runs, each with its run's unique label: for pages, widgets and the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from fsdplab.figures.view import views
from fsdplab.profiling.findings import Finding, findings
from fsdplab.records import RunRecord


def findings_by_run(records: Sequence[RunRecord]) -> list[tuple[str, list[Finding]]]:
    """(label, findings) of every profiled run, in order."""
    return [(run.label, findings(record)) for run, record in zip(views(records), records) if record.table("breakdown")]


def costliest(records: Sequence[RunRecord], most: int = 3) -> list[tuple[str, Finding]]:
    """(label, finding) of the costliest causes over all runs, each of another kind and another run."""
    found = [(label, finding) for label, own in findings_by_run(records) for finding in own if finding.seconds]
    chosen: list[tuple[str, Finding]] = []
    for label, finding in sorted(found, key=lambda each: -each[1].seconds):
        if all(label != taken and finding.kind != other.kind for taken, other in chosen):
            chosen.append((label, finding))
    return chosen[:most]
