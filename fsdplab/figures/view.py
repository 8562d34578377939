"""One run for figures and pages, from a record or from the JSON of a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import size
from fsdplab.common.words import plural
from fsdplab.records import RunRecord, Spread, Summary
from fsdplab.records.summary import Steady
from fsdplab.sessions.spec import ENGINES, RunSpec
from fsdplab.sessions.steady_card import STEADY_CARD

CATEGORY_NAMES = {row.name: row.title for row in CATEGORY_ROWS.values()}
UNSPLIT = "no category"  # a peer's memory that could not be attributed to a category
_DEFAULTS = {each.name: each.default for each in fields(RunSpec)}
_ALL_CORES = 0.95  # of a step: less is told, as other work took a core now and then
# how the fields of a spec that tell runs apart are written
SETTINGS = {
    "model": "{}", "world_size": "{} ranks", "shard_size": "{} ranks a shard group", "emulate": "as {}",
    "link": "link {}", "link_across": "across {}", "link_queues": "{} queues", "prefetch": "prefetch {}",
    "units": "units {}", "precision": "{}", "batch_size": "batch {}", "sequence_length": "{} tokens",
    "micro_batches": "{} micro-batches", "checkpoint": "checkpoint {}", "offload": "offload {}", "transport": "{}",
    "optimizer": "{}", "card": "card {}",
}  # fmt: skip


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
        if self.recorded:
            name = str(self.spec["job"])
        elif self.engine in ("lab", "twin"):
            name = self.strategy if self.engine == "lab" else "twin"
        else:
            implied = ENGINES.get(self.engine, ("",))[0]  # what the engine is best known for
            name = self.engine if self.strategy == implied else f"{self.engine} {self.strategy}"
        return f"{name}, {self.note}" if self.note else name

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
        said = self.environment.get("device") or self.spec.get("device") or "cpu"
        return "cpu" if said == "auto" else str(said)

    @property
    def card(self) -> int | None:
        """The card's bytes."""
        known = self.summary.card.bytes if self.summary.card else None
        return known or self.spec.get("card")

    @property
    def card_emulated(self) -> bool:
        """Whether the card is emulated, as that of CPU ranks is."""
        return self.provenance.get("card", "emulated") == "emulated"

    @property
    def over_card(self) -> bool:
        """Whether this run's memory did not fit the card."""
        return self.status == "out_of_memory" or bool(self.card and self.peak and self.peak > self.card)

    @property
    def simulated(self) -> bool:
        """Whether its times come from a simulation."""
        return "simulated" in [self.provenance.get(name) for name in ("step_time_s", "exposed_s")]

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
    """RunViews of one record, of several records, or of a comparison dict (`{"runs": [...], "spec": ...}`)."""
    if isinstance(runs, (RunView, RunRecord)):
        return [view(runs)]
    if isinstance(runs, Mapping):
        return disambiguate_labels([_of_entry(entry, runs) for entry in runs["runs"]])
    if not isinstance(runs, Iterable):
        raise TypeError(
            f"a figure draws run records or a comparison dict, got {type(runs).__name__}; pass what run() or compare()"
            " returned"
        )
    return disambiguate_labels([view(run) for run in runs])


def view(run: RunRecord | RunView) -> RunView:
    """The RunView of one record; a RunView passes through.

    One that failed did no whole step, and has nothing of what whole steps have.
    """
    if isinstance(run, RunView):
        return run
    names = {name: run.spec[name] for name in ("strategy", "engine", "world_size")}
    seen = RunView(**names, summary=run.summary, status=run.status, spec=run.spec, provenance=run.provenance)
    seen = replace(seen, environment=run.environment or {})
    if run.status == "failed":
        comm = replace(run.summary.comm, bytes_per_step=None)
        return replace(seen, summary=replace(run.summary, step_time_s=Spread(), tokens_per_s=None, comm=comm))
    return seen


def _of_entry(entry: Mapping[str, Any], comparison: Mapping[str, Any]) -> RunView:
    """The RunView of one entry of a comparison's `runs` (fields of records/comparison.py)."""
    formula = (entry.get("predicted") or {}).get("comm_bytes_per_step")
    record = RunRecord(
        Path(),
        (comparison.get("spec") or {}) | {name: entry[name] for name in ("strategy", "engine", "world_size")},
        comparison.get("environment") or {},
        entry.get("status") or "finished",
        summary=Summary.from_dict({**entry, "formula_bytes_per_step": formula}, "runs"),
        provenance=entry.get("provenance") or {},
    )
    return replace(view(record), matches=entry.get("matches_reference"))


def with_verdicts(runs: Iterable[RunRecord | RunView], comparison: Mapping[str, Any]) -> list[RunView]:
    """The runs as figures and tables read them; where only the comparison judged their losses, with its verdict."""
    seen, entries = views(runs), comparison.get("runs") or []
    if len(seen) != len(entries):
        return seen
    judged = [entry.get("matches_reference") for entry in entries]
    return [replace(run, matches=each) if run.matches is None else run for run, each in zip(seen, judged)]


def disambiguate_labels(seen: list[RunView]) -> list[RunView]:
    """The views with a note wherever several have one name, because bars of one name would be drawn as one.

    Two runs of full_shard become `full_shard` and `full_shard, prefetch 0`; equal runs are numbered.
    """
    noted = list(seen)
    for label in {run.label for run in seen}:
        same = [place for place, run in enumerate(seen) if run.label == label]
        specs = [{**seen[place].spec, "world_size": seen[place].world_size} for place in same]
        differing = [name for name in SETTINGS if len({str(spec.get(name)) for spec in specs}) > 1]
        notes = [settings_words(spec, [name for name in differing if not _is_default(spec, name)]) for spec in specs]
        if len(set(notes)) < len(same):
            notes = [settings_words(spec, differing) for spec in specs]
        if len(set(notes)) < len(same):
            notes = [f"{note}, run {number}".removeprefix(", ") for number, note in enumerate(notes, 1)]
        if len(same) > 1:
            noted = [replace(run, note=notes[same.index(at)]) if at in same else run for at, run in enumerate(noted)]
    return noted


def _is_default(spec: Mapping[str, Any], name: str) -> bool:
    return name in _DEFAULTS and spec.get(name) == _DEFAULTS[name]


def settings_words(spec: Mapping[str, Any], names: Iterable[str]) -> str:
    """Fields of a spec: `settings_words({"prefetch": 0}, ["prefetch", "card"]) == "prefetch 0, card none"`."""
    values = {name: size(spec[name]) if name == "card" and spec.get(name) else spec.get(name) for name in names}
    return ", ".join(SETTINGS[name].format("none" if value is None else value) for name, value in values.items())


def ranks_and_device(runs: list[RunView]) -> str:
    """`"2 CPU ranks"`, the words of every subtitle; of one run's traces `"2 of 8 NVIDIA A100 ranks"`."""
    kind = "CPU" if all(run.device == "cpu" for run in runs) else "GPU"
    if len(runs) == 1 and (traces := runs[0].summary.traces) is not None:
        ranks = plural(runs[0].world_size, f"{runs[0].environment.get('device_name') or kind} rank")
        return f"{traces.ranks} of {ranks}" if traces.ranks < runs[0].world_size else ranks
    sizes = sorted({run.world_size for run in runs if run.engine != "twin"} or {run.world_size for run in runs})
    return plural(sizes[0], f"{kind} rank") if len(sizes) == 1 else f"{' and '.join(map(str, sizes))} {kind} ranks"


def how_and_where(runs: list[RunView]) -> str:
    """`"Measured on 2 CPU ranks"`, `"Simulated for 16 GPU ranks"`, `"Simulated on the steady card"`; where some of the
    runs are simulated, which.
    """
    simulated, others = [run for run in runs if run.simulated], [run for run in runs if not run.simulated]
    words = [f"Measured on {ranks_and_device(others)}"] if others else []
    if simulated:
        named = f" ({', '.join(run.label for run in simulated)})" if others else ""
        of_steady_card = all(run.spec.get("gpu") == STEADY_CARD for run in simulated)
        ranks = ranks_and_device(simulated)
        where = f"on the {STEADY_CARD} for {ranks.replace('GPU ', '')}" if of_steady_card else f"for {ranks}"
        words.append(f"{'simulated' if others else 'Simulated'} {where}{named}")
    return " and ".join(words)


def missing(runs: Iterable[RunView], drawn: Iterable[RunView], why: str) -> str:
    """The runs that a figure of these leaves out, for its subtitle: `no_shard is missing: it failed`; `why` is the
    reason of one that came to its end.
    """
    labels, ends = [run.label for run in drawn], {"failed": "failed", "out_of_memory": "ran out of memory"}
    left_out = [run for run in runs if run.label not in labels]
    return "; ".join(f"{run.label} is missing: it {ends.get(run.status, why)}" for run in left_out)


def provenance(runs: list[RunView]) -> list[tuple[str, str]]:
    """The measured, computed, emulated and simulated quantities of a comparison, as (origin, text) pairs."""
    own = [run for run in runs if not run.traced and not run.simulated]
    traced, simulated = [run for run in runs if run.traced], [run for run in runs if run.simulated]
    pairs = []
    if own:
        measured = "step time, tokens/s, peak memory, bytes sent, losses"
        where = "a job of its own" if all(run.recorded for run in own) else "real processes of one machine"
        pairs.append(("measured", f"{measured}: on {ranks_and_device(own)}, {where}"))
        pairs += [("not seen", note) for run in own for note in run.summary.notes]
    for run in traced:
        software = {"backend": run.environment.get("backend"), "PyTorch": run.environment.get("torch")}
        where = ", ".join([ranks_and_device([run]), *(f"{name} {said}" for name, said in software.items() if said)])
        told = ", ".join(["step time", "exposed time", *_told_by(run)])
        pairs.append(("measured", f"{told}: by PyTorch's profiler on {where}"))
    if traced:
        missing = [name for name in ("peak memory", "bytes sent") if not any(name in _told_by(run) for run in traced)]
        pairs.append(("not in the traces", ", ".join([*missing, "tokens/s", "losses"])))
    if any(not run.recorded for run in own) or simulated:
        pairs.append(("computed", "formula: the bytes that each strategy must send"))
    shares = [(run.label, run.summary.cpu_share) for run in own]
    if low := [f"{label} {share:.0%}" for label, share in shares if share is not None and share < _ALL_CORES]:
        had = "the part of their steps in which ranks had a core when they wanted one"
        pairs.append(("cores", f"{had}: {', '.join(low)}"))
    if any(run.predicted_split for run in own):
        sources = {run.summary.predicted.step_from for run in own if run.summary.predicted.step_time_s}
        step = ", and step time from this machine's calibration" if "" in sources else ""
        memory = "peak memory by category, from the engine's own layouts and schedule"
        pairs.append(("predicted", f"{memory}{step}; before the run"))
        if others := sources - {""}:
            from_runs = f"step time of the others, from what was measured of {' and '.join(sorted(others))}"
            pairs.append(("predicted", from_runs))
    words = "nothing"
    if simulated:
        names = ", ".join(dict.fromkeys(run.label for run in simulated))
        held = "step time, tokens/s, exposed time, memory, bytes sent"
        words = f"{held}: of {names}, for {ranks_and_device(simulated)}"
    elif any(run.steady.step_time_s for run in own):
        words = f"the step on the {STEADY_CARD}, and what of its communication is hidden there"
    return [*pairs, ("emulated", _emulated(runs)), ("simulated", words)]


def _told_by(run: RunView) -> list[str]:
    """What these traces tell, and others do not."""
    told = {"peak memory": run.peak, "bytes sent": run.summary.comm.bytes_per_step}
    return [name for name, value in told.items() if value is not None]


def _emulated(runs: list[RunView]) -> str:
    links = emulated_links(runs)
    said = {
        "the card: a run whose counted bytes exceed it goes on, and is marked": any(
            run.card and run.card_emulated for run in runs
        ),
        f"the link ({links}): collectives take the time that it would need": links,
        "several GPUs: ranks take turns on one, so that step times say little of as many": any(
            "ranks_on_one_gpu" in run.provenance for run in runs
        ),
    }
    return "; ".join(words for words, applies in said.items() if applies) or "nothing"


def emulated_links(runs: list[RunView]) -> str:
    """The names of the emulated links that occur: `"25gbe"`, `"25gbe, eth10"`; empty without any."""
    asked = [run.spec.get("emulate") or run.spec.get("link") for run in runs]
    links = [run.summary.link.name if run.summary.link else name for run, name in zip(runs, asked)]
    return ", ".join(sorted({str(link) for link in links if link}))
