"""One run for figures and pages, from a record or from the JSON of a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeGuard

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.words import plural
from fsdplab.records import RunRecord, Spread, Summary
from fsdplab.records.summary import Traces
from fsdplab.sessions.spec import ENGINES

CATEGORY_NAMES = {row.name: row.words for row in CATEGORY_ROWS.values()}
_ALL_CORES = 0.95  # of a step: less is told, as other work took a core now and then
UNSPLIT = "no category"  # a peer's memory that could not be attributed to a category


@dataclass(frozen=True)
class RunView:
    """One run as figures and pages read it: its summary, and what its spec, environment and provenance say beside it.

    `strategy` is what the run is called; `matches`: whether its losses agree with the reference's.
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
        """`full_shard` for the lab's own engine, `torch-fsdp2` or `torch-fsdp2 zero2` for others; then a note if other
        runs have that name.
        """
        return f"{self._name}, {self.note}" if self.note else self._name

    @property
    def _name(self) -> str:
        if self.engine in ("lab", "twin"):
            return self.strategy if self.engine == "lab" else "twin"
        implied = ENGINES.get(self.engine, ("",))[0]  # what the engine is best known for
        return self.engine if self.strategy == implied else f"{self.engine} {self.strategy}"

    @property
    def step_median(self) -> float | None:
        """Seconds of the median timed step."""
        return self.summary.step_time_s.median

    @property
    def known_step(self) -> float:
        """The median step of a run that has one."""
        assert self.step_median is not None, f"{self.label} has no timed step"
        return self.step_median

    @property
    def peak(self) -> int | None:
        """Bytes at the peak of the worst rank."""
        return self.summary.peak_memory_bytes.total

    @property
    def known_peak(self) -> int:
        """The peak of a run whose memory was measured."""
        assert self.peak is not None, f"{self.label} has no peak"
        return self.peak

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
    def formula_bytes(self) -> int | None:
        """Bytes that one rank must send in a step, by the strategy's formula."""
        return self.summary.formula_bytes_per_step

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all ranks in a second."""
        return self.summary.tokens_per_s

    @property
    def exposed_s(self) -> float | None:
        """Seconds of communication a step that no computing hid."""
        return self.summary.comm.exposed_s

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
    def link(self) -> str | None:
        """The name of the emulated link."""
        return self.summary.link.name if self.summary.link else self.spec.get("emulate") or self.spec.get("link")

    @property
    def one_gpu(self) -> bool:
        """Whether ranks shared a GPU, or rehearsed it."""
        return "ranks_on_one_gpu" in self.provenance

    @property
    def simulated(self) -> bool:
        """Whether its times come from a simulation."""
        return "simulated" in [self.provenance.get(name) for name in ("step_time_s", "exposed_s")]

    @property
    def traced(self) -> Traces | None:
        """The traces of a run that is known by them alone."""
        return self.summary.traces


# what a figure of several runs takes: records, views of them, or the dict of a comparison
Runs: TypeAlias = RunRecord | RunView | Mapping[str, Any] | Iterable[RunRecord | RunView]


def views(runs: Runs) -> list[RunView]:
    """RunViews of one record, of several records, or of a comparison dict (`{"runs": [...], "spec": ...}`)."""
    if isinstance(runs, (RunView, RunRecord)) or _is_one(runs):
        return [view(runs)]
    if isinstance(runs, Mapping):
        seen = [from_json(run, runs.get("spec") or {}, runs.get("environment") or {}) for run in runs["runs"]]
        return disambiguate_labels(seen)
    if not isinstance(runs, Iterable):
        raise TypeError(
            f"a figure draws run records or a comparison dict, got {type(runs).__name__}; pass what run() or compare()"
            " returned"
        )
    return disambiguate_labels([view(run) for run in runs])


def with_verdicts(runs: Iterable[RunRecord | RunView], comparison: Mapping[str, Any]) -> list[RunView]:
    """The runs as figures and tables read them; where only the comparison judged their losses, with its verdict."""
    seen, entries = views(runs), comparison.get("runs") or []
    if len(seen) != len(entries):
        return seen
    judged = [entry.get("matches_reference") for entry in entries]
    return [replace(run, matches=each) if run.matches is None else run for run, each in zip(seen, judged)]


def _is_one(runs: Runs) -> TypeGuard[RunRecord]:
    """Whether this is one run: anything with a summary."""
    return hasattr(runs, "summary")


def disambiguate_labels(seen: list[RunView]) -> list[RunView]:
    """The views with a note wherever several have one name, because bars of one name would be drawn as one.

    Two runs of full_shard become `full_shard, prefetch 0` and `full_shard, prefetch 1`; equal runs are numbered.
    """
    noted = list(seen)
    for label in {run.label for run in seen}:
        same = [index for index, run in enumerate(seen) if run.label == label]
        if len(same) > 1:
            for place, (index, note) in enumerate(zip(same, _notes([seen[i] for i in same]))):
                noted[index] = replace(seen[index], note=note or f"run {place + 1}")
    return noted


def _notes(seen: list[RunView]) -> list[str]:
    """The difference between runs of one name: their ranks, else fields of their specs, else nothing."""
    described = [{**run.spec, "world_size": run.world_size} for run in seen]
    differing = [name for name in _TELLING if len({str(fields.get(name)) for fields in described}) > 1]
    notes = [", ".join(_TELLING[name].format(_none(fields.get(name))) for name in differing) for fields in described]
    return (
        notes
        if len(set(notes)) == len(notes)
        else [f"{note}, run {place + 1}".removeprefix(", ") for place, note in enumerate(notes)]
    )


def _none(value: object) -> object:
    return "none" if value is None else value


_TELLING = {
    "model": "{}", "world_size": "{} ranks", "shard_size": "{} ranks a shard group", "emulate": "as {}",
    "link": "link {}",
    "link_across": "across {}", "link_queues": "{} queues", "prefetch": "prefetch {}", "units": "units {}",
    "precision": "{}",
    "batch_size": "batch {}", "sequence_length": "{} tokens", "micro_batches": "{} micro-batches",
    "checkpoint": "checkpoint {}",
    "offload": "offload {}", "transport": "{}", "optimizer": "{}",
}  # fmt: skip


def view(run: RunRecord | RunView) -> RunView:
    """The RunView of one record (anything with `.spec`, `.summary`, `.status`); a RunView passes through."""
    if isinstance(run, RunView):
        return run
    names = {name: run.spec[name] for name in ("strategy", "engine", "world_size")}
    known = RunView(**names, spec=run.spec, environment=run.environment or {}, provenance=run.provenance)
    return _with_result(known, run.summary, run.status)


def from_json(run: Mapping[str, Any], spec: Mapping[str, Any], environment: Mapping[str, Any]) -> RunView:
    """The RunView of one entry of a comparison's `runs` (fields of records/comparison.py)."""
    predicted = run.get("predicted") or {}
    summary = Summary.from_dict({**run, "formula_bytes_per_step": predicted.get("comm_bytes_per_step")}, "runs")
    names = {name: run[name] for name in ("strategy", "engine", "world_size")}
    origins = run.get("provenance") or {}
    known = RunView(
        **names, spec=spec, environment=environment, provenance=origins, matches=run.get("matches_reference")
    )
    return _with_result(known, summary, run.get("status") or "finished")


def _with_result(known: RunView, summary: Summary, status: str) -> RunView:
    """The run with what it did; of one that failed, which is no whole step's, without what whole runs have."""
    seen = replace(known, summary=summary, status=status)
    if status == "failed":
        partly = replace(
            summary, step_time_s=Spread(), tokens_per_s=None, comm=replace(summary.comm, bytes_per_step=None)
        )
        return replace(seen, summary=partly)
    return replace(seen, status="out_of_memory") if seen.over_card else seen


def ranks_and_device(runs: list[RunView]) -> str:
    """`"2 CPU ranks"`, the words of every subtitle."""
    if len(runs) == 1 and runs[0].traced is not None:
        return _traced_ranks(runs[0], runs[0].traced.ranks)
    sizes = sorted({run.world_size for run in runs if run.engine != "twin"} or {run.world_size for run in runs})
    kind = "CPU" if all(run.device == "cpu" for run in runs) else "GPU"
    return plural(sizes[0], f"{kind} rank") if len(sizes) == 1 else f"{' and '.join(map(str, sizes))} {kind} ranks"


def how_and_where(runs: list[RunView]) -> str:
    """`"Measured on 2 CPU ranks"`, `"Simulated for 16 GPU ranks"`; where some of the runs are simulated, which."""
    simulated, others = [run for run in runs if run.simulated], [run for run in runs if not run.simulated]
    words = [f"Measured on {ranks_and_device(others)}"] if others else []
    if simulated:
        named = f" ({', '.join(run.label for run in simulated)})" if others else ""
        words.append(f"{'simulated' if others else 'Simulated'} for {ranks_and_device(simulated)}{named}")
    return " and ".join(words)


def _traced_ranks(run: RunView, ranks: int) -> str:
    """`"2 of 8 NVIDIA A100 ranks"`."""
    of_job = f"{ranks} of " if ranks < run.world_size else ""
    kind = run.environment.get("device_name") or ("CPU" if run.device == "cpu" else "GPU")
    return f"{of_job}{plural(run.world_size, f'{kind} rank')}"


def provenance(runs: list[RunView]) -> list[tuple[str, str]]:
    """The measured, computed, emulated and simulated quantities of a comparison, as (origin, text) pairs."""
    traced = [run for run in runs if run.traced is not None]
    own = [run for run in runs if run.traced is None and not run.simulated]
    simulated = [run for run in runs if run.simulated]
    pairs = ([("measured", _measured(own))] if own else []) + [("measured", _traced(run)) for run in traced]
    pairs += [("not in the traces", _absent(traced))] if traced else []
    pairs += [("computed", "formula: the bytes that each strategy must send")] if own or simulated else []
    pairs += [("cores", words)] if (words := _cores(own)) else []
    pairs += [("predicted", _predicted(own))] if any(run.predicted_split for run in own) else []
    pairs += [("emulated", "; ".join(_emulated(runs)) or "nothing")]
    return [*pairs, ("simulated", _simulated(simulated) if simulated else "nothing")]


def _cores(runs: list[RunView]) -> str:
    """The part of the step in which ranks had a core, of the runs that had one for less than 95 %."""
    shares = [(run.label, run.summary.cpu_share) for run in runs]
    low = [f"{label} {share:.0%}" for label, share in shares if share is not None and share < _ALL_CORES]
    return f"the part of their steps in which ranks had a core when they wanted one: {', '.join(low)}" if low else ""


def _predicted(runs: list[RunView]) -> str:
    seconds = (
        ", and step time from this machine's calibration"
        if any(run.summary.predicted.step_time_s for run in runs)
        else ""
    )
    return f"peak memory by category, from the engine's own layouts and schedule{seconds}; before the run"


def _simulated(runs: list[RunView]) -> str:
    names = ", ".join(dict.fromkeys(run.label for run in runs))
    return f"step time, tokens/s, exposed time, memory, bytes sent: of {names}, for {ranks_and_device(runs)}"


def _measured(runs: list[RunView]) -> str:
    return (
        f"step time, tokens/s, peak memory, bytes sent, losses: on {ranks_and_device(runs)}, real processes of one"
        " machine"
    )


def _traced(run: RunView) -> str:
    """What a trace measured, and where, in its own words."""
    words = {"backend": "backend {}", "torch": "PyTorch {}"}
    said = [form.format(run.environment[name]) for name, form in words.items() if run.environment.get(name)]
    where = ", ".join([ranks_and_device([run]), *said])
    held = ["step time", "exposed time", *(name for name, value in _of_traces(run).items() if value is not None)]
    return f"{', '.join(held)}: by PyTorch's profiler on {where}"


def _of_traces(run: RunView) -> dict[str, int | None]:
    """What some traces tell and others do not."""
    return {"peak memory": run.peak, "bytes sent": run.summary.comm.bytes_per_step}


def _absent(traced: list[RunView]) -> str:
    """What none of the traces tells."""
    some = [name for name in _of_traces(traced[0]) if all(_of_traces(run)[name] is None for run in traced)]
    return ", ".join([*some, "tokens/s", "losses"])


def _emulated(runs: list[RunView]) -> list[str]:
    emulated = (
        ["the card: a run whose counted bytes exceed it ends as out of memory"]
        if any(run.card and run.card_emulated for run in runs)
        else []
    )
    emulated += (
        [f"the link ({', '.join(links)}): collectives take the time that it would need"]
        if (links := emulated_links(runs))
        else []
    )
    emulated += (
        ["several GPUs: ranks take turns on one, so that step times say little of as many"]
        if any(run.one_gpu for run in runs)
        else []
    )
    return emulated


def emulated_links(runs: list[RunView]) -> list[str]:
    """The names of the emulated links that occur: `["25gbe"]`."""
    return sorted({str(run.link) for run in runs if run.link})
