"""The answer of a comparison, before any table: what sharding saves, what it sends, what that costs; then how far
predictions are off, and the costliest findings.

A run is compared with the baseline in memory, bytes sent and time. Time is first the steady card's where both runs have
it, since that is the same on every machine, and said to be simulated. Of measured steps a difference is claimed only
beyond their spread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdplab.common.names import CATEGORIES, SAVES_MOST, UNSHARDED, strategies_that
from fsdplab.common.sizes import percent, seconds, size
from fsdplab.figures.fastest import core_words
from fsdplab.figures.table import predicted_step, step_of
from fsdplab.figures.view import CATEGORY_NAMES, RunView, emulated_links, views
from fsdplab.profiling.findings import Finding, findings
from fsdplab.records import RunRecord, known, race
from fsdplab.records.summary import Change
from fsdplab.sessions.changes import LEAST_GAIN, gains, in_order
from fsdplab.sessions.steady_card import GIGAFLOPS, spec_of

_RESHARDING = strategies_that(lambda row: row.reshards_after_forward)
_ALIKE = 0.005  # a relative difference below this is none
_AGREES = 0.05  # of a step: simulated and measured steps nearer than this agree
_TOLD = 0.1  # of their difference: smaller parts of it are left out


def conclusion(runs: Sequence[RunView]) -> str:
    """What the most sharded run saves and costs beside the baseline; of a single run, what it takes.

    `FSDP (full_shard) needs 232 MB a rank instead of 373 MB (38 % less), and sends 1.5 times as much. Simulated on the
    steady card, it hides 65 % of that, and its step is 8 % longer; measured here, its step is 12 % longer.` Without a
    steady card one sentence, with the measured time. Empty where there is nothing to say.
    """
    base, sharded = _baseline(runs), most_sharded(runs)
    if base is None or sharded is None:
        return ""
    alone, name = base is sharded, _name(sharded)
    cost = [_memory(base), _sent(base)] if alone else [_memory_beside(sharded, base), _sent_beside(sharded, base)]
    clock = _time(base) if alone else _time_beside(sharded, base)
    if not (sharded.steady.step_time_s and base.steady.step_time_s):
        hidden = _hidden(sharded) if cost[1] else ""
        return _sentence(name, [cost[0], cost[1] + hidden, clock])
    step = _steady(sharded)
    steady = f"its step takes {seconds(step)}" if alone else _step_words(step / _steady(base) - 1)
    part = sharded.steady.overlap
    hides = "" if part is None else f"it hides {percent(part)} of that, and "
    measured = f"; measured here, {clock}" if clock else ""
    return f"{_sentence(name, cost)} Simulated on the steady card, {hides}{steady}{measured}.".strip()


def clock_words(runs: Sequence[RunView]) -> str:
    """What the simulated step is, and how far the measured ones are from it and why; empty without a simulated step."""
    if not any(run.steady.step_time_s for run in runs):
        return ""
    told = f"Simulated: the steady card computes {GIGAFLOPS:g} GFLOP/s behind the same link, everywhere alike."
    return f"{told} {why_they_differ(runs)}".strip()


def why_they_differ(runs: Sequence[RunView]) -> str:
    """How far measured steps are from the simulated ones; of the run that differs most, the parts of the difference.
    Empty where no run has both, and where ranks were short of cores, which is said first of all.

    >>> from fsdplab.records import Spread, Summary
    >>> from fsdplab.records.summary import Steady
    >>> why_they_differ([RunView("zero1", "lab", 2, Summary(Spread(0.78), steady=Steady(0.765, 0.1, 0.8)))])
    'The measured steps agree with it within 2 %.'
    """
    both = [run for run in runs if run.steady.step_time_s and run.step_median]
    if not both or core_words(both):
        return ""
    run = max(both, key=lambda run: abs(_ratio(run) - 1))
    off, most = _ratio(run) - 1, ", which differs most," if len(both) > 1 else ""
    if abs(off) <= max(_AGREES, run.summary.step_time_s.scatter or 0):
        return f"The measured steps agree with it within {max(1, round(100 * abs(off) + 0.49))} %."
    excess = known(run.step_median) - _steady(run)
    parts = [(part, words) for part, words in _parts(run, excess) if abs(part) >= _TOLD * abs(excess)]
    told = ", ".join(f"{'+' if part > 0 else '-'}{seconds(abs(part))} of {words}" for part, words in parts)
    direction = "longer" if off > 0 else "shorter"
    step = f"The measured step of {run.label}{most} is {seconds(abs(excess))} ({percent(abs(off))}) {direction}"
    return f"{step}{': ' if told else ''}{told}."


def change_words(runs: Sequence[RunView]) -> str:
    """The change to the most sharded run that gains most on the steady card; empty where none is known.

    `Most valuable change to full_shard: compute and send in bf16, with fp32 masters: 50 % more tokens/s (simulated),
    192 MB instead of 232 MB (predicted).`
    """
    run = most_sharded(runs)
    change = None if run is None else run.summary.change
    if run is None or change is None or not change.words:
        return ""
    memory = ""
    if change.peak_bytes:
        before = f" instead of {size(run.peak)}" if run.peak else ""  # of a run whose memory was not measured
        memory = f", {size(change.peak_bytes)}{before} (predicted)"
    gain = f"{percent(known(change.gain))} more tokens/s (simulated)"
    return f"Most valuable change to {run.label}: {change.words}: {gain}{memory}."


def _parts(run: RunView, excess: float) -> list[tuple[float, str]]:
    """The seconds by which a measured step exceeds the simulated one, by cause; empty for a run without a profile."""
    comm, exposed = run.summary.comm, run.steady.exposed_s
    if comm.exposed_s is None or comm.on_link_s is None or exposed is None:
        return []
    copying, waiting = comm.copying_s or 0.0, (comm.waiting_s or 0.0) + (comm.no_core_s or 0.0)
    link = comm.on_link_s - exposed
    return [
        (copying, "packing and unpacking (the steady card does none)"),
        (waiting, "waiting for a peer or a core"),
        (link, "exposed time on the link"),
        (excess - copying - waiting - link, "computing and of Python between the operators"),
    ]


def _steady(run: RunView) -> float:
    return known(run.steady.step_time_s)


def _ratio(run: RunView) -> float:
    return known(run.step_median) / _steady(run)


# ---- which two runs


def _baseline(runs: Sequence[RunView]) -> RunView | None:
    """The lab's unsharded run, else another engine's, else the first run."""
    plain = [run for run in runs if run.strategy in UNSHARDED and run.engine != "twin"]
    return min(plain or [run for run in runs if run.engine != "twin"][:1], key=_own_engine, default=None)


def most_sharded(runs: Sequence[RunView]) -> RunView | None:
    """Return the first run of full sharding, of the lab's own engine if there is one; else the one of least memory."""
    full = [run for run in runs if run.strategy in _RESHARDING and run.engine != "twin"]
    if full:
        return min(full, key=_own_engine)
    others = [run for run in runs if run.engine != "twin" and run is not _baseline(runs)]
    return min(others, key=lambda run: run.peak or float("inf"), default=_baseline(runs))


def _own_engine(run: RunView) -> bool:
    return run.engine != "lab"


# ---- the parts of the sentence


def _name(run: RunView) -> str:
    return f"FSDP ({run.label})" if run.label in SAVES_MOST else run.label


def _memory(run: RunView) -> str:
    return f"needs {size(run.peak)} a rank" if run.peak else ""


def _sent(run: RunView) -> str:
    sent = run.summary.comm.bytes_per_step
    return f"sends {size(sent)} a step" if sent else ""


def _hidden(run: RunView) -> str:
    """The hidden part as measured; without a link the ranks copy for each other, and nothing is on its way to hide."""
    part = run.summary.comm.overlap
    if part is None or core_words([run]):
        return ""
    linked = emulated_links([run]) or run.traced or run.recorded or run.device != "cpu"
    if part < _ALIKE and not linked:
        return " (no link is emulated, so there is nothing to hide; --link 150MB/s emulates one)"
    return f" and hides {percent(part)} of it"


def _time(run: RunView) -> str:
    """The measured step, unless it is the machine's more than the strategy's."""
    return f"its step takes {seconds(run.step_median)}" if run.step_median and not core_words([run]) else ""


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
    return "sends as much" if abs(times - 1) < _ALIKE else f"sends {times:.2g} times as much"


def _time_beside(run: RunView, base: RunView) -> str:
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
    return f"{percent(abs(change))} {more if change > 0 else less}"


def _sentence(name: str, parts: Sequence[str]) -> str:
    said = [part for part in parts if part]
    if not said:
        return ""
    if len(said) == 1 and said[0].startswith(("its ", "no ")):
        return f"{name}: {said[0]}."
    return f"{name} {', '.join(said[:-1])}{', and ' if len(said) > 1 else ''}{said[-1]}."


# ---- predicted beside measured: how far apart, and why, in the words of the page


NEAR = 0.10  # a category further off than this is explained
SMALL = 0.005  # of the peak: what is less changes no picture
ALIKE = 0.01  # totals nearer than this are those of instants that are equally high


def gaps(run: RunView) -> list[str]:
    """A sentence on each category of which the prediction is off by more than a tenth, and by more than half a percent
    of the peak, with the reason.
    """
    found = []
    for name in CATEGORIES if run.predicted_peak and run.peak else ():
        ours, theirs = run.predicted_split.get(name, 0), run.split.get(name, 0)
        if abs(ours - theirs) > max(NEAR * theirs, SMALL * known(run.peak)):
            both = f"{CATEGORY_NAMES[name]} {size(ours)} predicted, {size(theirs)} measured"
            found.append(f"{run.label}: {both}: {_why(run, name, ours < theirs)}")
    return found


def _why(run: RunView, category: str, too_little: bool) -> str:
    total = run.predicted_peak or 0
    if run.status == "failed":
        return "the run failed before its step was whole"
    if abs(total - known(run.peak)) <= ALIKE * known(run.peak):
        return (
            "the totals agree, so two instants of the step are about equally high, and the prediction's split is that"
            " of the other one"
        )
    if category == "activations" and too_little and run.spec.get("precision") == "bf16":
        return "oneDNN holds scratch memory while it multiplies in bf16; its size depends on the processor"
    return "no reason is known; the engine or PyTorch has changed since the prediction was written"


def verdict(runs: Sequence[RunView]) -> str:
    """The finding of a comparison: how far the predicted peaks are off at most."""
    known = [(run, run.predicted_peak / run.peak - 1) for run in runs if run.peak and run.predicted_peak]
    if not known:
        return "No peak of these runs is predicted"
    worst, off = max(known, key=lambda pair: abs(pair[1]))
    if abs(off) < 0.0005:
        return "Every predicted peak is within 0.1% of the measured one"
    return f"Predicted peaks are within {abs(off):.1%} of the measured ones; {worst.label} is furthest off"


def step_sources(runs: Sequence[RunView]) -> list[str]:
    """A sentence on each run from which the steps of others are predicted, predicted beside measured.

    `From the run of no_shard a step of full_shard is predicted at 212 ms ±3 % (1.02), measured 208 ms ±2 %.`
    """
    found: dict[str, list[str]] = {}
    for run in runs:
        if (source := run.summary.predicted.step_from) and run.step_median:
            told = f"{run.label} is predicted at {predicted_step(run)}, measured {step_of(run)}"
            found.setdefault(source, []).append(told)
    return [f"From the run of {source} a step of {'; of '.join(told)}." for source, told in found.items()]


# ---- findings of several runs, each with its run's unique label: for pages, widgets and the terminal


def findings_by_run(records: Sequence[RunRecord]) -> list[tuple[str, list[Finding]]]:
    """(label, findings) of every profiled run, in order."""
    return [(run.label, findings(record)) for run, record in zip(views(records), records) if record.table("breakdown")]


# the settings of a run that change what a finding claims
_SETTINGS_OF = {
    "no_prefetch": ("prefetch",), "slow_link": ("precision", "tokens"), "copies": ("precision", "tokens"),
    "nothing_to_hide_behind": ("tokens", "prefetch"), "busy_link": ("tokens", "prefetch"),
    "one_communicator": ("link_queues", "prefetch"),
}  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """What to do about a finding of one of several runs: a `change` that gains tokens a second on the steady card, else
    the finding's own remedy.
    """

    label: str
    finding: Finding
    remedy: str
    change: Change = Change()

    @property
    def gain(self) -> float | None:
        """The part by which tokens a second rise; None where the steady card cannot show it."""
        return self.change.gain


def costliest(records: Sequence[RunRecord], most: int = 3) -> list[Advice]:
    """Findings over all runs, each of another kind and another run: first those against which a change of the run gains
    on the steady card, by what it gains and costs; then by the seconds of the finding.
    """
    every: list[Advice] = []
    by_label = {run.label: record for run, record in zip(views(records), records)}
    for label, of_run in findings_by_run(records):
        changes = _gains(by_label[label])
        every += [_advice(label, finding, changes) for finding in of_run if finding.seconds]
    by_cost = sorted(every, key=lambda advice: -advice.finding.seconds)
    ordered = in_order({advice.change for advice in every if advice.gain})
    places = {change: place for place, change in enumerate(ordered)}
    chosen: list[Advice] = []
    for advice in sorted(by_cost, key=lambda advice: places.get(advice.change, len(places))):
        if all(advice.label != taken.label and advice.finding.kind != taken.finding.kind for taken in chosen):
            chosen.append(advice)
    return chosen[:most]


def _gains(record: RunRecord) -> Mapping[str, Change]:
    """What each setting of a run of the lab gains on the steady card at another value; empty for others."""
    spec = None if record.spec.get("job") or record.summary.traces else spec_of(record)
    return {} if spec is None else gains(spec)


def _advice(label: str, finding: Finding, changes: Mapping[str, Change]) -> Advice:
    """The best change against the cause of a finding, if any gains; else its own remedy."""
    known_changes = [changes[name] for name in _SETTINGS_OF.get(finding.kind, ()) if name in changes]
    worth = [change for change in known_changes if (change.gain or 0.0) >= LEAST_GAIN]
    if not worth:
        return Advice(label, finding, finding.remedy)
    best = in_order(worth)[0]
    words = f"{best.words[0].upper()}{best.words[1:]}: {percent(known(best.gain))} more tokens/s on the steady card."
    return Advice(label, finding, words, best)
