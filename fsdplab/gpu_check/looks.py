"""A command of the check, and what is looked at when it has ended: each look adds rows, checks and notes to its part.

`wrote` is what the command has written to `{out}`, or what it has printed where it writes nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplab.common.machine import output_of
from fsdplab.gpu_check.check import Part, Row
from fsdplab.planning.hardware import gpu_of
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.step_time import model_flops
from fsdplab.records import RunRecord, core_sentence
from fsdplab.workloads.shapes import preset

_LOSSES = 0.02  # bf16 rounds differently in each engine; a wrong gradient shows by far more
_OF_A_TEST = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)(?: \((.*)\))?", re.MULTILINE)  # pytest -v


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
    found = answer(wrote)
    if blocked := found["blocks"]:
        raise Refused(f"{blocked}; or try --device cpu, a dry run in tiny sizes")
    for gpu in found["gpus"]:
        part.row(**gpu)
        wrong = "" if gpu["sum"] == 8.0 else f"a kernel gives wrong values: eight ones sum to {gpu['sum']}"
        part.check(f"one kernel on {gpu['device']}", gpu["error"] or wrong)
    part.notes += found["advice"]
    if topology := output_of("nvidia-smi", "topo", "-m") if command.words.endswith("cuda") else "":
        part.note(f"the links between the GPUs:\n{topology}")
    limit = found["environment"]["variables"].get("CUDA_DEVICE_MAX_CONNECTIONS")
    wrong = "CUDA_DEVICE_MAX_CONNECTIONS=1 prevents it; unset it" if limit == "1" else ""
    part.check("communication may overlap", wrong)
    part.facts = _facts(found, command.words.endswith("cuda"))


def answer(wrote: Path) -> Any:
    """The JSON of the last line that a command has printed."""
    return json.loads(wrote.read_text(encoding="utf-8").splitlines()[-1])


def _facts(found: Row, cuda: bool) -> Row:
    """What is kept of the machine with the result; no names of hosts and users, and no paths."""
    seen = found["environment"]
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return {
        "gpu": found["gpus"][0]["name"] if cuda else None, "gpus": len(found["gpus"]) if cuda else 0,
        "driver": driver[0] if driver and cuda else None, **seen["versions"], "cuda": found["cuda"],
        "nccl": found["nccl"], "commit": seen["commit"],
        "source_sha256": source_digest(Path(__file__).resolve().parents[1]), "platform": seen["platform"],
        "cpu": seen["cpu"]["model"], "cores": seen["cpu"]["count"], "memory_bytes": seen["cpu"]["memory_bytes"],
        "variables": " ".join(f"{name}={value}" for name, value in seen["variables"].items()) or None,
    }  # fmt: skip


def source_digest(package: Path) -> str:
    """The first 16 hex digits of a hash over all Python files: which code this was, even without git."""
    digest = hashlib.sha256()
    for path in sorted(filter(Path.is_file, package.rglob("*.py"))):  # an editor's lock is a link to nowhere
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def cuda_profile(part: Part, command: Command, wrote: Path) -> None:
    """A profile with CUDA, the first of its process, must show kernels."""
    kernels = answer(wrote)["kernels"]
    part.row(mechanism=command.name, result=f"{kernels} kernels in a CUDA profile")
    part.check("a CUDA profile shows kernels", "" if kernels else "it shows none")


def later_profile(part: Part, command: Command, wrote: Path) -> None:
    """A CUDA profile after one of the CPU alone shows no kernel under some versions of torch, which the lab avoids."""
    kernels = answer(wrote)["kernels"]
    part.row(mechanism=command.name, result=f"{kernels} kernels in a CUDA profile")
    if not kernels:
        part.note(
            "After a first profile without CUDA, this torch sees no kernel in any later profile of the process. The"
            " lab's ranks begin with a CUDA profile."
        )


def opened_memory(part: Part, command: Command, wrote: Path) -> None:
    """What a second process reads from a GPU must be right; whether it may read at all is the machine's choice."""
    refused = answer(wrote)["refused"]
    part.row(mechanism=command.name, result=refused or "works")
    part.check("what a second process reads is right", refused if "reads" in refused else "")
    if refused:
        part.note("Without CUDA IPC, NCCL takes the way through host memory between the GPUs of this machine.")


def collectives(part: Part, command: Command, wrote: Path) -> None:
    """A row and a check of each collective."""
    for row in answer(wrote):
        part.check_value(f"{row['collective']} of {row['ranks']} ranks", row.pop("wrong"))
        part.row(**row)


# ---- fsdplab's own commands


def losses_of_the_twin(part: Part, command: Command, wrote: Path) -> None:
    """A row and a check for every run of a comparison: its losses are the unsharded twin's."""
    cases = command.words.partition("--strategies ")[2].split()[0].split(",")
    for case, run in zip(cases, json.loads(wrote.read_text(encoding="utf-8"))["runs"]):
        part.row(case=case, ranks=run["world_size"], last_loss=run["losses"][-1] if run["losses"] else None)
        wrong = "" if run["matches_reference"] else "its losses are wrong"
        part.check_value(f"{case} trains as the twin", wrong if run["status"] == "finished" else run["status"])


def figures(part: Part, command: Command, wrote: Path) -> None:
    """A row of figures of one recorded run; a profiled one is kept for the lessons."""
    record = RunRecord.load(wrote)
    spec, summary, comm = record.spec, record.summary, record.summary.comm
    step_s = summary.step_time_s.median
    part.row(
        run=command.name, model=spec["model"], batch=spec["batch_size"], sequence=spec["sequence_length"],
        ranks=spec["world_size"], step_ms=step_s and 1e3 * step_s, tokens_per_s=summary.tokens_per_s,
        mfu=step_s and mfu(record, step_s), peak_bytes=summary.peak_memory_bytes.total,
        exposed_ms=None if comm.exposed_s is None else 1e3 * comm.exposed_s, overlap=comm.overlap,
        sent_bytes=comm.bytes_per_step, step_time=record.provenance.get("step_time_s"),
    )  # fmt: skip
    if summary.cpu_share is not None and summary.short_of_cores:
        part.note(f"{command.name}: {core_sentence(summary.cpu_share)}")
    if spec["profile"]:
        part.records.append(wrote.name)


def mfu(record: RunRecord, step_s: float) -> float | None:
    """The part of the GPUs' bf16 FLOP/s that the model's own arithmetic takes; None of a GPU that is not known."""
    gpus, spec = record.environment.get("gpus"), record.spec
    gpu = gpu_of(gpus[0]["name"]) if gpus else None
    if gpu is None or not gpu.bf16_flops:
        return None
    plan = PlanSpec(
        model=preset(spec["model"]), gpu=gpu, gpus=spec["world_size"], gpus_per_node=spec["world_size"],
        seq=spec["sequence_length"], micro_batch=spec["batch_size"],
    )  # fmt: skip
    return model_flops(plan) / step_s / (gpu.bf16_flops * spec["world_size"])


def ratios(part: Part, command: Command, wrote: Path) -> None:
    """A row for each engine of a bench: its step, and that over torch's and over the bound of a perfect engine."""
    rows = json.loads(wrote.read_text(encoding="utf-8"))["rows"]
    for row in rows:
        part.row(
            run=f"{command.name}: {row['engine']} {row['strategy']}", step_ms=1e3 * row["median"],
            over_fsdp2=row["over_torch-fsdp2"], over_ddp=row["over_torch-ddp"], over_floor=row["over_floor"],
        )  # fmt: skip
    ours, theirs = ({row["engine"]: row["loss"] for row in rows}[engine] for engine in ("lab", "torch-fsdp2"))
    wrong = "" if abs(ours - theirs) <= _LOSSES * abs(theirs) else f"losses are wrong: {ours:.4f} and {theirs:.4f}"
    part.check_value("lab and torch-fsdp2 come to the same loss", wrong)


def results_of_tests(part: Part, command: Command, wrote: Path) -> None:
    """A check for each test that ran, also where the others did not get their turn; skipped ones are counted."""
    found = _OF_A_TEST.findall(wrote.read_text(encoding="utf-8", errors="replace"))
    skipped = [why for _, state, why in found if state == "SKIPPED"]
    for name, state, _ in found:
        if state != "SKIPPED":
            part.check(name, "" if state == "PASSED" else f"{state.lower()}: see log.txt")
    part.row(tests=len(found), skipped=len(skipped), why="; ".join(dict.fromkeys(skipped)))
