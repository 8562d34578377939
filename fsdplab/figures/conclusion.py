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
from fsdplab.common.sizes import percent, seconds, size, times_as_much
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
    """Say what the most sharded run saves and costs beside the baseline; of a single run, what it takes.

    `FSDP (full_shard) needs 232 MB a rank instead of 373 MB (38 % less), and sends 1.5 times as much. Simulated on the
    steady card, it hides 65 % of that, and its step is 8 % longer; measured here, its step is 12 % longer.` Without a
    steady card one sentence, with the measured time. Empty where there is nothing to say.
    """
    base, sharded = baseline(runs), most_sharded(runs)
    if base is None or sharded is None:
        return ""
    # both are one run, as where only one was made: its own amounts instead of differences
    if base is sharded:
        memory, sent, step = _memory(base), _sent(base), _time(base)
    else:
        memory, sent, step = _memory_beside(sharded, base), _sent_beside(sharded, base), _time_beside(sharded, base)
    # the measured step is the only time there is, so all goes into one sentence
    if not (sharded.steady.step_time_s and base.steady.step_time_s):
        hidden = _hidden(sharded) if sent else ""
        return _sentence(_name(sharded), [memory, sent + hidden, step])
    first = _sentence(_name(sharded), [memory, sent])
    second = _on_steady_card(sharded, base, step)
    return f"{first} {second}".strip()


def _on_steady_card(sharded: RunView, base: RunView, measured_step: str) -> str:
    """Return the sentence on the simulated step, and after it what was measured."""
    if base is sharded:
        step = f"its step takes {seconds(_steady(sharded))}"
    else:
        step = _step_words(_steady(sharded) / _steady(base) - 1)
    words = "Simulated on the steady card, "
    if sharded.steady.overlap is not None:
        # `that` is what the sentence before says it sends
        words += f"it hides {percent(sharded.steady.overlap)} of that, and "
    words += step
    if measured_step:
        words += f"; measured here, {measured_step}"
    return f"{words}."


def clock_words(runs: Sequence[RunView]) -> str:
    """Say what the simulated step is, and how far the measured ones are from it and why; nothing without a simulated
    step.
    """
    if not any(run.steady.step_time_s for run in runs):
        return ""
    words = f"Simulated: the steady card computes {GIGAFLOPS:g} GFLOP/s behind the same link, everywhere alike."
    return f"{words} {why_they_differ(runs)}".strip()


def why_they_differ(runs: Sequence[RunView]) -> str:
    """Say how far measured steps are from the simulated ones; of the run that differs most, the parts of the
    difference. Empty where no run has both, and where ranks were short of cores, which is said first of all.

    >>> from fsdplab.records import Spread, Summary
    >>> from fsdplab.records.summary import Steady
    >>> why_they_differ([RunView("zero1", "lab", 2, Summary(Spread(0.78), steady=Steady(0.765, 0.1, 0.8)))])
    'The measured steps agree with it within 2 %.'
    """
    both = [run for run in runs if run.steady.step_time_s and run.step_median]
    if not both or core_words(both):
        return ""
    # the run that is furthest off, in either direction
    run = max(both, key=lambda run: abs(_ratio(run) - 1))
    off = _ratio(run) - 1
    # nothing is claimed within the scatter of its own steps
    if abs(off) <= max(_AGREES, run.summary.step_time_s.scatter or 0):
        within = max(1, round(100 * abs(off) + 0.49))  # rounded up, so that it holds
        # the worst is within it, so all are
        return f"The measured steps agree with it within {within} %."
    excess = known(run.step_median) - _steady(run)
    which = run.label
    if len(both) > 1:
        which += ", which differs most,"
    direction = "longer" if off > 0 else "shorter"
    words = f"The measured step of {which} is {seconds(abs(excess))} ({percent(abs(off))}) {direction}"
    parts = _parts_in_words(run, excess)
    if parts:
        words += f": {parts}"
    return f"{words}."


def _parts_in_words(run: RunView, excess: float) -> str:
    """Return the larger parts of a difference: `+85.0 ms of waiting for a peer or a core, -20.0 ms of ...`."""
    words = []
    for part, cause in _parts(run, excess):
        if abs(part) >= _TOLD * abs(excess):
            sign = "+" if part > 0 else "-"
            words.append(f"{sign}{seconds(abs(part))} of {cause}")
    return ", ".join(words)


def change_words(runs: Sequence[RunView]) -> str:
    """Name the change to the most sharded run that gains most on the steady card; empty where none is known.

    `Most valuable change to full_shard: compute and send in bf16, with fp32 masters: 50 % more tokens/s (simulated),
    192 MB instead of 232 MB (predicted).`
    """
    run = most_sharded(runs)
    if run is None or not run.summary.change.words:
        return ""
    change = run.summary.change
    gain = percent(known(change.gain))
    words = f"Most valuable change to {run.label}: {change.words}: {gain} more tokens/s (simulated)"
    if change.peak_bytes and run.peak:
        # the change is predicted, the run's own peak was measured
        words += f", {size(change.peak_bytes)} instead of {size(run.peak)} (predicted)"
    elif change.peak_bytes:  # of a run whose memory was not measured
        words += f", {size(change.peak_bytes)} (predicted)"
    return f"{words}."


def _parts(run: RunView, excess: float) -> list[tuple[float, str]]:
    """Return the seconds by which a measured step exceeds the simulated one, by cause; [] for a run without a profile.

    They sum to the excess: computing is what the other causes leave.
    """
    comm, exposed = run.summary.comm, run.steady.exposed_s
    if comm.exposed_s is None or comm.on_link_s is None or exposed is None:
        return []
    copying = comm.copying_s or 0.0
    waiting = (comm.waiting_s or 0.0) + (comm.no_core_s or 0.0)
    # the simulated step has exposed time too: only what is beyond it explains a difference
    link = comm.on_link_s - exposed
    computing = excess - copying - waiting - link
    return [
        (copying, "packing and unpacking (the steady card does none)"),
        (waiting, "waiting for a peer or a core"),
        (link, "exposed time on the link"),
        (computing, "computing and of Python between the operators"),
    ]


def _steady(run: RunView) -> float:
    return known(run.steady.step_time_s)


def _ratio(run: RunView) -> float:
    return known(run.step_median) / _steady(run)


# ---- which two runs


def baseline(runs: Sequence[RunView]) -> RunView | None:
    """Return the run that all sentences and titles of a comparison compare with: the lab's unsharded run, else another
    engine's, else the first run.
    """
    candidates = _compared(runs)
    unsharded = [run for run in candidates if run.strategy in UNSHARDED]
    # of several the first: `min` keeps the order of the runs
    return min(unsharded or candidates[:1], key=_is_of_others, default=None)


def most_sharded(runs: Sequence[RunView]) -> RunView | None:
    """Return the first run of full sharding, of the lab's own engine if there is one; else the one of least memory."""
    candidates = _compared(runs)
    full = [run for run in candidates if run.strategy in _RESHARDING]
    if full:
        return min(full, key=_is_of_others)
    # nothing here reshards after the forward: the run of least memory stands for sharding
    base = baseline(runs)
    others = [run for run in candidates if run is not base]
    return min(others, key=lambda run: run.peak or float("inf"), default=base)


def _compared(runs: Sequence[RunView]) -> list[RunView]:
    """Return the runs without the twin, which only replays what the others do."""
    return [run for run in runs if run.engine != "twin"]


def _is_of_others(run: RunView) -> bool:
    """Whether another engine ran it: `min` by this takes the lab's own first."""
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
    """Return the hidden part as measured; without a link the ranks copy for each other, and nothing is on its way to
    hide.
    """
    part = run.summary.comm.overlap
    if part is None or core_words([run]):
        return ""
    # an emulated link; or the real one that GPUs and somebody's own jobs have
    linked = emulated_links([run]) or run.traced or run.recorded or run.device != "cpu"
    if part < _ALIKE and not linked:
        return " (no link is emulated, so there is nothing to hide; --link 150MB/s emulates one)"
    return f" and hides {percent(part)} of it"


def _time(run: RunView) -> str:
    """Return the measured step, unless it is the machine's more than the strategy's."""
    if not run.step_median or core_words([run]):
        return ""
    return f"its step takes {seconds(run.step_median)}"


def _memory_beside(run: RunView, base: RunView) -> str:
    if not run.peak or not base.peak:
        return _memory(run)
    needs = f"needs {size(run.peak)} a rank"
    change = run.peak / base.peak - 1
    if abs(change) < _ALIKE:
        return f"{needs}, as {base.label} does"
    difference = _percent(change, "more", "less")
    # said only where sharding is what makes the run fit
    if base.over_card and not run.over_card:
        difference += f", and {base.label} is over the card of {size(base.card)}"
    return f"{needs} instead of {size(base.peak)} ({difference})"


def _sent_beside(run: RunView, base: RunView) -> str:
    sent = run.summary.comm.bytes_per_step
    sent_by_base = base.summary.comm.bytes_per_step
    if not sent or not sent_by_base:
        return _sent(run)
    times = sent / sent_by_base
    if abs(times - 1) < _ALIKE:
        return "sends as much"
    return f"sends {times_as_much(times)}"


def _time_beside(run: RunView, base: RunView) -> str:
    if not run.step_median or not base.step_median:
        return _time(run)
    if core_words([run, base]):
        return ""
    # the shorter median wins only beyond the spread of both runs' steps
    outcome = race([run.summary.step_time_s, base.summary.step_time_s])
    if len(outcome.leaders) > 1:
        return "no difference of their steps is seen"
    return _step_words(run.step_median / base.step_median - 1)


def _step_words(change: float) -> str:
    if abs(change) < _ALIKE:
        return "its step takes as long"
    return f"its step is {_percent(change, 'longer', 'shorter')}"


def steady_step_beside(run: RunView, base: RunView) -> str:
    """Compare the simulated steps of two runs, as the conclusion does: `8 % longer than no_shard`."""
    change = _steady(run) / _steady(base) - 1
    if abs(change) < _ALIKE:
        return f"as long as {base.label}"
    return f"{_percent(change, 'longer', 'shorter')} than {base.label}"


def _percent(change: float, more: str, less: str) -> str:
    direction = more if change > 0 else less
    return f"{percent(abs(change))} {direction}"


def _sentence(name: str, parts: Sequence[str]) -> str:
    """Join a subject and what is said of it; parts that are empty are left out."""
    predicates = [part for part in parts if part]
    if not predicates:
        return ""
    # `FSDP (full_shard) needs 232 MB a rank, sends as much, and its step is 8 % longer.`
    *others, last = predicates
    if others:
        return f"{name} {', '.join(others)}, and {last}."
    # `zero1: its step takes 98 ms.`, but `zero1 needs 300 MB a rank.`
    has_its_own_subject = last.startswith(("its ", "no "))
    return f"{name}: {last}." if has_its_own_subject else f"{name} {last}."


# ---- predicted beside measured: how far apart, and why, in the words of the page


NEAR = 0.10  # a category further off than this is explained
SMALL = 0.005  # of the peak: what is less changes no picture
ALIKE = 0.01  # totals nearer than this are those of instants that are equally high


def gaps(run: RunView) -> list[str]:
    """Return a sentence on each category of which the prediction is off by more than a tenth, and by more than half a
    percent of the peak, with the reason.
    """
    if not run.predicted_peak or not run.peak:
        return []
    sentences = []
    for category in CATEGORIES:
        predicted = run.predicted_split.get(category, 0)
        measured = run.split.get(category, 0)
        # 8 MB predicted, 10 MB measured, peak 300 MB: off by 2, more than 1.0 (a tenth) and than 1.5 (0.5 %)
        if abs(predicted - measured) > max(NEAR * measured, SMALL * run.peak):
            both = f"{CATEGORY_NAMES[category]} {size(predicted)} predicted, {size(measured)} measured"
            sentences.append(f"{run.label}: {both}: {_why(run, category, predicted < measured)}")
    return sentences


def _why(run: RunView, category: str, too_little: bool) -> str:
    """Return why a category is predicted wrong, as far as that is known."""
    if run.status == "failed":
        return "the run failed before its step was whole"
    peak = known(run.peak)
    # as much in all, split otherwise
    if abs((run.predicted_peak or 0) - peak) <= ALIKE * peak:
        return (
            "the totals agree, so two instants of the step are about equally high, and the prediction's split is that"
            " of the other one"
        )
    if category == "activations" and too_little and run.spec.get("precision") == "bf16":
        return "oneDNN holds scratch memory while it multiplies in bf16; its size depends on the processor"
    return "no reason is known; the engine or PyTorch has changed since the prediction was written"


def verdict(runs: Sequence[RunView]) -> str:
    """Return the finding of a comparison: how far the predicted peaks are off at most."""
    predicted = [run for run in runs if run.peak and run.predicted_peak]
    if not predicted:
        return "No peak of these runs is predicted"
    worst = max(predicted, key=_off)
    off = _off(worst)
    # would read as 0.0%
    if off < 0.0005:
        return "Every predicted peak is within 0.1% of the measured one"
    return f"Predicted peaks are within {off:.1%} of the measured ones; {worst.label} is furthest off"


def _off(run: RunView) -> float:
    """Return by which part of the measured peak the predicted one is off."""
    return abs(known(run.predicted_peak) / known(run.peak) - 1)


def step_sources(runs: Sequence[RunView]) -> list[str]:
    """Return a sentence on each run from which the steps of others are predicted, predicted beside measured.

    `From the run of no_shard a step of full_shard is predicted at 212 ms ±3 % (1.02), measured 208 ms ±2 %.`
    """
    predictions: dict[str, list[str]] = {}  # by the run that they are from
    for run in runs:
        source = run.summary.predicted.step_from
        if source and run.step_median:
            words = f"{run.label} is predicted at {predicted_step(run)}, measured {step_of(run)}"
            predictions.setdefault(source, []).append(words)
    sentences = []
    for source, words_of_runs in predictions.items():
        steps = "; of ".join(words_of_runs)
        sentences.append(f"From the run of {source} a step of {steps}.")
    return sentences


# ---- findings of several runs, each with its run's unique label: for pages, widgets and the terminal


def findings_by_run(records: Sequence[RunRecord]) -> list[tuple[str, list[Finding]]]:
    """Return (label, findings) of every profiled run, in order."""
    by_run = []
    for run, record in zip(views(records), records):
        # the table that every profiled step has a row in
        if record.table("breakdown"):
            by_run.append((run.label, findings(record)))
    return by_run


# the settings of a run that change what a finding claims
_SETTINGS_OF = {
    "no_prefetch": ("prefetch",),
    "slow_link": ("precision", "tokens"),
    "copies": ("precision", "tokens"),
    "nothing_to_hide_behind": ("tokens", "prefetch"),
    "busy_link": ("tokens", "prefetch"),
    "one_communicator": ("link_queues", "prefetch"),
}


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
    """Return findings over all runs, each of another kind and another run: first those against which a change of the
    run gains on the steady card, by what it gains and costs; then by the seconds of the finding.
    """
    chosen: list[Advice] = []
    # from the most valuable on, passing over runs and kinds that are chosen already
    for advice in _by_worth(_every_advice(records)):
        labels = {taken.label for taken in chosen}
        kinds = {taken.finding.kind for taken in chosen}
        if advice.label not in labels and advice.finding.kind not in kinds:
            chosen.append(advice)
    return chosen[:most]


def _every_advice(records: Sequence[RunRecord]) -> list[Advice]:
    """Return what to do about each finding that costs time."""
    by_label = {run.label: record for run, record in zip(views(records), records)}
    every_advice = []
    for label, of_run in findings_by_run(records):
        changes = _gains(by_label[label])
        for finding in of_run:
            if finding.seconds:
                every_advice.append(_advice(label, finding, changes))
    return every_advice


def _by_worth(every_advice: list[Advice]) -> list[Advice]:
    """Order advice by its change, those without one last; within each by the seconds of the finding."""
    # several findings may call for one change, which has one place
    changes = in_order({advice.change for advice in every_advice if advice.gain})
    places = {change: place for place, change in enumerate(changes)}

    def worth(advice: Advice) -> tuple[int, float]:
        return places.get(advice.change, len(places)), -advice.finding.seconds

    return sorted(every_advice, key=worth)


def _gains(record: RunRecord) -> Mapping[str, Change]:
    """Return what each setting of a run of the lab gains on the steady card at another value; empty for others."""
    # a recorded job and foreign traces have no settings of the lab
    if record.spec.get("job") or record.summary.traces:
        return {}
    spec = spec_of(record)
    if spec is None:
        return {}
    return gains(spec)


def _advice(label: str, finding: Finding, changes: Mapping[str, Change]) -> Advice:
    """Return the best change against the cause of a finding, if any gains; else its own remedy."""
    # settings against this kind of finding, as far as changing them gains enough
    worth = []
    for name in _SETTINGS_OF.get(finding.kind, ()):
        change = changes.get(name)
        if change is not None and (change.gain or 0.0) >= LEAST_GAIN:
            worth.append(change)
    if not worth:
        return Advice(label, finding, finding.remedy)
    best = in_order(worth)[0]
    # a sentence of its own here, a clause in `change_words`
    what = best.words[0].upper() + best.words[1:]
    gain = percent(known(best.gain))
    words = f"{what}: {gain} more tokens/s on the steady card."
    return Advice(label, finding, words, best)
