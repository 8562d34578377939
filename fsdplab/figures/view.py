"""One run for figures and pages, from a record or from the JSON of a comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import percent, size
from fsdplab.common.words import plural
from fsdplab.records import RunRecord, Spread, Summary
from fsdplab.records.summary import Steady, Traces
from fsdplab.sessions.spec import ENGINES, RunSpec
from fsdplab.sessions.steady_card import STEADY_CARD

CATEGORY_NAMES = {row.name: row.title for row in CATEGORY_ROWS.values()}
UNSPLIT = "no category"  # a peer's memory that could not be attributed to a category
_DEFAULTS = {each.name: each.default for each in fields(RunSpec)}
_ALL_CORES = 0.95  # of a step: less is told, as other work took a core now and then
# how the fields of a spec that tell runs apart are written
SETTINGS = {
    "model": "{}",
    "world_size": "{} ranks",
    "shard_size": "{} ranks a shard group",
    "emulate": "as {}",
    "link": "link {}",
    "link_across": "across {}",
    "link_queues": "{} queues",
    "prefetch": "prefetch {}",
    "units": "units {}",
    "precision": "{}",
    "batch_size": "batch {}",
    "sequence_length": "{} tokens",
    "micro_batches": "{} micro-batches",
    "checkpoint": "checkpoint {}",
    "offload": "offload {}",
    "transport": "{}",
    "optimizer": "{}",
    "card": "card {}",
}


@dataclass(frozen=True)
class RunView:
    """One run as figures and pages read it: its summary, and what its spec, environment and provenance say beside it.

    `strategy` is what the run is called; `matches`: whether its losses agree with the reference's; `note` tells it from
    other runs of its name.
    """

    strategy: str
    engine: str
    world_size: int
    summary: Summary = Summary()
    status: str = "finished"
    spec: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)
    matches: bool | None = None
    note: str = ""

    @property
    def label(self) -> str:
        """`full_shard` for the lab's own engine, `torch-fsdp2` or `torch-fsdp2 zero2` for others, of a recorded job its
        program; then the note.
        """
        return f"{self._name}, {self.note}" if self.note else self._name

    @property
    def _name(self) -> str:
        if self.recorded:
            return str(self.spec["job"])
        if self.engine == "lab":
            return self.strategy
        if self.engine == "twin":
            return "twin"
        implied = ENGINES.get(self.engine, ("",))[0]  # what the engine is best known for
        return self.engine if self.strategy == implied else f"{self.engine} {self.strategy}"

    @property
    def step_median(self) -> float | None:
        """Seconds of the median timed step."""
        return self.summary.step_time_s.median

    @property
    def peak(self) -> int | None:
        """Bytes at the peak of the worst rank."""
        return self.summary.peak_memory_bytes.total

    @property
    def split(self) -> dict[str, int]:
        """The peak by category."""
        return self.summary.peak_memory_bytes.split

    @property
    def predicted_split(self) -> dict[str, int]:
        """The peak by category, by arithmetic; {} where it is not predicted."""
        return self.summary.predicted.peak_memory_bytes.split

    @property
    def predicted_peak(self) -> int | None:
        """The peak by arithmetic; None where it is not predicted."""
        return sum(self.predicted_split.values()) or None

    @property
    def exposed_s(self) -> float | None:
        """Seconds of communication a step that no computing hid."""
        return self.summary.comm.exposed_s

    @property
    def steady(self) -> Steady:
        """Its step on the steady card, simulated: seconds, exposed seconds and the hidden part; None where unknown."""
        return self.summary.steady

    @property
    def sends_nothing(self) -> bool:
        """Whether its profiled steps show no communication, exposed or hidden."""
        return self.exposed_s == 0 and self.summary.comm.overlap is None

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        # what was found when it ran, else what was asked for
        said = self.environment.get("device") or self.spec.get("device") or "cpu"
        return "cpu" if said == "auto" else str(said)

    @property
    def card(self) -> int | None:
        """The card's bytes."""
        # a run that has recorded no card has the one that its spec asks for
        card = self.summary.card
        if card and card.bytes:
            return card.bytes
        return self.spec.get("card")

    @property
    def card_emulated(self) -> bool:
        """Whether the card is emulated, as that of CPU ranks is."""
        return self.provenance.get("card", "emulated") == "emulated"

    @property
    def over_card(self) -> bool:
        """Whether this run's memory did not fit the card."""
        # a GPU ends such a run; CPU ranks go on beyond an emulated card, so their peak tells
        if self.status == "out_of_memory":
            return True
        return bool(self.card and self.peak and self.peak > self.card)

    @property
    def simulated(self) -> bool:
        """Whether its times come from a simulation."""
        origins = [self.provenance.get(name) for name in ("step_time_s", "exposed_s")]
        return "simulated" in origins

    @property
    def recorded(self) -> bool:
        """Whether it is a job that was not written for the lab."""
        return bool(self.spec.get("job"))

    @property
    def traced(self) -> bool:
        """Whether the run is known by its traces alone."""
        return self.summary.traces is not None


# what a figure of several runs takes: records, views of them, or the dict of a comparison
Runs: TypeAlias = RunRecord | RunView | Mapping[str, Any] | Iterable[RunRecord | RunView]


def views(runs: Runs) -> list[RunView]:
    """Return RunViews of one record, of several records, or of a comparison dict (`{"runs": [...], "spec": ...}`)."""
    if isinstance(runs, (RunView, RunRecord)):
        return [view(runs)]
    # the JSON of a comparison
    if isinstance(runs, Mapping):
        return disambiguate_labels([_of_entry(entry, runs) for entry in runs["runs"]])
    if not isinstance(runs, Iterable):
        raise TypeError(
            f"a figure draws run records or a comparison dict, got {type(runs).__name__}; pass what run() or compare()"
            " returned"
        )
    return disambiguate_labels([view(run) for run in runs])


def view(run: RunRecord | RunView) -> RunView:
    """Return the RunView of one record; a RunView passes through.

    One that failed did no whole step, and has nothing of what whole steps have.
    """
    if isinstance(run, RunView):
        return run
    summary = run.summary
    if run.status == "failed":
        comm = replace(summary.comm, bytes_per_step=None)
        summary = replace(summary, step_time_s=Spread(), tokens_per_s=None, comm=comm)
    return RunView(
        strategy=run.spec["strategy"],
        engine=run.spec["engine"],
        world_size=run.spec["world_size"],
        summary=summary,
        status=run.status,
        spec=run.spec,
        environment=run.environment or {},
        provenance=run.provenance,
    )


def _of_entry(entry: Mapping[str, Any], comparison: Mapping[str, Any]) -> RunView:
    """Return the RunView of one entry of a comparison's `runs` (fields of records/comparison.py)."""
    # an entry has what its strategy must send beside its other predictions, a summary apart from them
    formula = (entry.get("predicted") or {}).get("comm_bytes_per_step")
    summary = Summary.from_dict({**entry, "formula_bytes_per_step": formula}, "runs")
    of_all_runs = comparison.get("spec") or {}
    # a record made up of what the comparison has: it lies in no folder and has no tables
    record = RunRecord(
        Path(),
        spec=of_all_runs | {name: entry[name] for name in ("strategy", "engine", "world_size")},
        environment=comparison.get("environment") or {},
        status=entry.get("status") or "finished",
        summary=summary,
        provenance=entry.get("provenance") or {},
    )
    return replace(view(record), matches=entry.get("matches_reference"))


def with_verdicts(runs: Iterable[RunRecord | RunView], comparison: Mapping[str, Any]) -> list[RunView]:
    """Return the runs as figures and tables read them; where only the comparison judged their losses, with its
    verdict.
    """
    shown = views(runs)
    entries = comparison.get("runs") or []
    # verdicts are assigned by place, so there must be one for each run
    if len(shown) != len(entries):
        return shown
    judged = []
    for run, entry in zip(shown, entries):
        if run.matches is None:
            run = replace(run, matches=entry.get("matches_reference"))
        judged.append(run)
    return judged


# ---- names of runs that tell them apart


def disambiguate_labels(shown: list[RunView]) -> list[RunView]:
    """Return the views with a note wherever several have one name, because bars of one name would be drawn as one.

    Two runs of full_shard become `full_shard` and `full_shard, prefetch 0`; equal runs are numbered.
    """
    # label -> where it occurs: `{"full_shard": [0, 2], "zero1": [1]}`
    places: dict[str, list[int]] = {}
    for place, run in enumerate(shown):
        places.setdefault(run.label, []).append(place)
    noted = list(shown)
    for namesakes in places.values():
        if len(namesakes) == 1:
            continue
        notes = _notes([shown[place] for place in namesakes])
        for place, note in zip(namesakes, notes):
            noted[place] = replace(shown[place], note=note)
    return noted


def _notes(namesakes: list[RunView]) -> list[str]:
    """Return what tells runs of one name apart: the settings in which they differ, as few as that takes.

    Settings at their defaults are left out, unless they tell more runs apart. Runs of equal settings are numbered:
    `run 1`, `run 2` and `prefetch 0`.
    """
    specs = [{**run.spec, "world_size": run.world_size} for run in namesakes]
    # compared as text, since a set takes no lists
    differing = [name for name in SETTINGS if len({str(spec.get(name)) for spec in specs}) > 1]
    # settings at their defaults left out: `full_shard` beside `full_shard, prefetch 0`
    notes = []
    for spec in specs:
        chosen = [name for name in differing if not _is_default(spec, name)]
        notes.append(settings_words(spec, chosen))
    whole_notes = [settings_words(spec, differing) for spec in specs]
    if len(set(whole_notes)) > len(set(notes)):
        notes = whole_notes
    # runs with the same settings, such as a repeated one: only a number tells them apart
    many = Counter(notes)
    numbers: Counter[str] = Counter()
    told_apart = []
    for note in notes:
        if many[note] > 1:
            numbers[note] += 1
            note = f"{note}, run {numbers[note]}".removeprefix(", ")  # equal runs may have no setting before it
        told_apart.append(note)
    return told_apart


def _is_default(spec: Mapping[str, Any], name: str) -> bool:
    return name in _DEFAULTS and spec.get(name) == _DEFAULTS[name]


def settings_words(spec: Mapping[str, Any], names: Iterable[str]) -> str:
    """Write fields of a spec: `settings_words({"prefetch": 0}, ["prefetch", "card"]) == "prefetch 0, card none"`."""
    words = []
    for name in names:
        value = spec.get(name)
        if name == "card" and value:
            value = size(value)
        words.append(SETTINGS[name].format("none" if value is None else value))
    return ", ".join(words)


# ---- where the numbers come from


def ranks_and_device(runs: list[RunView]) -> str:
    """Return `"2 CPU ranks"`, the words of every subtitle; of one run's traces `"2 of 8 NVIDIA A100 ranks"`."""
    kind = "CPU" if all(run.device == "cpu" for run in runs) else "GPU"
    if len(runs) == 1 and runs[0].summary.traces is not None:
        return _ranks_of_traces(runs[0], runs[0].summary.traces, kind)
    # the twin replays the batches of all ranks in one process
    compared = [run for run in runs if run.engine != "twin"]
    # a twin that is alone is described by itself
    sizes = sorted({run.world_size for run in compared or runs})
    if len(sizes) == 1:
        return plural(sizes[0], f"{kind} rank")
    # runs of several sizes: `2 and 4 CPU ranks`
    numbers = " and ".join(map(str, sizes))
    return f"{numbers} {kind} ranks"


def _ranks_of_traces(run: RunView, traces: Traces, kind: str) -> str:
    device = run.environment.get("device_name") or kind
    ranks = plural(run.world_size, f"{device} rank")
    # the traces of some ranks only were given
    if traces.ranks < run.world_size:
        return f"{traces.ranks} of {ranks}"
    return ranks


def how_and_where(runs: list[RunView]) -> str:
    """Return `"Measured on 2 CPU ranks"`, `"Simulated for 16 GPU ranks"`, `"Simulated on the steady card"`; where some
    of the runs are simulated, which.
    """
    simulated = [run for run in runs if run.simulated]
    measured = [run for run in runs if not run.simulated]
    if not simulated:
        return f"Measured on {ranks_and_device(measured)}" if measured else ""
    where = f"for {ranks_and_device(simulated)}"
    if all(run.spec.get("gpu") == STEADY_CARD for run in simulated):
        where = f"on the {STEADY_CARD} {where.replace('GPU ', '')}"  # which is no GPU
    if not measured:
        return f"Simulated {where}"
    names = ", ".join(run.label for run in simulated)
    return f"Measured on {ranks_and_device(measured)} and simulated {where} ({names})"


def missing(runs: Iterable[RunView], drawn: Iterable[RunView], why: str) -> str:
    """Name the runs that a figure of these leaves out, for its subtitle: `no_shard is missing: it failed`; `why` is the
    reason of one that came to its end.
    """
    # by label, which `views` has made unique
    labels = [run.label for run in drawn]
    ends = {"failed": "failed", "out_of_memory": "ran out of memory"}
    clauses = []
    for run in runs:
        if run.label not in labels:
            reason = ends.get(run.status, why)
            clauses.append(f"{run.label} is missing: it {reason}")
    return "; ".join(clauses)


# ---- what was measured, computed, emulated and simulated: each sentence is a row, and stands where it applies


@dataclass(frozen=True)
class _Groups:
    """The runs of a comparison by where their numbers come from."""

    runs: list[RunView]
    own: list[RunView]  # processes that the lab started or recorded
    traced: list[RunView]  # known by their traces alone
    simulated: list[RunView]


def provenance(runs: list[RunView]) -> list[tuple[str, str]]:
    """Return the measured, computed, emulated and simulated quantities of a comparison, as (origin, text) pairs."""
    groups = _Groups(
        runs,
        own=[run for run in runs if not run.traced and not run.simulated],
        traced=[run for run in runs if run.traced],
        simulated=[run for run in runs if run.simulated],
    )
    pairs = [
        # a row each; one whose text is empty does not apply and is left out
        ("measured", _measured(groups)),
        *[("not seen", note) for run in groups.own for note in run.summary.notes],
        *[("measured", _measured_by_profiler(run)) for run in groups.traced],
        ("not in the traces", _not_in_traces(groups)),
        ("computed", _computed(groups)),
        ("cores", _cores(groups)),
        ("predicted", _predicted(groups)),
        ("predicted", _predicted_from_runs(groups)),
        # these two are always shown, so that "nothing" answers the question what was not real
        ("emulated", _emulated(runs) or "nothing"),
        ("simulated", _simulated(groups) or "nothing"),
    ]
    return [(origin, text) for origin, text in pairs if text]


def _measured(groups: _Groups) -> str:
    if not groups.own:
        return ""
    recorded = all(run.recorded for run in groups.own)
    where = "a job of its own" if recorded else "real processes of one machine"
    quantities = "step time, tokens/s, peak memory, bytes sent, losses"
    return f"{quantities}: on {ranks_and_device(groups.own)}, {where}"


def _measured_by_profiler(run: RunView) -> str:
    where = [ranks_and_device([run])]
    if run.environment.get("backend"):
        where.append(f"backend {run.environment['backend']}")
    if run.environment.get("torch"):
        where.append(f"PyTorch {run.environment['torch']}")
    quantities = ["step time", "exposed time", *_told_by(run)]
    return f"{', '.join(quantities)}: by PyTorch's profiler on {', '.join(where)}"


def _told_by(run: RunView) -> list[str]:
    """Return what these traces tell, and others do not."""
    quantities = []
    if run.peak is not None:
        quantities.append("peak memory")
    if run.summary.comm.bytes_per_step is not None:
        quantities.append("bytes sent")
    return quantities


def _not_in_traces(groups: _Groups) -> str:
    if not groups.traced:
        return ""
    told: set[str] = set()
    for run in groups.traced:
        told.update(_told_by(run))
    # what none of these traces tells; tokens and losses are in no trace at all
    untold = [quantity for quantity in ("peak memory", "bytes sent") if quantity not in told]
    return ", ".join([*untold, "tokens/s", "losses"])


def _computed(groups: _Groups) -> str:
    if groups.simulated or any(not run.recorded for run in groups.own):
        return "formula: the bytes that each strategy must send"
    return ""


def _cores(groups: _Groups) -> str:
    shares = []
    for run in groups.own:
        share = run.summary.cpu_share
        if share is not None and share < _ALL_CORES:
            shares.append(f"{run.label} {percent(share)}")
    if not shares:
        return ""
    return f"the part of their step for which ranks had a core when they wanted one: {', '.join(shares)}"


def _sources_of_steps(groups: _Groups) -> set[str]:
    """Return from which runs steps are predicted; "" stands for this machine's calibration."""
    if not any(run.predicted_split for run in groups.own):
        return set()
    return {run.summary.predicted.step_from for run in groups.own if run.summary.predicted.step_time_s}


def _predicted(groups: _Groups) -> str:
    if not any(run.predicted_split for run in groups.own):
        return ""
    quantities = "peak memory by category, from the engine's own layouts and schedule"
    if "" in _sources_of_steps(groups):
        quantities += ", and step time from this machine's calibration"
    return f"{quantities}; before the run"


def _predicted_from_runs(groups: _Groups) -> str:
    sources = _sources_of_steps(groups) - {""}
    if not sources:
        return ""
    names = " and ".join(sorted(sources))
    return f"step time of the others, from what was measured of {names}"


def _emulated(runs: list[RunView]) -> str:
    links = emulated_links(runs)
    sentences = []
    if any(run.card and run.card_emulated for run in runs):
        sentences.append("the card: a run whose counted bytes exceed it goes on, and is marked")
    if links:
        sentences.append(f"the link ({links}): collectives take the time that it would need")
    if any("ranks_on_one_gpu" in run.provenance for run in runs):
        sentences.append("several GPUs: ranks take turns on one, so that step times say little of as many")
    return "; ".join(sentences)


def emulated_links(runs: list[RunView]) -> str:
    """Return the names of the emulated links that occur: `"25gbe"`, `"25gbe, eth10"`; empty without any."""
    links = set()
    for run in runs:
        # a run before its start has asked for a link; one that ran has recorded which it got
        name = run.spec.get("emulate") or run.spec.get("link")
        if run.summary.link:
            name = run.summary.link.name
        if name:
            links.add(str(name))
    return ", ".join(sorted(links))


def _simulated(groups: _Groups) -> str:
    if groups.simulated:
        names = ", ".join(dict.fromkeys(run.label for run in groups.simulated))
        quantities = "step time, tokens/s, exposed time, memory, bytes sent"
        return f"{quantities}: of {names}, for {ranks_and_device(groups.simulated)}"
    if any(run.steady.step_time_s for run in groups.own):
        return f"the step on the {STEADY_CARD}, and what of its communication is hidden there"
    return ""
