"""The answer of a comparison in one sentence, before any table: what sharding saves, what it sends, what that costs.

A run is compared with the baseline in memory, bytes sent and time. Time is the steady card's where both runs have it,
since that is the same on every machine; else it is the measured step, and then a difference is claimed only beyond its
spread.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdplab.common.sizes import seconds, size
from fsdplab.figures.fastest import core_words
from fsdplab.figures.view import RunView
from fsdplab.records import known, race
from fsdplab.sessions.steady_card import GIGAFLOPS

_ALIKE = 0.005  # a relative difference below this is none
_AGREES = 0.05  # of a step: simulated and measured steps nearer than this agree


def conclusion(runs: Sequence[RunView]) -> str:
    """One sentence on what the most sharded run saves and costs beside the baseline; of a single run, what it takes.

    `FSDP (full_shard) needs 232 MB a rank instead of 373 MB (38 % less), sends 1.5 times as much and hides 65 % of it,
    and its step takes 8 % longer.` Empty where there is nothing to say.
    """
    base, sharded = _baseline(runs), _most_sharded(runs)
    if base is None or sharded is None:
        return ""
    if base is sharded:
        return _sentence(_name(base), [_memory(base), _sent(base), _time(base)])
    parts = [_memory_beside(sharded, base), _sent_beside(sharded, base), _time_beside(sharded, base)]
    return _sentence(_name(sharded), parts)


def clock_words(runs: Sequence[RunView]) -> str:
    """What the simulated step is, and how far the measured ones are from it and why; empty without a simulated step."""
    both = [run for run in runs if run.steady.step_time_s and run.step_median]
    if not any(run.steady.step_time_s for run in runs):
        return ""
    told = f"Simulated: the steady card computes {GIGAFLOPS:g} GFLOP/s behind the same link, everywhere alike."
    if not both:
        return told
    farthest = max(both, key=lambda run: abs(_ratio(run) - 1))
    return f"{told} {why_it_differs(farthest)}".strip()


def why_it_differs(run: RunView) -> str:
    """One sentence on the measured step of a run beside its simulated one, with the largest reason; "" without both,
    and where ranks were short of cores, which is said first of all.

    >>> from fsdplab.records import Spread, Summary
    >>> from fsdplab.records.summary import Steady
    >>> why_it_differs(RunView("zero1", "lab", 2, Summary(Spread(0.78), steady=Steady(0.765, 0.1, 0.8))))
    'The measured steps agree with it within 2 %.'
    """
    if not run.steady.step_time_s or not run.step_median or core_words([run]):
        return ""
    off = _ratio(run) - 1
    if abs(off) <= max(_AGREES, run.summary.step_time_s.scatter or 0):
        return f"The measured steps agree with it within {max(1, round(100 * abs(off) + 0.49))} %."
    told = f"The measured step of {run.label} is {abs(off):.0%} {'longer' if off > 0 else 'shorter'}".replace("%", " %")
    reasons = _reasons(run)
    return f"{told}: {max(reasons, key=lambda reason: reasons[reason])}."


def change_words(runs: Sequence[RunView]) -> str:
    """The change to the most sharded run that gains most on the steady card; empty where none is known.

    `Most valuable change to full_shard: compute and send in bf16, with fp32 masters: 50 % more tokens/s (simulated),
    192 MB instead of 232 MB (predicted).`
    """
    run = _most_sharded(runs)
    change = None if run is None else run.summary.change
    if run is None or change is None or not change.words:
        return ""
    memory = f", {size(change.peak_bytes)} instead of {size(run.peak)} (predicted)" if change.peak_bytes else ""
    gain = f"{100 * known(change.gain):.0f} % more tokens/s (simulated)"
    return f"Most valuable change to {run.label}: {change.words}: {gain}{memory}."


def _reasons(run: RunView) -> dict[str, float]:
    """What may explain the difference, with the seconds that it explains."""
    comm, excess = run.summary.comm, known(run.step_median) - known(run.steady.step_time_s)
    copying, waiting = comm.copying_s or 0.0, comm.waiting_s or 0.0
    rest = excess - copying - waiting if comm.exposed_s is not None else excess
    longer = "longer" if rest > 0 else "less time"
    sign = 1 if excess > 0 else -1
    return {
        f"packing and unpacking take {seconds(copying)}, and the steady card has none": sign * copying,
        f"ranks wait for each other for {seconds(waiting)}": sign * waiting,
        f"computing, and Python between the operators, take {longer} than on the steady card": sign * rest,
    }


def _ratio(run: RunView) -> float:
    return known(run.step_median) / known(run.steady.step_time_s)


# ---- which two runs


def _baseline(runs: Sequence[RunView]) -> RunView | None:
    """The lab's unsharded run, else another engine's, else the first run."""
    plain = [run for run in runs if run.strategy == "no_shard" and run.engine != "twin"]
    return min(plain or [run for run in runs if run.engine != "twin"][:1], key=_own_engine, default=None)


def _most_sharded(runs: Sequence[RunView]) -> RunView | None:
    """The first run of full sharding, of the lab's own engine if there is one; else the one of least memory."""
    full = [run for run in runs if run.strategy in ("full_shard", "hybrid_shard") and run.engine != "twin"]
    if full:
        return min(full, key=_own_engine)
    others = [run for run in runs if run.engine != "twin" and run is not _baseline(runs)]
    return min(others, key=lambda run: run.peak or float("inf"), default=_baseline(runs))


def _own_engine(run: RunView) -> bool:
    return run.engine != "lab"


# ---- the parts of the sentence


def _name(run: RunView) -> str:
    return "FSDP (full_shard)" if run.label == "full_shard" else run.label


def _memory(run: RunView) -> str:
    return f"needs {size(run.peak)} a rank" if run.peak else ""


def _sent(run: RunView) -> str:
    sent = run.summary.comm.bytes_per_step
    return f"sends {size(sent)} a step{_hidden(run, [run])}" if sent else ""


def _hidden(run: RunView, compared: Sequence[RunView]) -> str:
    """The hidden part by the clock that all compared runs have."""
    part = run.steady.overlap if all(each.steady.step_time_s for each in compared) else run.summary.comm.overlap
    return "" if part is None else f" and hides {part:.0%} of it".replace("%", " %")


def _time(run: RunView) -> str:
    if run.steady.step_time_s:
        return f"its step takes {seconds(run.steady.step_time_s)} (simulated)"
    return f"its step takes {seconds(run.step_median)}" if run.step_median else ""


def _memory_beside(run: RunView, base: RunView) -> str:
    if not run.peak or not base.peak:
        return _memory(run)
    change = run.peak / base.peak - 1
    if abs(change) < _ALIKE:
        return f"needs {size(run.peak)} a rank, as {base.label} does"
    fits = base.over_card and not run.over_card
    over = f", and {base.label} is over the card of {size(base.card)}" if fits else ""
    return f"needs {size(run.peak)} a rank instead of {size(base.peak)} ({_percent(change, 'more', 'less')}{over})"


def _sent_beside(run: RunView, base: RunView) -> str:
    ours, theirs = run.summary.comm.bytes_per_step, base.summary.comm.bytes_per_step
    if not ours or not theirs:
        return _sent(run)
    times = ours / theirs
    told = "sends as much" if abs(times - 1) < _ALIKE else f"sends {times:.2g} times as much"
    return told + _hidden(run, [run, base])


def _time_beside(run: RunView, base: RunView) -> str:
    if run.steady.step_time_s and base.steady.step_time_s:
        return _step_words(run.steady.step_time_s / base.steady.step_time_s - 1)
    if not run.step_median or not base.step_median:
        return _time(run)
    if core_words([run, base]):
        return ""
    if len(race([run.summary.step_time_s, base.summary.step_time_s]).leaders) > 1:
        return "no difference of their steps is seen"
    return _step_words(run.step_median / base.step_median - 1)


def _step_words(change: float) -> str:
    return "its step takes as long" if abs(change) < _ALIKE else f"its step is {_percent(change, 'longer', 'shorter')}"


def _percent(change: float, more: str, less: str) -> str:
    return f"{100 * abs(change):.0f} % {more if change > 0 else less}"


def _sentence(name: str, parts: Sequence[str]) -> str:
    said = [part for part in parts if part]
    if not said:
        return ""
    if len(said) == 1 and said[0].startswith(("its ", "no ")):
        return f"{name}: {said[0]}."
    return f"{name} {', '.join(said[:-1])}{', and ' if len(said) > 1 else ''}{said[-1]}."
