"""Traces against the ledger, and speed: figures from the lab's own `run`, `compare` and `bench`, as large as fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from fsdplab.gpu_check.part import Work, first_line
from fsdplab.planning.hardware import find_gpu, gpu_of
from fsdplab.planning.memory import memory_of
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.step_time import model_flops
from fsdplab.profiling.exports import traces_of
from fsdplab.profiling.intervals import length, union
from fsdplab.profiling.traces.overlap import analyse_trace
from fsdplab.records import CATEGORIES, RunRecord, core_sentence
from fsdplab.records.summary import known
from fsdplab.sessions import RanksFailed, bench, compare
from fsdplab.workloads import preset
from fsdplab.workloads.compiled import missing_compiler

RECORDED: dict[str, dict[str, Any]] = {
    "cuda": dict(model="gpt-20m", batch_size=16, sequence_length=256, precision="bf16", steps=4, profile=2),
    "cpu": dict(profile=1),
}
LEDGER_TOLERANCE = 0.2  # the part by which ledger and trace may differ, beside the launches:
LAUNCH_S = 50e-6  # of each collective, which the one counts and the other does not
_OTHER = 0.05  # of the peak may have no category
_LOSSES = 0.02  # bf16 rounds differently in each engine; a wrong gradient shows by far more


# ---- 5. traces


def traces(work: Work) -> None:
    """Record profiled runs, with and without a link, and compare their traces with their ledgers. Lessons open them."""
    if work.ranks == 1:
        return work.note("One rank communicates nothing, so there is no trace to compare with a ledger.")
    settings = RECORDED[work.device]
    free = work.record("full_shard", **settings)
    _judge_trace(work, "full_shard", free)
    if free is not None:
        sent, step_s = known(free.summary.comm.bytes_per_step), known(free.summary.step_time_s.median)
        link = f"{max(1, round(sent / step_s / 1e6))}MB/s"  # communication then takes about as long as the step
        _judge_trace(work, f"full_shard behind {link}", work.record("linked", **settings, link=link))
    for strategy in ("shard_grad_op", "no_shard"):
        _judge_trace(work, strategy, work.record(strategy, **settings, strategy=strategy))


def _judge_trace(work: Work, name: str, record: RunRecord | None) -> None:
    if record is None:
        return
    record = RunRecord.load(work.keep(record.path, record.path.name))
    summary, found = record.summary, communication(record)
    device = analyse_trace(
        traces_of(record)[0], ledger=[row for row in record.table("ledger") if row["rank"] == 0]
    ).device
    peak = summary.peak_memory_bytes
    other = peak.split[CATEGORIES[-1]] / known(peak.total)
    work.row(
        run=name, ranks=work.ranks, step_ms=1e3 * known(summary.step_time_s.median), ledger_ms=1e3 * found.ledger,
        trace_ms=1e3 * found.trace, exposed_ms=1e3 * (summary.comm.exposed_s or 0.0), overlap=summary.comm.overlap,
        sent_bytes=summary.comm.bytes_per_step, peak_bytes=peak.total, other_of_peak=other,
        step_time=record.provenance["step_time_s"],
    )  # fmt: skip
    parts = ("compute_only_ns", "overlapped_ns", "exposed_ns", "other_ns")
    off = max(abs(row["step_ns"] - sum(row[part] for part in parts)) for row in record.table("breakdown"))
    work.check(f"{name}: the parts of a step add up to it", f"they are {off} ns off" if off else "")
    work.check(f"{name}: the trace has kernels", "" if device == work.device else f"it shows work of the {device} only")
    wrong = "" if found.trace else "the trace shows no communication"
    work.check(f"{name}: trace and ledger agree", found.wrong if comparable(work.device, record) else wrong)
    if summary.cpu_share is not None and summary.short_of_cores:
        work.note(f"{name}: {core_sentence(summary.cpu_share)} Trace and ledger are not compared.")
    points = len(record.table("memory"))
    work.check(f"{name}: memory has a timeline", "" if points > 1 else f"it has {points} rows")
    work.check(f"{name}: bytes have a category", "" if other <= _OTHER else f"{other:.1%} of the peak has none")


def comparable(device: str, record: RunRecord) -> bool:
    """Whether the times of a run's trace and of its ledger must agree.

    Not where a wait is in one of them only: between CPU ranks the ledger also counts the wait for a thread, ranks that
    share a GPU wait for their turn, and on a busy machine the threads that serve a GPU wait for a core.
    """
    measured = record.provenance["step_time_s"] == "measured"
    return device == "cuda" and measured and not record.summary.short_of_cores


class Communication(NamedTuple):
    """Seconds of communication in a profiled step, by the ledger and by the trace, and its number of collectives."""

    ledger: float
    trace: float
    collectives: float
    linked: bool

    @property
    def wrong(self) -> str:
        """Where the two differ by more than launching explains; "" where they agree. Without a link the ledger also
        counts how long a kernel takes to begin, so only a trace with more is wrong.
        """
        apart = self.trace - self.ledger
        allowed = LEDGER_TOLERANCE * self.ledger + LAUNCH_S * self.collectives
        if self.trace and (abs(apart) if self.linked else apart) <= allowed:
            return ""
        said = f"{1e3 * self.ledger:.3g} ms by the ledger, {1e3 * self.trace:.3g} ms by the trace"
        return f"a step communicates for {said}"


def communication(record: RunRecord) -> Communication:
    """What both say of the profiled steps; the mean over ranks and steps."""
    breakdown = record.table("breakdown")
    rows = {(row["rank"], row["step"]): list[tuple[int, int]]() for row in breakdown}
    for row in record.table("ledger"):
        rows.get((row["rank"], row["step"]), []).append((row["start_ns"], row["end_ns"]))
    ledger = sum(length(union(spans)) for spans in rows.values())
    trace = sum(int(row["exposed_ns"] + row["overlapped_ns"]) for row in breakdown)
    steps, count = len(rows), sum(map(len, rows.values()))
    return Communication(ledger / steps / 1e9, trace / steps / 1e9, count / steps, bool(record.spec.get("link")))


# ---- 6. speed


@dataclass(frozen=True)
class Size:
    """A model, and the sequences and their tokens that a rank reads in a step."""

    model: str
    batch: int
    sequence: int

    def planned(self, strategy: str, ranks: int, **choices: Any) -> PlanSpec:
        """The step for the planner, whose bytes and FLOP do not depend on the GPU."""
        return PlanSpec(
            model=preset(self.model), gpu=find_gpu("h100-80gb"), gpus=ranks, gpus_per_node=ranks,
            strategy=strategy, seq=self.sequence, micro_batch=self.batch, **choices,
        )  # fmt: skip


SIZES = (
    Size("llama-3b", 2, 2048), Size("llama-1b", 8, 2048), Size("llama-1b", 2, 2048), Size("llama-0.3b", 4, 2048),
    Size("llama-0.3b", 1, 2048), Size("gpt2", 4, 1024), Size("gpt-20m", 16, 256), Size("gpt-tiny", 2, 32),
)  # fmt: skip
ENGINES = (("lab", "full_shard"), ("torch-fsdp2", "full_shard"), ("torch-ddp", "no_shard"))
_RUN_S = 120.0  # of one run: the part has a limit of its own
_FLASH_FROM = 8.0  # compute capability: older GPUs keep the scores of bf16 attention
_USABLE = 0.85  # of the free bytes: the rest is for fragments and libraries


def alone_bytes(size: Size, ranks: int, flash: bool = True) -> float:
    """The most that one of the engines holds on a GPU: DDP, with buckets and 16-bit copies beside its whole state."""
    return memory_of(size.planned("no_shard", ranks, flash=flash)).peak.total + 6 * preset(size.model).parameters


def together_bytes(size: Size, ranks: int, flash: bool = True) -> float:
    """What the engines of a bench hold on a GPU together: their states, and what one of them needs in a step."""
    whole, cut = (memory_of(size.planned(strategy, ranks, flash=flash)) for strategy in ("no_shard", "full_shard"))
    buckets = 4 * preset(size.model).parameters
    return 1.5 * whole.resting.total + 2 * cut.resting.total + buckets + whole.peak.total - whole.resting.total


def fitting(free: float, needed: Callable[[Size], float]) -> Size:
    """The largest size whose bytes fit into the free ones; the last one where none does."""
    return next((size for size in SIZES if needed(size) <= _USABLE * free), SIZES[-1])


def speed(work: Work) -> None:
    """Engines that take turns step by step, then engines and settings each alone on the GPUs."""
    ranks = max(1, len(work.gpus)) if work.device == "cuda" else work.ranks
    free = min(gpu["free"] for gpu in work.gpus)
    flash = all(float(gpu["capability"]) >= _FLASH_FROM for gpu in work.gpus)
    in_turns(work, fitting(free, partial(together_bytes, ranks=ranks, flash=flash)), ranks)
    one_by_one(work, fitting(free, partial(alone_bytes, ranks=ranks, flash=flash)), ranks)


def _settings(size: Size, ranks: int) -> dict[str, Any]:
    return dict(
        model=size.model, batch_size=size.batch, sequence_length=size.sequence, precision="bf16", world_size=ranks,
        time_limit=_RUN_S,
    )  # fmt: skip


def one_by_one(work: Work, size: Size, ranks: int) -> None:
    """A row for each engine and setting as its run ends, the most telling first: step, tokens/s, MFU, peak memory."""
    wanted: list[dict[str, Any]] = [dict(engine=engine, strategy=strategy) for engine, strategy in ENGINES]
    wanted.append(dict(checkpoint="full"))
    if missing := missing_compiler(work.device):
        work.note(f"compiled blocks are left out: torch.compile needs {missing}, which this machine lacks")
    else:
        wanted.append(dict(compile="blocks"))
    wanted += [dict(strategy=name) for name in ("shard_grad_op", "zero2", "no_shard")] if ranks > 1 else []
    specs = [work.spec(**_settings(size, ranks) | settings) for settings in wanted]
    records = compare(specs, directory=work.folder / "compare", on_record=partial(_row, work, size))
    losses = [record.summary.losses for record in records[:2]]
    if all(losses):
        ours, theirs = (known(each[-1]) for each in losses)
        wrong = "" if abs(ours - theirs) <= _LOSSES * abs(theirs) else f"losses are wrong: {ours:.4f} and {theirs:.4f}"
        work.check_value("lab and torch-fsdp2 come to the same loss", wrong)


def _row(work: Work, size: Size, record: RunRecord) -> None:
    spec, summary = record.spec, record.summary
    name = f"{spec['engine']} {spec['strategy']}"
    if not work.check(
        f"{name} runs", "" if record.status == "finished" else (record.failure or {}).get("message", record.status)
    ):
        return
    step_s, gpu = known(summary.step_time_s.median), gpu_of(work.gpus[0]["name"])
    flops = model_flops(size.planned(spec["strategy"], spec["world_size"]))
    peak = gpu.bf16_flops * spec["world_size"] if gpu and gpu.bf16_flops else None
    work.row(
        engine=spec["engine"], strategy=spec["strategy"], checkpoint=spec["checkpoint"], compile=spec["compile"],
        model=size.model, batch=size.batch, sequence=size.sequence, ranks=spec["world_size"], step_ms=1e3 * step_s,
        tokens_per_s=summary.tokens_per_s, mfu=flops / step_s / peak if peak else None,
        peak_bytes=summary.peak_memory_bytes.total,
    )  # fmt: skip


def in_turns(work: Work, size: Size, ranks: int) -> None:
    """A row for each engine of a bench: its step, and that over torch's and over the bound of a perfect engine."""
    same = _settings(size, ranks) | dict(memory=False)
    try:
        found = bench([work.spec(**same, engine=engine, strategy=strategy) for engine, strategy in ENGINES], rounds=6)
    except RanksFailed as error:
        work.check(f"engines take turns on {size.model}", first_line(error))
        return
    for timing in found.timings:
        work.row(
            engine=timing.engine, strategy=timing.strategy, taking="turns", model=size.model, batch=size.batch,
            sequence=size.sequence, ranks=ranks, step_ms=1e3 * timing.median,
            over_fsdp2=found.ratio(timing, "torch-fsdp2"), over_ddp=found.ratio(timing, "torch-ddp"),
            over_floor=timing.median / found.floor,
        )  # fmt: skip
