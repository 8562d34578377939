"""Where one run's step goes: computing, hidden and exposed communication by cause, and idle time by cause; below it the
part of the step that the diagnosis names.
"""

from __future__ import annotations

from fsdplab.common.sizes import percent, seconds
from fsdplab.figures import profile_data as profile
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import MS, duration
from fsdplab.figures.style import ALARM, EXPOSED_COLOURS, STEP_COLOURS, titled
from fsdplab.profiling.diagnosis import diagnosis, named_finding
from fsdplab.profiling.findings import Finding, findings
from fsdplab.profiling.step_facts import StepFacts, step_facts
from fsdplab.profiling.tables.bandwidth import WORDS
from fsdplab.records import PARTS_OF_EXPOSED, RunRecord

_STEP = "the step"
_IDLE_COLOURS = ("#cfd3d9", "#e3c36a", "#b8c9a3", "#d8b4d4", "#a9c4d6", "#e0d2bd")
_LOADING_COLUMN = "data_loading_ns"
_LOADING = f"idle: {WORDS[_LOADING_COLUMN]}"
_LOADING_COLOUR = "#c78a2c"
_ALIKE = 0.002  # of a step: a smaller part is not drawn


def step_causes(record: RunRecord) -> go.Figure:
    """A bar of the mean step of the rank that is exposed longest, by cause, and a red one of what the diagnosis names.

    ValueError with the remedy where the run was not profiled. Of a step of 619 ms in which a GPU waits for its loader
    for 347: a part "idle: data loading" of 347 ms, and below it the finding's bar of the same length.
    """
    profile.rows_of(record, "breakdown")
    facts, listed = step_facts(record), findings(record)
    parts = _parts(facts)
    whole = 1e3 * facts.step_s
    fault = _marked(listed, facts)
    ends = {_STEP: f"<b>{seconds(facts.step_s)}</b>"}
    cost = 0.0
    if fault is not None:
        cost = min(whole, 1e3 * fault.seconds)
        ends[_named(fault)] = f"<b>{seconds(fault.seconds)}</b> ({percent(fault.seconds / facts.step_s)} of a step)"
    rows = len(ends)
    drawn = [Part(name, colour, [length, 0.0][:rows]) for name, colour, length in parts]
    if fault is not None:
        drawn.append(Part("what the diagnosis names", ALARM, [0.0, cost]))
    figure = stacked_bars(ends, drawn, "one step (ms)", "%{x:.3f} ms", lambda ms: duration(ms * MS))
    told = ", ".join(f"{name} {duration(length * MS)}" for name, _, length in parts)
    costs = f"; {_named(fault)} costs {seconds(fault.seconds)}" if fault is not None else ""
    title = diagnosis(record).rstrip(".") or f"A step of {profile.label(record)} takes {seconds(facts.step_s)}"
    how = "mean of the profiled steps of the rank exposed longest"
    if facts.step_s < facts.worst.step_ns / 1e9:
        how += f" ({duration(facts.worst.step_ns)}), drawn as long as a timed step"
    where = profile.conditions([record], how)
    alt = f"A bar of one step of {seconds(facts.step_s)}: {told}{costs}."
    return titled(figure, title, where, alt, 86 + 43 * rows)


def _marked(listed: list[Finding], facts: StepFacts) -> Finding | None:
    """What the diagnosis names, where it costs a part of the step: what fills memory has no place on its axis."""
    named = named_finding(facts, listed)
    if named is None or named.seconds < _ALIKE * facts.step_s or named.of not in ("exposed", "step"):
        return None
    return named


def _named(finding: Finding) -> str:
    """The finding's kind in words, and whose it is."""
    whose = "" if finding.rank is None or not finding.is_fault else f", rank {finding.rank}"
    return f"{finding.kind.replace('_', ' ')}{whose}"


def _parts(facts: StepFacts) -> list[tuple[str, str, float]]:
    """(name, colour, ms) of each part of the step; together they are a timed step, as findings claim parts of it.

    The profiler makes all of a step longer but for loading, which is as long as in the timed steps.
    """
    worst, loaded_ms = facts.worst, _loaded_ms(facts)
    idle = _idle(facts)
    profiled_ns = sum(ns for name, _, ns in idle if name == _LOADING)
    parts = [
        ("computing alone", STEP_COLOURS["compute only"], worst.compute_only_ns),
        ("communication hidden under computing", STEP_COLOURS["overlapped"], worst.overlapped_ns),
        *_exposed(facts),
        *(part for part in idle if part[0] != _LOADING),
    ]
    scale = (1e3 * facts.step_s - loaded_ms) / (worst.step_ns - profiled_ns)
    shown = [*parts[:2], (_LOADING, _LOADING_COLOUR, loaded_ms / scale), *parts[2:]]
    return [(name, colour, scale * ns) for name, colour, ns in shown if scale * ns >= _ALIKE * 1e3 * facts.step_s]


def _loaded_ms(facts: StepFacts) -> float:
    """How long a step waits for its data: as the loop counted it, else as the trace shows it."""
    shown_ns = sum(ns for name, _, ns in _idle(facts) if name == _LOADING)
    counted = facts.activities.get("loading")
    if not shown_ns or counted is None:
        return shown_ns / MS * min(1.0, facts.step_s * 1e9 / facts.worst.step_ns)
    return min(1e3 * counted.seconds, 0.99e3 * facts.step_s)


def _exposed(facts: StepFacts) -> list[tuple[str, str, float]]:
    """Exposed communication by cause; together where a record of before does not tell the cause."""
    worst = facts.worst
    if worst.on_link_ns is None:
        return [("exposed communication", STEP_COLOURS["exposed"], worst.exposed_ns)]
    return [
        (f"exposed: {name}", colour, getattr(worst, column) or 0.0)
        for (name, colour), column in zip(EXPOSED_COLOURS.items(), PARTS_OF_EXPOSED)
    ]


def _idle(facts: StepFacts) -> list[tuple[str, str, float]]:
    """Time with neither computing nor communication, by cause: the largest first."""
    scale = facts.worst.other_ns / facts.other_s if facts.other_s else 0.0
    causes = {name: seconds_ * scale for name, seconds_ in facts.idle_s.items()}
    if not causes:
        return [("neither", STEP_COLOURS["other"], facts.worst.other_ns)]
    loading = causes.pop(_LOADING_COLUMN, 0.0)
    ordered = sorted(causes.items(), key=lambda cause: -cause[1])
    listed = [(f"idle: {WORDS.get(name, name)}", colour, ns) for (name, ns), colour in zip(ordered, _IDLE_COLOURS * 2)]
    return [(_LOADING, _LOADING_COLOUR, loading), *listed]
