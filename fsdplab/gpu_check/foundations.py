"""What everything rests on: the machine, the mechanisms of CUDA and torch, NCCL, and the values that training gives."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdplab.common.machine import output_of
from fsdplab.common.names import IN_GROUPS, OVER_ALL_RANKS
from fsdplab.common.temporary import temporary_folder
from fsdplab.gpu_check.check import Refused
from fsdplab.gpu_check.part import Work, first_line
from fsdplab.sessions import RanksFailed
from fsdplab.sessions.gpu_probes import ask
from fsdplab.sessions.launch.launcher import run_ranks
from fsdplab.sessions.launch.mailbox import Mailbox, read_lines
from fsdplab.sessions.run_and_record import WORKER
from fsdplab.sessions.spec.gpus import has_context
from fsdplab.sessions.worker.environment import capture_environment

ON_RANKS = ("-m", "fsdplab.gpu_check.on_ranks")
MEBIBYTES = {"cuda": 256, "cpu": 1}
# relative: a GPU's sums have another order than the CPU's, a wrong gradient shows by far more
TOLERANCE = {"cuda": 1e-3, "cpu": 1e-6}
_PROFILE_NOTE = (
    "After a first profile without CUDA, this torch sees no kernel in any later profile of the process. The lab's ranks"
    " begin with a CUDA profile."
)


# ---- 1. environment


def environment(work: Work) -> None:
    """The versions, a row for each GPU, one kernel on each, and what stands in the way."""
    found = ask("machine", work.device)
    if blocked := found.get("error") or found["blocks"]:
        raise Refused(f"{blocked}; or try --device cpu, a dry run in tiny sizes" if work.device == "cuda" else blocked)
    work.facts = _facts(work, found)
    for gpu in found["gpus"]:
        work.row(**gpu)
        wrong = "" if gpu["sum"] == 8.0 else f"a kernel gives wrong values: eight ones sum to {gpu['sum']}"
        work.check(f"one kernel on {gpu['device']}", gpu["error"] or wrong)
    for sentence in found["advice"]:
        work.note(sentence)
    topology = output_of("nvidia-smi", "topo", "-m") if work.device == "cuda" else ""
    if topology:
        work.note(f"the links between the GPUs:\n{topology}")
    limit = capture_environment("cpu")["variables"].get("CUDA_DEVICE_MAX_CONNECTIONS")
    work.check(
        "communication may overlap", "CUDA_DEVICE_MAX_CONNECTIONS=1 prevents it; unset it" if limit == "1" else ""
    )


def _facts(work: Work, found: dict[str, Any]) -> dict[str, Any]:
    """What is kept of the machine with the result; no names of hosts and users, and no paths."""
    seen = capture_environment("cpu")  # the GPUs were asked in a process of their own
    names = [gpu["name"] for gpu in found["gpus"]]
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return {
        "gpu": names[0] if work.device == "cuda" else None, "gpus": len(names) if work.device == "cuda" else 0,
        "driver": driver[0] if driver and work.device == "cuda" else None, **seen["versions"], "cuda": found["cuda"],
        "nccl": found["nccl"], "commit": work.commit or seen["commit"],
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


# ---- 2. mechanisms


def mechanisms(work: Work) -> None:
    """Ranks forked by a process without a context, profiles, and memory opened by a second process."""
    work.record("ranks that are forked and train", memory=False, warmup=0, steps=1)
    held = [gpu["device"] for index, gpu in enumerate(work.gpus) if has_context(index)]
    wrong = f"it has one on {', '.join(held)}, which EXCLUSIVE_PROCESS would not allow" if held else ""
    work.check("the process that starts ranks has no CUDA context", wrong)
    for probe, name in (("profiles_cuda_first", "CUDA profile first"), ("profiles", "CPU profile first")):
        found = ask(probe, work.device)
        work.row(mechanism=name, result=found.get("error") or f"{found['kernels']} kernels in a CUDA profile")
        if probe == "profiles_cuda_first":
            work.check("a CUDA profile shows kernels", found.get("error", "" if found["kernels"] else "it shows none"))
        elif not found.get("kernels"):
            work.note(_PROFILE_NOTE)
    found = ask("ipc", work.device)
    refused = found.get("error") or found["refused"]
    work.row(mechanism="memory opened by a second process", result=refused or "works")
    work.check("what a second process reads is right", refused if "reads" in refused else "")
    if refused:
        work.note("Without CUDA IPC, NCCL takes the way through host memory between the GPUs of this machine.")


# ---- 3. NCCL over all GPUs


def nccl(work: Work) -> None:
    """Values and bus bandwidth of the three collectives over all GPUs; over gloo in a dry run."""
    backend, ranks = ("nccl", max(1, len(work.gpus))) if work.device == "cuda" else ("gloo", 2)
    mailbox = Mailbox(temporary_folder("nccl"))
    program = [*ON_RANKS, "collectives", backend, str(MEBIBYTES[work.device]), str(mailbox.folder)]
    try:
        run_ranks(program, mailbox, world_size=ranks, time_limit=max(5.0, work.left() - 5.0))
    except RanksFailed as error:
        work.check(f"{backend} forms a group of {ranks}", first_line(error))
        return
    rows = [read_lines(mailbox.of(rank, "result"))[0]["rows"] for rank in range(ranks)]
    for of_ranks in zip(*rows):
        wrong = [f"rank {rank}: {row['wrong']}" for rank, row in enumerate(of_ranks) if row["wrong"]]
        work.row(**{name: value for name, value in of_ranks[0].items() if name != "wrong"})
        work.check_value(f"{of_ranks[0]['collective']} of {ranks} ranks", "; ".join(wrong[:2]))


# ---- 4. correctness


def correctness(work: Work) -> None:
    """The losses of gpt-tiny under every strategy, with offload and along Shard(1), against the twin on the CPU."""
    twin = work.record("the twin on the CPU", engine="twin", device="cpu", memory=False, steps=4)
    if twin is None:
        return
    for name, settings in _cases(work.ranks).items():
        program = (*ON_RANKS, "shard_1") if name == "Shard(1)" else WORKER
        record = work.record(name, program, memory=False, steps=4, **settings)
        if record is not None:
            apart = furthest(record.summary.losses, twin.summary.losses)
            work.row(case=name, ranks=work.ranks, last_loss=record.summary.losses[-1], apart=apart)
            allowed = TOLERANCE[work.device]
            wrong = f"losses are wrong: {apart:.1e} from the twin's, expected at most {allowed:.0e}"
            work.check_value(f"{name} trains as the twin", "" if apart <= allowed else wrong)


def _cases(ranks: int) -> dict[str, dict[str, Any]]:
    """Name -> settings of a run."""
    rows: dict[str, dict[str, Any]] = {name: dict(strategy=name) for name in OVER_ALL_RANKS}
    if ranks % 2 == 0:
        rows |= {name: dict(strategy=name, shard_size=ranks // 2) for name in IN_GROUPS}
    return {**rows, "offload": dict(offload="cpu"), "Shard(1)": {}}


def furthest(losses: Sequence[float | None], expected: Sequence[float | None]) -> float:
    """The largest relative difference of two series of losses; infinite where one is shorter, or no number.

    >>> furthest([2.0, 1.0], [2.0, 1.25])
    0.2
    """
    pairs = [(ours, theirs) for ours, theirs in zip(losses, expected) if ours is not None and theirs is not None]
    if not len(losses) == len(expected) == len(pairs):
        return float("inf")
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
