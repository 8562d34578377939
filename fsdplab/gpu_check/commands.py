"""What the check runs: a table of command lines, each with its limit and with what is looked at when it has ended.

Every row but the probes may be typed by hand to see more of it; the check prints each before it runs. A look adds rows,
checks and notes to its part; `wrote` is what the command has written to `{out}`, or what it has printed where it writes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from fsdplab.common.machine import output_of
from fsdplab.common.names import IN_GROUPS, OVER_ALL_RANKS
from fsdplab.gpu_check.check import Check, Part, Row
from fsdplab.planning.hardware import gpu_of
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.step_time import model_flops
from fsdplab.records import RunRecord, comparison_json
from fsdplab.sessions.launch.limited import answer_in
from fsdplab.workloads.shapes import preset

TESTS = Path(__file__).resolve().parents[2] / "tests"
_USABLE = 0.85e-9  # GB of a free byte: the rest is for fragments and libraries
_LOSSES = 0.02  # bf16 rounds differently in each engine; a wrong gradient shows by far more


class Refused(ValueError):
    """Nothing can be checked on this machine; the message is one line that says what to do."""


@dataclass(frozen=True)
class Command:
    """A command line, the seconds that it may take, and what is looked at when it has ended well.

    `least_ranks`: on fewer the command is left out. `module` is what `python -m` runs, in `folder` if one is named.
    """

    part: str
    name: str
    words: str
    limit_s: float
    look: Callable[[Part, Command, Path], None]
    least_ranks: int = 1
    module: str = "fsdplab"
    folder: Path | None = None


# ---- what everything rests on


def machine(part: Part, command: Command, wrote: Path) -> None:
    """The versions, a row for each GPU, one kernel on each, and what stands in the way."""
    found = answer_in(wrote)
    if blocked := found["blocks"]:
        raise Refused(f"{blocked}; or try --device cpu, a dry run in tiny sizes")
    part.rows += found["gpus"]
    for gpu in found["gpus"]:
        wrong = "" if gpu["sum"] == 8.0 else f"a kernel gives wrong values: eight ones sum to {gpu['sum']}"
        part.check(f"one kernel on {gpu['device']}", gpu["error"] or wrong)
    part.notes += found["advice"]
    part.facts = _facts(found)
    if topology := output_of("nvidia-smi", "topo", "-m") if found["nccl"] else "":
        part.notes.append(f"the links between the GPUs:\n{topology}")
    limit = found["environment"]["variables"].get("CUDA_DEVICE_MAX_CONNECTIONS")
    wrong = "CUDA_DEVICE_MAX_CONNECTIONS=1 prevents it; unset it" if limit == "1" else ""
    part.check("communication may overlap", wrong)


def _facts(found: Row) -> Row:
    """What is kept of the machine with the result; no names of hosts and users, and no paths."""
    seen, cpu, gpus = found["environment"], found["environment"]["cpu"], found["gpus"] if found["nccl"] else []
    return {
        "gpu": gpus[0]["name"] if gpus else None, "gpus": len(gpus), "driver": found["driver"], **seen["versions"],
        "cuda": found["cuda"], "nccl": found["nccl"], "commit": seen["commit"],
        "source_sha256": found["source_sha256"], "platform": seen["platform"],
        "cpu": cpu["model"], "cores": cpu["count"], "memory_bytes": cpu["memory_bytes"],
        "variables": " ".join(f"{name}={value}" for name, value in seen["variables"].items()) or None,
    }  # fmt: skip


def findings(part: Part, command: Command, wrote: Path) -> None:
    """A row for each thing that a probe has found, and a check that nothing of it is wrong."""
    found = answer_in(wrote)
    for row in found if isinstance(found, list) else [found]:
        named = {"what": command.name} | row
        part.check(named["what"], named.pop("wrong"))
        part.rows.append(named)


# ---- fsdplab's own commands


def runs(part: Part, command: Command, wrote: Path) -> None:
    """A row of figures for a recorded run, which is kept for the lessons if it was profiled; or for every run of a
    comparison, with a check that its losses are the unsharded twin's.
    """
    if wrote.is_dir():
        found, names = comparison_json([RunRecord.load(wrote)]), [command.name]
        part.records += [wrote.name] if found["spec"]["profile"] else []
    else:
        found, names = answer_in(wrote), command.words.partition("--strategies ")[2].split()[0].split(",")
    for name, run in zip(names, found["runs"]):
        _row(part, name, found, run)
        if not wrote.is_dir():
            wrong = "" if run["matches_reference"] else "its losses are wrong"
            part.check(f"{name} trains as the twin", wrong if run["status"] == "finished" else run["status"])


def _row(part: Part, name: str, found: Row, run: Row) -> None:
    spec, comm, step_s = found["spec"], run["comm"], run["step_time_s"]["median"]
    part.row(
        run=name, model=spec["model"], batch=spec["batch_size"], sequence=spec["sequence_length"],
        ranks=run["world_size"], step_ms=step_s and 1e3 * step_s, tokens_per_s=run["tokens_per_s"],
        mfu=step_s and mfu(found, run["world_size"], step_s), peak_bytes=run["peak_memory_bytes"]["total"],
        exposed_ms=comm["exposed_s"] and 1e3 * comm["exposed_s"], overlap=comm["overlap"],
        sent_bytes=comm["bytes_per_step"], last_loss=run["losses"][-1] if run["losses"] else None,
        core_share=run["cpu_share"], step_time=run["provenance"].get("step_time_s"),
    )  # fmt: skip


def mfu(found: Row, ranks: int, step_s: float) -> float | None:
    """The part of the GPUs' bf16 FLOP/s that the model's own arithmetic takes; None of a GPU that is not known."""
    gpus, spec = found["environment"].get("gpus"), found["spec"]
    gpu = gpu_of(gpus[0]["name"]) if gpus else None
    if gpu is None or not gpu.bf16_flops:
        return None
    plan = PlanSpec(
        model=preset(spec["model"]), gpu=gpu, gpus=ranks, gpus_per_node=ranks, seq=spec["sequence_length"],
        micro_batch=spec["batch_size"],
    )  # fmt: skip
    return model_flops(plan) / step_s / (gpu.bf16_flops * ranks)


def ratios(part: Part, command: Command, wrote: Path) -> None:
    """A row for each engine of a bench: its step, and that over torch's and over the bound of a perfect engine."""
    rows = answer_in(wrote)["rows"]
    for row in rows:
        part.row(
            run=f"{command.name}: {row['engine']} {row['strategy']}", step_ms=1e3 * row["median"],
            over_fsdp2=row["over_torch-fsdp2"], over_ddp=row["over_torch-ddp"], over_floor=row["over_floor"],
        )  # fmt: skip
    ours, theirs = ({row["engine"]: row["loss"] for row in rows}[engine] for engine in ("lab", "torch-fsdp2"))
    wrong = "" if abs(ours - theirs) <= _LOSSES * abs(theirs) else f"losses are wrong: {ours:.4f} and {theirs:.4f}"
    part.check("lab and torch-fsdp2 come to the same loss", wrong)


def last_words(part: Part, command: Command, wrote: Path) -> None:
    """The summary that pytest prints; log.txt has the tests."""
    part.row(tests=wrote.read_text(encoding="utf-8").strip().splitlines()[-1].strip("= "))


# ---- the table


class Size(NamedTuple):
    """A model with the sequences and tokens that a rank reads in a step, and the GB that it needs on a GPU.

    `alone_gb`: under any one engine; `together_gb`: with the states of all engines of a bench, which take turns. They
    are the planner's bytes, of GPUs that keep no attention scores from 25 GB on, and of those that do below it (older
    ones).
    """

    model: str
    batch: int
    sequence: int
    alone_gb: float
    together_gb: float


SIZES = (
    Size("llama-3b", 2, 2048, 75.2, 199.6), Size("llama-1b", 8, 2048, 53.2, 99.9),
    Size("llama-1b", 2, 2048, 30.2, 77.0), Size("llama-0.3b", 4, 2048, 21.7, 37.5),
    Size("llama-0.3b", 1, 2048, 10.8, 26.6), Size("gpt2", 4, 1024, 8.5, 17.2),
    Size("gpt-20m", 16, 256, 2.3, 6.9), Size("gpt-tiny", 2, 32, 1.1, 4.8),
)  # fmt: skip


def fitting(free: float, needed: Callable[[Size], float]) -> str:
    """The largest size whose GB fit into the free bytes, as flags of a run; the last one where none does."""
    size = next((size for size in SIZES if needed(size) <= _USABLE * free), SIZES[-1])
    return f"--model {size.model} --batch-size {size.batch} --sequence-length {size.sequence} --precision bf16"


_PROBES = "fsdplab.sessions.gpu_probes"
_RECORD = "{recorded} --card none --device {device} -n {ranks} --out {out}"
_SPEED = "{alone} --profile 0 --card none --device {device} -n {own} --out {out}"
_RECORDED = {
    "cuda": "--model gpt-20m --batch-size 16 --sequence-length 256 --precision bf16 --steps 4 --profile 2",
    "cpu": "--model gpt-tiny --batch-size 2 --sequence-length 32 --steps 2 --profile 1",
}

# in the order in which they rest on each other
TABLE = (
    Command("environment", "machine", "machine {device}", 90, machine, module=_PROBES),
    Command("mechanisms", "CUDA profile first", "profiles_cuda_first {device}", 60, findings, module=_PROBES),
    Command("mechanisms", "CPU profile first", "profiles {device}", 60, findings, module=_PROBES),
    Command("mechanisms", "memory opened by a second process", "ipc {device}", 60, findings, module=_PROBES),
    Command("nccl", "collectives", "collectives {device}", 90, findings, module=_PROBES),
    Command(
        "correctness", "against the twin",
        "compare --model gpt-tiny --batch-size 2 --sequence-length 32 --steps 4 --profile 0 --card none --link none"
        " --strategies {strategies} --device {device} -n {ranks} --json {out}",
        150, runs,
    ),
    Command("traces", "full_shard", f"run full_shard {_RECORD}", 60, runs, 2),
    # a link that is slow enough for every GPU to wait for it
    Command("traces", "full_shard-linked", f"run full_shard --link 500MB/s {_RECORD}", 60, runs, 2),
    Command("traces", "shard_grad_op", f"run shard_grad_op {_RECORD}", 60, runs, 2),
    Command("traces", "no_shard", f"run no_shard {_RECORD}", 60, runs, 2),
    Command(
        "speed", "in turns",
        "bench {together} --strategies full_shard --engines torch-fsdp2,torch-ddp --rounds 6 --device {device} -n {own}"
        " --json {out}",
        150, ratios,
    ),
    Command("speed", "lab full_shard", f"run full_shard {_SPEED}", 120, runs),
    Command("speed", "torch-fsdp2 full_shard", f"run full_shard --engine torch-fsdp2 {_SPEED}", 120, runs),
    Command("speed", "torch-ddp no_shard", f"run no_shard --engine torch-ddp {_SPEED}", 120, runs),
    Command("speed", "lab full_shard, recomputed", f"run full_shard --checkpoint full {_SPEED}", 120, runs),
    Command("speed", "lab full_shard, compiled", f"run full_shard --compile blocks {_SPEED}", 240, runs),
    Command("speed", "lab shard_grad_op", f"run shard_grad_op {_SPEED}", 120, runs, 2),
    Command("speed", "lab zero2", f"run zero2 {_SPEED}", 120, runs, 2),
    Command("speed", "lab no_shard", f"run no_shard {_SPEED}", 120, runs, 2),
    Command(
        "tests", "marked gpu", "-m gpu -v -p no:cacheprovider -o addopts= {tests}", 1e9, last_words,
        module="pytest", folder=TESTS.parent,
    ),
)  # fmt: skip
PARTS = tuple(dict.fromkeys(row.part for row in TABLE))


def commands_of(part: str, check: Check) -> list[Command]:
    """The part's command lines on this machine, all but `{out}` filled in. Where speed counts, a rank has its GPU."""
    device, ranks, gpus = check.provenance["device"], check.ranks, check.gpus
    free = min((gpu["free"] for gpu in gpus), default=0)
    groups = [f"{name}:shard_size={ranks // 2}" for name in IN_GROUPS] if ranks % 2 == 0 else []
    own = max(1, len(gpus)) if device == "cuda" else ranks
    filled = {
        "device": device, "ranks": ranks, "own": own,
        "strategies": ",".join([*OVER_ALL_RANKS, *groups, "full_shard:offload=cpu"]), "recorded": _RECORDED[device],
        "alone": fitting(free, lambda size: size.alone_gb), "together": fitting(free, lambda size: size.together_gb),
        "tests": " ".join(_files_of_tests()), "out": "{out}",
    }  # fmt: skip
    enough = own if part == "speed" else ranks
    chosen = [
        row for row in TABLE if row.part == part and row.least_ranks <= enough and (TESTS.is_dir() or not row.folder)
    ]
    return [replace(row, words=row.words.format_map(filled)) for row in chosen]


def _files_of_tests() -> list[str]:
    """The files with tests for a GPU, the course last: to import all others takes longer than these tests."""
    marked = [path.name for path in TESTS.glob("test_*.py") if "mark.gpu" in path.read_text("utf-8")]
    return [f"tests/{name}" for name in sorted(marked, key=lambda name: ("course" in name, name))]
