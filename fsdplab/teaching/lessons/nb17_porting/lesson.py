"""Lesson 17 in the notebook's process: one choice in five programs' words, ports of loops, what to check first when a
loss differs, libraries that train with the lab's engine, and a trace of several GPUs.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fsdplab.common.places import shared_folder
from fsdplab.planning.copy_as import Sharded, accelerate_yaml, pytorch  # noqa: F401 (the notebook calls them)
from fsdplab.profiling.traces.import_traces import TracedRecord, record_of_traces
from fsdplab.records import RunRecord
from fsdplab.sessions import RunSpec
from fsdplab.sessions.steady_card import steady
from fsdplab.teaching.core.course_state import current
from fsdplab.teaching.core.display import Table, table
from fsdplab.teaching.core.lesson_ranks import LessonRanks
from fsdplab.teaching.core.waiting import doing
from fsdplab.teaching.lessons.faulty_job.lesson import Seen, drift, inject

# ---- terms


class Term(NamedTuple):
    """A choice, and what to write for it; "" where a program has no word for it.

    A test looks up each name of FSDP1, FSDP2, accelerate and the lab in the library itself. DeepSpeed's are keys of its
    configuration, and those with a dot are Python.
    """

    choice: str
    fsdp1: str
    fsdp2: str
    lab: str
    deepspeed: str
    accelerate: str


PROGRAMS = ("FSDP1", "FSDP2", "the lab", "DeepSpeed", "accelerate")
TERMS = (
    Term(
        "a block is a unit",
        "`auto_wrap_policy=`",
        "`fully_shard(block)`, the model last",
        "`shard_model(model, units=[Block])`",
        "buckets: `reduce_bucket_size`",
        "`fsdp_transformer_layer_cls_to_wrap`",
    ),
    Term(
        "shard everything, reshard after forward",
        "`FULL_SHARD`",
        "`reshard_after_forward=True`",
        "`full_shard`",
        "`stage: 3`",
        "`fsdp_reshard_after_forward: true`",
    ),
    Term(
        "stay unsharded until the backward",
        "`SHARD_GRAD_OP`",
        "`reshard_after_forward=False`",
        "`shard_grad_op`",
        "`stage: 2`, nearly",
        "`fsdp_reshard_after_forward: false`",
    ),
    Term(
        "shard nothing",
        "`NO_SHARD`",
        "`DistributedDataParallel`",
        "`no_shard`",
        "`stage: 0`",
        "`distributed_type: MULTI_GPU`",
    ),
    Term(
        "shard inside a machine, replicate across",
        "`HYBRID_SHARD`",
        "`mesh=` of two axes",
        "`hybrid_shard`",
        "`zero_hpz_partition_size`",
        "`dp_replicate_size`",
    ),
    Term(
        "compute in bf16",
        "`MixedPrecision`",
        "`MixedPrecisionPolicy`",
        "`precision=`",
        "`bf16: {enabled: true}`",
        "`mixed_precision: bf16`",
    ),
    Term(
        "keep shards on the host",
        "`CPUOffload`",
        "`CPUOffloadPolicy()`",
        "`offload=`",
        "`offload_param`, `offload_optimizer`",
        "`fsdp_offload_params`",
    ),
    Term(
        "unshard ahead",
        "`forward_prefetch=True`",
        "`set_modules_to_forward_prefetch`",
        "`prefetch=`",
        "`stage3_prefetch_bucket_size`",
        "`fsdp_forward_prefetch`",
    ),
    Term(
        "accumulate without reducing",
        "`no_sync()`",
        "`set_requires_gradient_sync`",
        "`micro_batches=`",
        "`gradient_accumulation_steps`",
        "`gradient_accumulation_steps`",
    ),
    Term(
        "clip by the norm of all",
        "`model.clip_grad_norm_`",
        "`torch.nn.utils.clip_grad_norm_`",
        "`clip_grad_norm_`",
        "`gradient_clipping`",
        "`clip_grad_norm_`",
    ),
    Term(
        "begin on the meta device",
        "`param_init_fn=`",
        "`to_empty` after `fully_shard`",
        "`to_empty` after `fully_shard`",
        "`zero.Init()`",
        "`fsdp_cpu_ram_efficient_loading`",
    ),
    Term("what a parameter is at rest", "`FlatParameter`", "`DTensor`", "`DTensor`", "a flat partition", ""),
    Term(
        "the whole parameters for a while",
        "`summon_full_params`",
        "`unshard()`",
        "`unshard()`",
        "`zero.GatheredParameters`",
        "",
    ),
    Term(
        "a checkpoint in shards",
        "`SHARDED_STATE_DICT`",
        "`get_model_state_dict`",
        "`checkpoint.save`",
        "its own, always",
        "`fsdp_state_dict_type`",
    ),
)


def found(word: str) -> list[Term]:
    """Return the rows in which a word stands, in any program's column, in any case: `found("no_sync")`."""
    wanted = _letters(word)
    return [term for term in TERMS if any(wanted in _letters(cell) for cell in term)]


def _letters(text: str) -> str:
    """Return a text's letters and digits in lower case, so that `HYBRID_SHARD` and `hybrid shard` are equal."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


def terms(word: str = "") -> Table:
    """Return all rows, or those in which a word stands in any column. ValueError for a word of no row."""
    chosen = found(word) if word else list(TERMS)
    if not chosen:
        raise ValueError(f"{word!r} is in no row; try a part of the name, such as no_sync, HYBRID or offload")
    rows = [[cell.replace("`", "") for cell in term] for term in chosen]
    return table(["choice", *PROGRAMS], rows)


# ---- what to check first

CAUSES = ("unsynchronised seeds", "wrong divisor", "bf16 masters")
_NEAR = 1e-4  # of a loss


def _first_loss_off(seen: Seen) -> float:
    """Return how far the first step's loss is from the twin's, relative to it."""
    loss = fmean(rank["losses"][0] for rank in seen.ranks)
    return abs(loss / seen.ranks[0]["twin_losses"][0] - 1)


def _began_alike(seen: Seen) -> bool:
    """Return whether all ranks began with the same weights."""
    return len({tuple(rank["began"]) for rank in seen.ranks}) == 1


def _one_direction(seen: Seen) -> bool:
    """Return whether each first gradient is a multiple of the twin's."""
    return all(rest < 1e-2 for rank in seen.ranks for _, rest in rank["ratios"])


def _one_length(seen: Seen) -> bool:
    """Return whether each first gradient is as long as the twin's."""
    return all(abs(factor - 1) < 1e-2 for rank in seen.ranks for factor, _ in rank["ratios"])


def _in_fp32(seen: Seen) -> bool:
    """Return whether the optimizer holds fp32 on every rank."""
    return {rank["dtype"] for rank in seen.ranks} == {"float32"}


def _loses_alike(seen: Seen) -> bool:
    """Return whether all losses are near the twin's."""
    distance = drift(seen)
    return distance is not None and distance < _NEAR


# what is compared, where to look if it differs, and whether it is equal
_CHECKS: tuple[tuple[str, str, Callable[[Seen], bool]], ...] = (
    ("weights before the first step", "a seed, a file that was not loaded, weights that to_empty left", _began_alike),
    ("loss of the first step", "data, dropout, the loss's own mean", lambda seen: _first_loss_off(seen) < _NEAR),
    (
        "direction of the first gradients",
        "a sum over the wrong ranks, a result read before it was there",
        _one_direction,
    ),
    ("length of the first gradients", "a mean over ranks, micro-batches or tokens", _one_length),
    ("dtype of what the optimizer holds", "a model cast before it was sharded", _in_fp32),
    ("losses of ten steps", "the optimizer's own settings, clipping, a schedule", _loses_alike),
)


def what_to_check() -> Table:
    """Return the checks in their order, and what each rules out."""
    rows = [[number, what, where] for number, (what, where, _) in enumerate(_CHECKS, 1)]
    return table(["", "compare with one process", "where it differs, look for"], rows)


def causes() -> dict[str, Seen]:
    """Run three jobs with one fault each, on live ranks, and a sound one."""
    return {name: inject(name) for name in ("none", *CAUSES)}


def tried(cases: Mapping[str, Seen]) -> Table:
    """Return each check on each case; the first that differs stands in capitals."""
    header = ["compared with the twin"]
    rows = [[what] for what, _, _ in _CHECKS]
    for name, seen in cases.items():
        header.append("sound" if name == "none" else name)
        words = ["equal" if check(seen) else "differs" for *_, check in _CHECKS]
        if "differs" in words:
            # the first check that differs: what comes after may follow from it
            words[words.index("differs")] = "DIFFERS"
        for row, word in zip(rows, words, strict=True):
            row.append(word)
    caption = "Measured on 2 live ranks. Go down the column: the first difference is the one to explain."
    return table(header, rows, caption)


def differences(seen: Seen) -> int:
    """Return how many of the comparisons a job fails."""
    return sum(not check(seen) for *_, check in _CHECKS)


# ---- libraries

RECORDED = shared_folder("data") / "hugging-face-17.json"
LIBRARIES = ("transformers.distributed.fsdp", "accelerate", "peft")  # transformers shards since 5


def missing() -> list[str]:
    """Return the libraries of this lesson that are not installed here."""
    return [name for name in LIBRARIES if not _installed(name)]


def _installed(name: str) -> bool:
    """Return whether a module can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of what the dots stand in
        return False


@doing("a tiny Llama in transformers' Trainer, under two engines, and a LoRA adapter")
def hugging_face() -> dict[str, Any]:
    """Return what Trainer and peft do on two ranks; as recorded where the libraries are not installed."""
    absent = missing()
    if absent:
        seen = dict(json.loads(RECORDED.read_text(encoding="utf-8")))
        # stands in captions in place of "Measured"
        seen["recorded"] = f"{', '.join(absent)} not installed here: this was recorded"
        return seen
    with tempfile.TemporaryDirectory() as folder:
        return dict(LessonRanks(__file__)("hugging_face", 2, folder=folder)[0])


def losses(seen: Mapping[str, Any]) -> Table:
    """Return the losses of Trainer, an engine a row."""
    rows = []
    for name, by_step in seen["losses"].items():
        rows.append([name, *(f"{loss:.6f}" for loss in by_step)])
    steps = len(rows[0]) - 1
    return table(["engine", *(f"step {step}" for step in range(1, 1 + steps))], rows, _origin(seen))


def lora(seen: Mapping[str, Any]) -> Table:
    """Return what is trained beside a frozen base."""
    adapters = seen["lora"]
    first, last = adapters["losses"][0], adapters["losses"][-1]
    rows = [
        ["elements trained", f"{adapters['trained']:,}"],
        ["elements frozen", f"{adapters['frozen']:,}"],
        ["frozen parameters that moved", adapters["frozen that moved"]],
        ["elements of optimizer state, a rank", f"{adapters['state']:,}"],
        ["loss, first and last step", f"{first:.4f}, {last:.4f}"],
    ]
    return table(["", ""], rows, _origin(seen))


def _origin(seen: Mapping[str, Any]) -> str:
    """Return the caption: measured or recorded, and with which versions."""
    by = ", ".join(f"{name} {version}" for name, version in seen["versions"].items())
    return f"{seen.get('recorded', 'Measured')} on 2 CPU ranks, {by}."


# ---- a trace of several GPUs

GPUS = 4


def simulated() -> RunRecord:
    """Simulate a step of full_shard on four ranks on the steady card."""
    return steady(RunSpec(model="gpt-20m", world_size=GPUS, batch_size=4, sequence_length=128, link="150MB/s"))


def multi_gpu_trace() -> TracedRecord:
    """Write a trace of four GPUs, made of that step, and read it again as any trace is."""
    folder = current().workspace.path / "exports" / "made-4-gpus"
    return record_of_traces(write_traces(simulated().table("timeline"), folder, GPUS))


def exposed_percent(traces: RunRecord) -> float:
    """Return the exposed part of rank 0's last step, in %."""
    row = _last(traces)
    return float(100 * row["exposed_ns"] / row["step_ns"])


def as_simulated(step: RunRecord, traces: RunRecord) -> Table:
    """Return the four parts of the step, as it was simulated, and as the files were read."""
    simulated_row, read_row = step.table("breakdown")[0], _last(traces)
    rows = []
    for part in ("compute_only", "overlapped", "exposed", "other"):
        column = f"{part}_ns"
        cells = [f"{row[column] / 1e6:.1f}" for row in (simulated_row, read_row)]
        rows.append([part.replace("_", " "), *cells])
    caption = (
        "Simulated; a made trace of 4 GPUs. Rank 0, ms. Other: the host launches the first kernel 5 µs before it runs."
    )
    return table(["part of the step", "simulated", "read from the files"], rows, caption)


def _last(record: RunRecord) -> dict[str, Any]:
    """Return rank 0's last step."""
    rows = [row for row in record.table("breakdown") if row["rank"] == 0]
    return max(rows, key=lambda row: row["step"])


# ---- a simulated step as a trace of several GPUs: kernels, NCCL's and their arguments, as Kineto writes them

# It is made, and every event says so: no GPU ran. Its right answers are known, so the reading of a trace can be held
# against them.

Row = Mapping[str, Any]
_HOST, _DEVICE, _COMPUTE, _COMM = 4242, 0, 7, 20
_LAUNCHED_US = 5.0  # before a kernel begins
_NCCL = {
    "all_gather": ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "_allgather_base"),
    "reduce_scatter": (
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "_reduce_scatter_base",
    ),
}


def write_traces(
    rows: Sequence[Row], folder: Path, ranks: int, late_us: Mapping[int, float] | None = None
) -> list[Path]:
    """Write the timeline of a simulated step as a trace for each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"rank{rank}.json.gz" for rank in range(ranks)]
    events = list(_events(rows, ranks))
    for rank, path in enumerate(paths):
        content = {
            "schemaVersion": 1,
            "made": "of a simulated step; no GPU ran",
            "deviceProperties": [{"id": 0, "name": "made by fsdplab"}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks},
            "baseTimeNanoseconds": 0,
            "displayTimeUnit": "ms",
            "traceEvents": events,
        }
        path.write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))
    return paths


def _events(rows: Sequence[Row], ranks: int) -> Iterator[dict[str, Any]]:
    """Yield the events of two equal steps: a reader takes the first for a warm-up where there is no other.

    Times of rows are in ns, those of a trace in µs.
    """
    step_row = next(row for row in rows if row["lane"] == "step")
    length = step_row["end_ns"] / 1e3
    on_gpu = [row for row in rows if row["lane"] in ("compute", *_NCCL)]
    # the second step begins 100 µs after the first one has ended
    for step in (1, 2):
        offset = 1000.0 + (step - 1) * (length + 100.0)
        yield _event("user_annotation", f"ProfilerStep#{step}", offset, length, _HOST, _HOST)
        for number, row in enumerate(on_gpu):
            begin = offset + row["start_ns"] / 1e3 + _LAUNCHED_US
            takes = (row["end_ns"] - row["start_ns"]) / 1e3
            # one number for a launch and its kernel, by which a reader joins them
            correlation = 1000 * step + number
            yield from _kernel(row, begin, takes, correlation, ranks)


def _kernel(row: Row, begin: float, takes: float, correlation: int, ranks: int) -> Iterator[dict[str, Any]]:
    """Yield a row's events: the named range and the launch on the host, and the kernel on the GPU."""
    lane = row["lane"]
    arguments: dict[str, Any] = {"correlation": correlation, "stream": _COMPUTE, "device": _DEVICE}
    name, launch, label = f"gemm ({row['name']})", "cudaLaunchKernel", f"{row['name']}"
    if lane in _NCCL:
        name, call = _NCCL[lane]
        launch, label = "cudaLaunchKernelExC", f"FSDP::{lane} ({row['unit'] or 'root'})"
        arguments["stream"] = _COMM
        arguments |= {"Collective name": call, "Group size": ranks, "dtype": "Float", "Process Group Name": "0"}
    # the host's events first: the range that names the unit, and the launch inside it
    launched = begin - _LAUNCHED_US
    yield _event("user_annotation", label, launched, 3.0, _HOST, _HOST)
    yield _event("cuda_runtime", launch, launched, 1.0, _HOST, _HOST, correlation=correlation)
    yield _event("kernel", name, begin, takes, _DEVICE, arguments["stream"], **arguments)


def _event(
    category: str, name: str, begin: float, takes: float, process: int, thread: int, **arguments: Any
) -> dict[str, Any]:
    """Return one event as Kineto writes it; times are in µs."""
    where = {"cat": category, "name": name, "ts": begin, "dur": takes, "pid": process, "tid": thread}
    return {"ph": "X", **where, "args": {**arguments, "made": True}}
