"""Where one run's step goes: computing, hidden and exposed communication by cause, and idle time by cause; below it the
part of the step that the diagnosis names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fsdplab.common.sizes import percent, seconds
from fsdplab.figures import profile_data as profile
from fsdplab.figures.axis_units import time_unit
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import duration
from fsdplab.figures.style import ALARM, EXPOSED_COLOURS, STEP_COLOURS, titled
from fsdplab.profiling.diagnosis import diagnosis, named_finding
from fsdplab.profiling.findings import Finding, findings
from fsdplab.profiling.step_facts import StepFacts, step_facts
from fsdplab.profiling.tables.bandwidth import WORDS
from fsdplab.records import PARTS_OF_EXPOSED, RunRecord

_STEP = "the step"
_FAULT = "what the diagnosis names"
IDLE_COLOURS = ("#c6ccd8", "#e4e98b", "#2b7f35", "#ac91a2", "#3d545f", "#4c391c")
_LOADING_COLUMN = "data_loading_ns"
_LOADING = f"idle: {WORDS[_LOADING_COLUMN]}"
LOADING_COLOUR = "#f8960f"
_ALIKE = 0.002  # of a step: a smaller part is not drawn


class _Cause(NamedTuple):
    """A part of the step: what it was spent on, its colour, and its length in ns or in seconds."""

    name: str
    colour: str
    length: float


def step_causes(record: RunRecord) -> go.Figure:
    """Draw a bar of the mean step of the rank that is exposed longest, by cause, and a red one of what the diagnosis
    names.

    ValueError with the remedy where the run was not profiled. Of a step of 619 ms in which a GPU waits for its loader
    for 347: a part "idle: data loading" of 347 ms, and below it the finding's bar of the same length.
    """
    profile.rows_of(record, "breakdown")  # raises the error with the remedy
    facts = step_facts(record)
    causes = _causes(facts)
    fault = _marked(findings(record), facts)
    figure = _bars(causes, fault, facts)
    title = diagnosis(record).rstrip(".") or f"A step of {profile.label(record)} takes {seconds(facts.step_s)}"
    how = "mean of the profiled steps of the rank exposed longest"
    # the profiler made its steps longer than the timed ones, and the bar has a timed one's length
    if facts.step_s < facts.worst.step_ns / 1e9:
        how += f" ({duration(facts.worst.step_ns)}), drawn as long as a timed step"
    where = profile.conditions([record], how)
    rows = 1 if fault is None else 2
    return titled(figure, title, where, _alt(causes, fault, facts), 86 + 43 * rows)


def _bars(causes: Sequence[_Cause], fault: Finding | None, facts: StepFacts) -> go.Figure:
    """Draw the step's bar, and below it the one of what the diagnosis names, if it names something."""
    unit = time_unit([facts.step_s])
    ends = {_STEP: f"<b>{seconds(facts.step_s)}</b>"}
    if fault is None:
        parts = [Part(cause.name, cause.colour, [unit.of(cause.length)]) for cause in causes]
    else:
        share = percent(fault.seconds / facts.step_s)
        ends[_named(fault)] = f"<b>{seconds(fault.seconds)}</b> ({share} of a step)"
        # a finding is drawn at most as long as the step
        cost_s = min(facts.step_s, fault.seconds)
        # the lengths in the step's bar and in that of the fault
        parts = [Part(cause.name, cause.colour, [unit.of(cause.length), 0.0]) for cause in causes]
        parts.append(Part(_FAULT, ALARM, [0.0, unit.of(cost_s)]))
    axis = f"one step ({unit.symbol})"
    figure = stacked_bars(ends, parts, axis, unit.hover("x"), lambda length: seconds(length * unit.size))
    # hatched, as its red is near that of exposed communication
    hatch = dict(shape="/", size=7, solidity=0.25)
    return figure.update_traces(marker_pattern=hatch, selector=dict(name=_FAULT))


def _alt(causes: Sequence[_Cause], fault: Finding | None, facts: StepFacts) -> str:
    parts = []
    for cause in causes:
        length = seconds(cause.length)
        parts.append(f"{cause.name} {length}")
    words = ", ".join(parts)
    if fault is not None:
        words += f"; {_named(fault)} costs {seconds(fault.seconds)}"
    return f"A bar of one step of {seconds(facts.step_s)}: {words}."


def _marked(listed: list[Finding], facts: StepFacts) -> Finding | None:
    """Return what the diagnosis names if it costs a part of the step; what fills memory has no place on its axis."""
    named = named_finding(facts, listed)
    # findings on memory or on the machine cost no part of the step
    if named is None or named.of not in ("exposed", "step"):
        return None
    if named.seconds < _ALIKE * facts.step_s:
        return None
    return named


def _named(finding: Finding) -> str:
    """Return the finding's kind in words, and whose it is."""
    kind = finding.kind.replace("_", " ")
    if finding.rank is None or not finding.is_fault:
        return kind
    return f"{kind}, rank {finding.rank}"


# ---- the parts of the step


def _causes(facts: StepFacts) -> list[_Cause]:
    """Return each part of the step, in seconds; together they are a timed step, as findings claim parts of it.

    The profiler makes all of a step longer but for loading, which is as long as in the timed steps.
    """
    worst = facts.worst
    loading, idle = _idle(facts)
    loaded_s = _loaded_s(facts)
    # what is left of the step beside loading, over its length in the profiled step:
    # profiled 800 ms with 300 of loading, timed 700 ms: the other 500 ms shrink to 400, so 0.8e-9 s for each ns
    rest_s = facts.step_s - loaded_s
    scale = rest_s / (worst.step_ns - loading.length)
    causes = [
        _Cause("computing alone", STEP_COLOURS["compute only"], worst.compute_only_ns),
        _Cause("communication hidden under computing", STEP_COLOURS["overlapped"], worst.overlapped_ns),
        # divided here, since all lengths are multiplied by `scale` below
        loading._replace(length=loaded_s / scale),
        *_exposed(facts),
        *idle,
    ]
    drawn = []
    for cause in causes:
        length_s = scale * cause.length
        # parts of less than 0.2 % of the step would only lengthen the legend
        if length_s >= _ALIKE * facts.step_s:
            drawn.append(cause._replace(length=length_s))
    return drawn


def _loaded_s(facts: StepFacts) -> float:
    """Return how long a step waits for its data: as the loop counted it, else as the trace shows it."""
    loading, _ = _idle(facts)
    counted = facts.activities.get("loading")
    if not loading.length or counted is None:
        shrunk = min(1.0, facts.step_s * 1e9 / facts.worst.step_ns)  # a profiled step may be the longer one
        return loading.length / 1e9 * shrunk
    # at most 99 % of the step, so that something is left to scale
    return min(counted.seconds, 0.99 * facts.step_s)


def _exposed(facts: StepFacts) -> list[_Cause]:
    """Return exposed communication by cause, in ns; together where a record of before does not tell the cause."""
    worst = facts.worst
    if worst.on_link_ns is None:
        return [_Cause("exposed communication", STEP_COLOURS["exposed"], worst.exposed_ns)]
    causes = []
    # on the link, copying, waiting for a peer, waiting for a core
    for (name, colour), column in zip(EXPOSED_COLOURS.items(), PARTS_OF_EXPOSED):
        length = getattr(worst, column) or 0.0
        causes.append(_Cause(f"exposed: {name}", colour, length))
    return causes


def _idle(facts: StepFacts) -> tuple[_Cause, list[_Cause]]:
    """Return (waiting for data, the other time with neither computing nor communication by cause, the largest first),
    in ns.
    """
    other_ns = facts.worst.other_ns
    # without the table `idle`, as in records of earlier versions, its causes are unknown
    if not facts.idle_s:
        neither = _Cause("neither", STEP_COLOURS["other"], other_ns)
        return _Cause(_LOADING, LOADING_COLOUR, 0), [neither]
    # `idle_s` is in seconds of a timed step, and the lengths here are ns of a profiled one
    scale = other_ns / facts.other_s if facts.other_s else 0.0
    by_column = {column: cause_s * scale for column, cause_s in facts.idle_s.items()}
    loaded = by_column.pop(_LOADING_COLUMN, 0.0)
    loading = _Cause(_LOADING, LOADING_COLOUR, loaded)
    ordered = sorted(by_column, key=lambda column: -by_column[column])
    others = []
    # of seven causes beside loading the shortest has the first colour again
    for column, colour in zip(ordered, IDLE_COLOURS * 2):
        words = WORDS.get(column, column)
        others.append(_Cause(f"idle: {words}", colour, by_column[column]))
    return loading, others
