"""One run for figures and pages, from a record or from the JSON of a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeGuard

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.words import plural
from fsdplab.records import RunRecord
from fsdplab.sessions.spec import ENGINES

CATEGORY_NAMES = {row.name: row.words for row in CATEGORY_ROWS.values()}
UNSPLIT = "no category"  # a peer's memory that could not be attributed to a category


@dataclass(frozen=True)
class TraceSource:
    """What traces of PyTorch's profiler say of where they were made; "" for what they do not say."""

    ranks: int
    device_name: str = ""
    backend: str = ""
    torch: str = ""


@dataclass(frozen=True)
class RunView:
    """One run as figures and pages read it: sizes in bytes, times in seconds, None for what was not measured."""

    strategy: str
    engine: str
    world_size: int
    status: str = "finished"
    step_median: float | None = None
    step_min: float | None = None
    tokens_per_s: float | None = None
    peak: int | None = None
    split: Mapping[str, int] = field(default_factory=dict)
    comm_bytes: int | None = None
    formula_bytes: int | None = None
    losses: tuple[float, ...] = ()
    matches: bool | None = None
    card: int | None = None
    card_emulated: bool = True
    device: str = "cpu"
    exposed_s: float | None = None
    overlap: float | None = None
    link: str | None = None
    one_gpu: bool = False  # whether ranks shared a GPU, or rehearsed it
    traced: TraceSource | None = None  # of a run that is known by its traces alone
    simulated: bool = False
    note: str = ""
    precision: str = ""
    predicted_split: Mapping[str, int] = field(default_factory=dict)
    predicted_step: float | None = None
    why_not_predicted: str = ""

    @property
    def predicted_peak(self) -> int | None:
        """The peak by arithmetic; None where it is not predicted."""
        return sum(self.predicted_split.values()) or None

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
    def known_peak(self) -> int:
        """The peak of a run whose memory was measured."""
        assert self.peak is not None, f"{self.label} has no peak"
        return self.peak

    @property
    def known_step(self) -> float:
        """The median step of a run that has one."""
        assert self.step_median is not None, f"{self.label} has no timed step"
        return self.step_median

    @property
    def over_card(self) -> bool:
        """Whether this run's memory did not fit the card."""
        return self.status == "out_of_memory" or bool(self.card and self.peak and self.peak > self.card)


# what a figure of several runs takes: records, views of them, or the dict of a comparison
Runs: TypeAlias = RunRecord | RunView | Mapping[str, Any] | Iterable[RunRecord | RunView]


def views(runs: Runs) -> list[RunView]:
    """RunViews of one record, of several records, or of a comparison dict (`{"runs": [...], "spec": ...}`)."""
    if isinstance(runs, (RunView, RunRecord)) or _is_one(runs):
        return [view(runs)]
    if isinstance(runs, Mapping):
        seen = [from_json(run, runs.get("spec") or {}, runs.get("environment") or {}) for run in runs["runs"]]
        return disambiguate_labels(seen, [{} for _ in seen])
    if not isinstance(runs, Iterable):
        raise TypeError(
            f"a figure draws run records or a comparison dict, got {type(runs).__name__}; pass what run() or compare()"
            " returned"
        )
    runs = list(runs)
    return disambiguate_labels([view(run) for run in runs], [getattr(run, "spec", {}) for run in runs])


def _is_one(runs: Runs) -> TypeGuard[RunRecord]:
    """Whether this is one run: anything with a summary."""
    return hasattr(runs, "summary")


def disambiguate_labels(seen: list[RunView], specs: Sequence[Mapping[str, Any]]) -> list[RunView]:
    """The views with a note wherever several have one name, because bars of one name would be drawn as one.

    Two runs of full_shard become `full_shard, prefetch 0` and `full_shard, prefetch 1`; equal runs are numbered.
    """
    noted = list(seen)
    for label in {run.label for run in seen}:
        same = [index for index, run in enumerate(seen) if run.label == label]
        if len(same) > 1:
            for place, (index, note) in enumerate(zip(same, _notes([seen[i] for i in same], [specs[i] for i in same]))):
                noted[index] = replace(seen[index], note=note or f"run {place + 1}")
    return noted


def _notes(seen: list[RunView], specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The difference between runs of one name: their ranks, else fields of their specs, else nothing."""
    described = [{"world_size": run.world_size, **spec} for run, spec in zip(seen, specs)]
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
    spec, summary = run.spec, run.summary or {}
    card = summary.get("card") or {}
    same_fields = {
        **summary,
        "status": run.status,
        "strategy": spec["strategy"],
        "engine": spec["engine"],
        "world_size": spec["world_size"],
        "provenance": run.provenance,
    }
    same_fields["predicted"] = {
        **(summary.get("predicted") or {}), "comm_bytes_per_step": summary.get("formula_bytes_per_step")
    }  # fmt: skip
    known = from_json(same_fields, {"card": card.get("bytes") or spec.get("card")}, run.environment or {})
    link = (summary.get("link") or {}).get("name") or spec.get("emulate") or spec.get("link")
    return replace(
        known,
        link=link,
        card_emulated=run.provenance.get("card", "emulated") == "emulated",
        one_gpu="ranks_on_one_gpu" in run.provenance,
        precision=str(spec.get("precision") or ""),
        traced=_trace_source(run),
    )


def _trace_source(run: RunRecord) -> TraceSource | None:
    traces = run.summary.get("traces")
    if not traces:
        return None
    said = {name: str((run.environment or {}).get(name) or "") for name in ("device_name", "backend", "torch")}
    return TraceSource(traces["ranks"], **said)


def from_json(run: Mapping[str, Any], spec: Mapping[str, Any], environment: Mapping[str, Any]) -> RunView:
    """The RunView of one entry of a comparison's `runs` (fields of records/comparison.py)."""
    step, peak, comm, predicted = (
        run.get(key) or {} for key in ("step_time_s", "peak_memory_bytes", "comm", "predicted")
    )
    device = environment.get("device") or spec.get("device") or "cpu"
    seen = RunView(
        strategy=run["strategy"],
        engine=run["engine"],
        world_size=run["world_size"],
        step_median=step.get("median"),
        step_min=step.get("min"),
        tokens_per_s=run.get("tokens_per_s"),
        peak=peak.get("total"),
        split={name: nbytes for name, nbytes in (peak.get("by_category") or {}).items() if nbytes is not None},
        comm_bytes=comm.get("bytes_per_step"),
        formula_bytes=predicted.get("comm_bytes_per_step"),
        predicted_split=(predicted.get("peak_memory_bytes") or {}).get("by_category") or {},
        predicted_step=predicted.get("step_time_s"),
        why_not_predicted=predicted.get("why_not") or "",
        precision=str(spec.get("precision") or ""),
        losses=tuple(run.get("losses") or ()),
        matches=run.get("matches_reference"),
        card=spec.get("card"),
        card_emulated=device != "cuda",
        device="cpu" if device == "auto" else str(device),
        exposed_s=comm.get("exposed_s"),
        overlap=comm.get("overlap"),
        link=spec.get("emulate") or spec.get("link"),
        simulated="simulated" in [(run.get("provenance") or {}).get(name) for name in ("step_time_s", "exposed_s")],
    )
    status = run.get("status")
    if status == "failed":  # what it did until then is no whole step's, and not to be compared with whole runs
        return replace(seen, status=status, step_median=None, step_min=None, tokens_per_s=None, comm_bytes=None)
    return replace(seen, status="out_of_memory") if seen.over_card else replace(seen, status=status or "finished")


def ranks_and_device(runs: list[RunView]) -> str:
    """`"2 CPU ranks"`, the words of every subtitle."""
    if len(runs) == 1 and runs[0].traced is not None:
        return _traced_ranks(runs[0], runs[0].traced)
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


def _traced_ranks(run: RunView, traced: TraceSource) -> str:
    """`"2 of 8 NVIDIA A100 ranks"`."""
    of_job = f"{traced.ranks} of " if traced.ranks < run.world_size else ""
    kind = traced.device_name or ("CPU" if run.device == "cpu" else "GPU")
    return f"{of_job}{plural(run.world_size, f'{kind} rank')}"


def provenance(runs: list[RunView]) -> list[tuple[str, str]]:
    """The measured, computed, emulated and simulated quantities of a comparison, as (origin, text) pairs."""
    traced = [run for run in runs if run.traced is not None]
    own = [run for run in runs if run.traced is None and not run.simulated]
    simulated = [run for run in runs if run.simulated]
    pairs = ([("measured", _measured(own))] if own else []) + [("measured", _traced(run)) for run in traced]
    pairs += [("not in the traces", "memory, tokens/s, bytes sent, losses")] if traced else []
    pairs += [("computed", "formula: the bytes that each strategy must send")] if own or simulated else []
    pairs += [("predicted", _predicted(own))] if any(run.predicted_split for run in own) else []
    pairs += [("emulated", "; ".join(_emulated(runs)) or "nothing")]
    return [*pairs, ("simulated", _simulated(simulated) if simulated else "nothing")]


def _predicted(runs: list[RunView]) -> str:
    seconds = ", and step time from this machine's calibration" if any(run.predicted_step for run in runs) else ""
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
    assert run.traced is not None, f"{run.label} is no trace"
    backend = run.traced.backend and f"backend {run.traced.backend}"
    torch = run.traced.torch and f"PyTorch {run.traced.torch}"
    where = ", ".join(filter(None, (ranks_and_device([run]), backend, torch)))
    return f"step time, exposed time: by PyTorch's profiler on {where}"


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
