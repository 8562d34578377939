"""Lesson 17 in the notebook's process: one choice in five programs' words, ports of loops, what to check first when a
loss differs, libraries that train with the lab's engine, and a trace of several GPUs.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from fsdplab.common.places import shared_folder
from fsdplab.planning.copy_as import Sharded, accelerate_yaml, pytorch
from fsdplab.profiling.traces.import_traces import TracedRecord, record_of_traces
from fsdplab.records import RunRecord
from fsdplab.sessions import RunSpec
from fsdplab.sessions.steady_card import steady
from fsdplab.teaching.core.course_state import current
from fsdplab.teaching.core.display import Table, table
from fsdplab.teaching.core.lesson_ranks import LessonRanks
from fsdplab.teaching.core.waiting import doing
from fsdplab.teaching.lessons.faulty_job.naming import Seen, drift
from fsdplab.teaching.lessons.faulty_job.running import inject

from . import made_trace
from .terms import PROGRAMS, TERMS, found

__all__ = [
    "CAUSES", "LIBRARIES", "RECORDED", "Sharded", "accelerate_yaml", "as_simulated", "causes", "differences",
    "exposed_percent", "hugging_face", "lora", "losses", "missing", "multi_gpu_trace", "pytorch", "simulated", "terms",
    "tried", "what_to_check",
]  # fmt: skip

RECORDED = shared_folder("data") / "hugging-face-17.json"
LIBRARIES = ("transformers.distributed.fsdp", "accelerate", "peft")  # transformers shards since 5
GPUS = 4
_on_ranks = LessonRanks(__file__)


# ---- terms


def terms(word: str = "") -> Table:
    """All rows, or those in which a word stands in any column. ValueError for a word of no row."""
    rows = found(word) if word else list(TERMS)
    if not rows:
        raise ValueError(f"{word!r} is in no row; try a part of the name, such as no_sync, HYBRID or offload")
    return table(["choice", *PROGRAMS], [[_plain(cell) for cell in term] for term in rows])


def _plain(cell: str) -> str:
    return cell.replace("`", "")


# ---- what to check first

CAUSES = ("unsynchronised seeds", "wrong divisor", "bf16 masters")
_NEAR = 1e-4  # of a loss


def _weights(seen: Seen) -> bool:
    return len({tuple(each["began"]) for each in seen.ranks}) == 1


def _first_loss(seen: Seen) -> bool:
    return abs(_mean_loss(seen, 0) / seen.ranks[0]["twin_losses"][0] - 1) < _NEAR


def _mean_loss(seen: Seen, step: int) -> float:
    return sum(each["losses"][step] for each in seen.ranks) / len(seen.ranks)


def _direction(seen: Seen) -> bool:
    return max(off for each in seen.ranks for _, off in each["ratios"]) < 1e-2


def _length(seen: Seen) -> bool:
    return max(abs(factor - 1) for each in seen.ranks for factor, _ in each["ratios"]) < 1e-2


def _precision(seen: Seen) -> bool:
    return {each["dtype"] for each in seen.ranks} == {"float32"}


def _all_losses(seen: Seen) -> bool:
    off = drift(seen)
    return off is not None and off < _NEAR


_CHECKS: tuple[tuple[str, str, Callable[[Seen], bool]], ...] = (
    ("weights before the first step", "a seed, a file that was not loaded, weights that to_empty left", _weights),
    ("loss of the first step", "data, dropout, the loss's own mean", _first_loss),
    ("direction of the first gradients", "a sum over the wrong ranks, a result read before it was there", _direction),
    ("length of the first gradients", "a mean over ranks, micro-batches or tokens", _length),
    ("dtype of what the optimizer holds", "a model cast before it was sharded", _precision),
    ("losses of ten steps", "the optimizer's own settings, clipping, a schedule", _all_losses),
)


def what_to_check() -> Table:
    """The checks in their order, and what each rules out."""
    rows = [[number + 1, what, where] for number, (what, where, _) in enumerate(_CHECKS)]
    return table(["", "compare with one process", "where it differs, look for"], rows)


def causes() -> dict[str, Seen]:
    """Three jobs with one fault each, on live ranks, and a sound one."""
    return {name: inject(name) for name in ("none", *CAUSES)}


def tried(cases: Mapping[str, Seen]) -> Table:
    """Each check on each case; the first that differs stands in capitals."""
    columns = []
    for seen in cases.values():
        equal = [check(seen) for *_, check in _CHECKS]
        first = equal.index(False) if False in equal else len(equal)
        columns.append(
            ["equal" if same else ("DIFFERS" if at == first else "differs") for at, same in enumerate(equal)]
        )
    rows = [[what, *(column[at] for column in columns)] for at, (what, *_) in enumerate(_CHECKS)]
    header = ["compared with the twin", *("sound" if name == "none" else name for name in cases)]
    return table(
        header, rows, "Measured on 2 live ranks. Go down the column: the first difference is the one to explain."
    )


def differences(seen: Seen) -> int:
    """How many of the comparisons a job fails."""
    return sum(not check(seen) for *_, check in _CHECKS)


# ---- libraries


def missing() -> list[str]:
    """The libraries of this lesson that are not installed here."""
    return [name for name in LIBRARIES if not _installed(name)]


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of what the dots stand in
        return False


@doing("a tiny Llama in transformers' Trainer, under two engines, and a LoRA adapter")
def hugging_face() -> dict[str, Any]:
    """What Trainer and peft do on two ranks; as recorded where the libraries are not installed."""
    if lacking := missing():
        told: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
        return told | {"recorded": f"{', '.join(lacking)} not installed here: this was recorded"}
    with tempfile.TemporaryDirectory() as folder:
        measured: dict[str, Any] = _on_ranks("hugging_face", 2, folder=folder)[0]
    return measured


def losses(seen: Mapping[str, Any]) -> Table:
    """Losses of Trainer, an engine a row."""
    rows = [[name, *(f"{loss:.6f}" for loss in each)] for name, each in seen["losses"].items()]
    steps = range(1, 1 + len(next(iter(seen["losses"].values()))))
    return table(["engine", *(f"step {step}" for step in steps)], rows, _origin(seen))


def lora(seen: Mapping[str, Any]) -> Table:
    """What is trained beside a frozen base."""
    each = seen["lora"]
    rows = [
        ["elements trained", f"{each['trained']:,}"],
        ["elements frozen", f"{each['frozen']:,}"],
        ["frozen parameters that moved", each["frozen that moved"]],
        ["elements of optimizer state, a rank", f"{each['state']:,}"],
        ["loss, first and last step", f"{each['losses'][0]:.4f}, {each['losses'][-1]:.4f}"],
    ]
    return table(["", ""], rows, _origin(seen))


def _origin(seen: Mapping[str, Any]) -> str:
    by = ", ".join(f"{name} {version}" for name, version in seen["versions"].items())
    return f"{seen.get('recorded', 'Measured')} on 2 CPU ranks, {by}."


# ---- a trace of several GPUs


def simulated() -> RunRecord:
    """A step of full_shard on four ranks, simulated on the steady card."""
    return steady(RunSpec(model="gpt-20m", world_size=GPUS, batch_size=4, sequence_length=128, link="150MB/s"))


def multi_gpu_trace() -> TracedRecord:
    """A trace of four GPUs, made of that step, written to files and read again as any trace is."""
    folder = current().workspace.path / "exports" / "made-4-gpus"
    return record_of_traces(made_trace.write(simulated().table("timeline"), folder, GPUS))


def exposed_percent(traces: RunRecord) -> float:
    """The exposed part of rank 0's last step."""
    row = _last(traces)
    return float(100 * row["exposed_ns"] / row["step_ns"])


_PARTS = ("compute_only", "overlapped", "exposed", "other")


def as_simulated(step: RunRecord, traces: RunRecord) -> Table:
    """The four parts of the step, as it was simulated, and as the files were read."""
    both = (step.table("breakdown")[0], _last(traces))
    rows = [[part.replace("_", " "), *(f"{row[f'{part}_ns'] / 1e6:.1f}" for row in both)] for part in _PARTS]
    caption = (
        "Simulated; a made trace of 4 GPUs. Rank 0, ms. Other: the host launches the first kernel 5 µs before it runs."
    )
    return table(["part of the step", "simulated", "read from the files"], rows, caption)


def _last(record: RunRecord) -> dict[str, Any]:
    rows = [row for row in record.table("breakdown") if row["rank"] == 0]
    return max(rows, key=lambda row: row["step"])
