"""What the check runs: a table of command lines, each with its limit and with what is looked at when it has ended.

Every row but the probes may be typed by hand to see more of it; the check prints each before it runs.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fsdplab.common.names import IN_GROUPS, OVER_ALL_RANKS
from fsdplab.gpu_check import looks
from fsdplab.gpu_check.check import Check, Part
from fsdplab.gpu_check.looks import Command
from fsdplab.records import RecordError

TESTS = Path(__file__).resolve().parents[2] / "tests"
_USABLE = 0.85e-9  # GB of a free byte: the rest is for fragments and libraries


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

    @property
    def flags(self) -> str:
        """The size as flags of a run."""
        return f"--model {self.model} --batch-size {self.batch} --sequence-length {self.sequence} --precision bf16"


SIZES = (
    Size("llama-3b", 2, 2048, 75.2, 199.6), Size("llama-1b", 8, 2048, 53.2, 99.9),
    Size("llama-1b", 2, 2048, 30.2, 77.0), Size("llama-0.3b", 4, 2048, 21.7, 37.5),
    Size("llama-0.3b", 1, 2048, 10.8, 26.6), Size("gpt2", 4, 1024, 8.5, 17.2),
    Size("gpt-20m", 16, 256, 2.3, 6.9), Size("gpt-tiny", 2, 32, 1.1, 4.8),
)  # fmt: skip


def fitting(free: float, needed: Callable[[Size], float]) -> str:
    """The largest size whose GB fit into the free bytes, as flags; the last one where none does."""
    return next((size for size in SIZES if needed(size) <= _USABLE * free), SIZES[-1]).flags


_PROBES = "fsdplab.sessions.gpu_probes"
_RECORD = "{recorded} --card none --device {device} -n {ranks} --out {out}"
_SPEED = "{alone} --profile 0 --card none --device {device} -n {own} --out {out}"
_RECORDED = {
    "cuda": "--model gpt-20m --batch-size 16 --sequence-length 256 --precision bf16 --steps 4 --profile 2",
    "cpu": "--model gpt-tiny --batch-size 2 --sequence-length 32 --steps 2 --profile 1",
}

# in the order in which they rest on each other
TABLE = (
    Command("environment", "machine", "machine {device}", 90, looks.machine, module=_PROBES),
    Command(
        "mechanisms", "CUDA profile first", "profiles_cuda_first {device}", 60, looks.cuda_profile, module=_PROBES
    ),
    Command("mechanisms", "CPU profile first", "profiles {device}", 60, looks.later_profile, module=_PROBES),
    Command("mechanisms", "memory opened by a second process", "ipc {device}", 60, looks.opened_memory, module=_PROBES),
    Command("nccl", "collectives", "{backend} {own}", 90, looks.collectives, module="fsdplab.gpu_check.collectives"),
    Command(
        "correctness", "against the twin",
        "compare --model gpt-tiny --batch-size 2 --sequence-length 32 --steps 4 --profile 0 --card none --link none"
        " --strategies {strategies} --device {device} -n {ranks} --json {out}",
        150, looks.losses_of_the_twin,
    ),
    Command("traces", "full_shard", f"run full_shard {_RECORD}", 60, looks.figures, 2),
    # a link that is slow enough for every GPU to wait for it
    Command("traces", "full_shard-linked", f"run full_shard --link 500MB/s {_RECORD}", 60, looks.figures, 2),
    Command("traces", "shard_grad_op", f"run shard_grad_op {_RECORD}", 60, looks.figures, 2),
    Command("traces", "no_shard", f"run no_shard {_RECORD}", 60, looks.figures, 2),
    Command(
        "speed", "in turns",
        "bench {together} --strategies full_shard --engines torch-fsdp2,torch-ddp --rounds 6 --device {device} -n {own}"
        " --json {out}",
        150, looks.ratios,
    ),
    Command("speed", "lab full_shard", f"run full_shard {_SPEED}", 120, looks.figures),
    Command("speed", "torch-fsdp2 full_shard", f"run full_shard --engine torch-fsdp2 {_SPEED}", 120, looks.figures),
    Command("speed", "torch-ddp no_shard", f"run no_shard --engine torch-ddp {_SPEED}", 120, looks.figures),
    Command("speed", "lab full_shard, recomputed", f"run full_shard --checkpoint full {_SPEED}", 120, looks.figures),
    Command("speed", "lab full_shard, compiled", f"run full_shard --compile blocks {_SPEED}", 240, looks.figures),
    Command("speed", "lab shard_grad_op", f"run shard_grad_op {_SPEED}", 120, looks.figures, 2),
    Command("speed", "lab zero2", f"run zero2 {_SPEED}", 120, looks.figures, 2),
    Command("speed", "lab no_shard", f"run no_shard {_SPEED}", 120, looks.figures, 2),
    Command(
        "tests", "marked gpu", "-m gpu -v -p no:cacheprovider -o addopts= {tests}", 1e9, looks.results_of_tests,
        module="pytest", folder=TESTS.parent,
    ),
)  # fmt: skip
PARTS = tuple(dict.fromkeys(row.part for row in TABLE))


def commands_of(part: str, check: Check) -> Iterator[Command]:
    """The part's command lines on this machine, all but `{out}` filled in. Where speed counts, a rank has its GPU."""
    device, ranks, gpus = check.device, check.ranks, check.gpus
    free = min((gpu["free"] for gpu in gpus), default=0)
    groups = [f"{name}:shard_size={ranks // 2}" for name in IN_GROUPS] if ranks % 2 == 0 else []
    own = max(1, len(gpus)) if device == "cuda" else ranks
    filled = {
        "device": device, "ranks": ranks, "own": own, "backend": "nccl" if device == "cuda" else "gloo",
        "strategies": ",".join([*OVER_ALL_RANKS, *groups, "full_shard:offload=cpu"]), "recorded": _RECORDED[device],
        "alone": fitting(free, lambda size: size.alone_gb), "together": fitting(free, lambda size: size.together_gb),
        "tests": " ".join(_files_of_tests()), "out": "{out}",
    }  # fmt: skip
    for row in TABLE:
        if row.part == part and (own if part == "speed" else ranks) >= row.least_ranks:
            yield replace(row, words=row.words.format_map(filled))


def _files_of_tests() -> list[str]:
    """The files with tests for a GPU, the course last: to import all others takes longer than these tests."""
    marked = [path.name for path in TESTS.glob("test_*.py") if "mark.gpu" in path.read_text("utf-8")]
    return [f"tests/{name}" for name in sorted(marked, key=lambda name: ("course" in name, name))]


def missing_for(command: Command) -> str:
    """What this Python lacks for a command, and what to do; "" where it lacks nothing."""
    if command.module == "pytest" and not TESTS.is_dir():
        return "the tests come with a clone of the repository"
    needed = {"fsdplab": ("typer", "rich"), "pytest": ("pytest",)}.get(command.module, ())
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"it needs {' and '.join(lacking)}; run: pip install {' '.join(lacking)}" if lacking else ""


def judge(part: Part, command: Command, status: str, wrong: str, wrote: Path) -> None:
    """Look at what a command has written, or say why it has written nothing."""
    if status == "refused":
        part.note(f"{command.name} is left out: {wrong.removeprefix('fsdplab: ')}")
    elif status != "finished":
        (part.check_value if "the loss is" in wrong else part.check)(f"{command.name} runs", wrong)
    if status != "finished" and command.module != "pytest":
        return
    try:
        command.look(part, command, wrote)
    except (RecordError, json.JSONDecodeError, OSError) as error:
        part.check(f"{command.name} wrote its result", str(error).splitlines()[0])
