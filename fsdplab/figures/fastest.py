"""Names the fastest of several runs where that is no noise: titles, tables and pages say the same.

A winner is named only beyond the spread of the steps (records/spread.py), and never where ranks were short of cores.
Simulated times have no chance in them, so among these the shortest wins.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdplab.common.sizes import percent, seconds
from fsdplab.common.words import plural
from fsdplab.figures.view import RunView
from fsdplab.records import Race, core_sentence, known, race

_ALIKE = 1e-3  # of a simulated step: less is rounding


def core_words(runs: Sequence[RunView]) -> str:
    """Return the sentence on runs whose ranks were short of cores, which goes before all else; empty where none was."""
    short, had_enough = [], []
    for run in runs:
        if run.summary.short_of_cores:
            short.append(run)
        elif run.summary.cpu_share is not None:
            had_enough.append(run)
    if not short:
        return ""
    shares = [known(run.summary.cpu_share) for run in short]
    # where all ran on the same busy machine, there is no need to name them
    return core_sentence(min(shares), listed(short) if had_enough else "", most=max(shares))


def fastest_words(runs: Sequence[RunView]) -> str:
    """Say who is fastest of several runs with a timed step, for a title.

    `zero1 is fastest, 342 ms a step`, `no difference between zero1 and zero2 is seen in 4 steps (their medians would
    have to differ by 11 %)`, or why none is named; then the runs that are left out, as they are over the card.
    """
    if core_words(runs):
        return "no run is called fastest, as ranks were short of cores"
    return _fastest(those_that_fit(runs)) + _left_out(runs)


def _fastest(runs: Sequence[RunView]) -> str:
    outcome = race_of(runs)
    leaders = [runs[place] for place in outcome.leaders]
    names = listed(leaders)
    # simulated steps have no spread: those that are equal lead together
    if len(leaders) == 1 or all(run.simulated for run in runs):
        step = seconds(leaders[0].step_median)
        return f"{names} {_is(leaders)} fastest, {step} a step"
    if outcome.within is None:
        return "no run is called fastest, as too few steps were timed (4 are needed)"
    fewest = min(run.summary.step_time_s.count or 0 for run in leaders)
    steps = plural(fewest, "step")
    needed = f"their medians would have to differ by {percent(outcome.within)}"
    return f"no difference between {names} is seen in {steps} ({needed})"


def _left_out(runs: Sequence[RunView]) -> str:
    fitting = those_that_fit(runs)
    over = [run for run in runs if run not in fitting]
    if not over:
        return ""
    return f"; {listed(over)} {_is(over)} over the card and not ranked"


def _is(runs: Sequence[RunView]) -> str:
    return "is" if len(runs) == 1 else "are"


def step_words(runs: Sequence[RunView]) -> str:
    """Return the sentence on the steps of runs: who is fastest, and how long the slowest takes.

    `zero1 is fastest, 342 ms a step; full_shard takes 410 ms`; of one run its step. No ratio: a comparison has one
    baseline, that of its conclusion.
    """
    short_of_cores = core_words(runs)
    if short_of_cores:
        return short_of_cores.rstrip(".")
    if len(runs) == 1:
        return f"{runs[0].label}: {seconds(runs[0].step_median)} a step"
    # of all runs, also of those over the card
    slowest = max(runs, key=lambda run: known(run.step_median))
    fitting = those_that_fit(runs)
    fastest = [fitting[place] for place in race_of(fitting).leaders]
    # the slowest is not told apart from the fastest, so its step is not named
    if slowest in fastest:
        return fastest_words(runs)
    return f"{_fastest(fitting)}; {slowest.label} takes {seconds(slowest.step_median)}{_left_out(runs)}"


def those_that_fit(runs: Sequence[RunView]) -> list[RunView]:
    """Return the runs that fit their card, among which one chooses; all of them where none fits."""
    return [run for run in runs if not run.over_card] or list(runs)


def race_of(runs: Sequence[RunView]) -> Race:
    """Return the race of the runs' steps; of simulated ones the shortest leads."""
    if not all(run.simulated for run in runs):
        return race([run.summary.step_time_s for run in runs])
    steps = [known(run.step_median) for run in runs]
    # equal steps in the order of the runs
    shortest_first = sorted(range(len(runs)), key=lambda place: (steps[place], place))
    least = steps[shortest_first[0]]
    leaders = [place for place in shortest_first if steps[place] <= (1 + _ALIKE) * least]
    return Race(tuple(leaders), within=_ALIKE)


def listed(runs: Sequence[RunView]) -> str:
    """Return `a`, `a and b`, `a, b and c`; of more than four the first three and how many others."""
    names = [run.label for run in runs]
    if len(names) > 4:
        names = [*names[:3], f"{len(names) - 3} others"]
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
