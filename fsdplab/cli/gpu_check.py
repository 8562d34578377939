"""Checks a machine with GPUs (`fsdplab gpu-check`): runs four commands that you may type too, and keeps their results.

    fsdplab doctor       driver, kernels, NCCL, CUDA IPC                             doctor.json
    pytest -m gpu        streams, overlap, traces, memory (in a clone, with pytest)
    fsdplab compare      every strategy beside the unsharded twin, with traces       compare.json, records/
    fsdplab bench        the engines in turn                                         bench.json

Each runs in a process of its own and is printed before it begins. The files stay whatever comes after.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fsdplab.cli.answer import Answer, Line, Part, Table
from fsdplab.cli.errors import refuse
from fsdplab.cli.lab import run_module
from fsdplab.common.places import checkout
from fsdplab.records import FORMAT
from fsdplab.sessions.gpu_probes import ask

_TINY = ("--model", "gpt-tiny", "--sequence-length", "32")


class Command(NamedTuple):
    """One command of the check: what `python -m module words...` runs."""

    module: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.module, *self.words))


def gpu_check(device: str, out: Path | None) -> Answer:
    """Run the commands in order; as JSON `{"format": 2, "commands": [{"command", "exit_code", "seconds"}, ...]}`."""
    if device not in ("cuda", "cpu"):
        refuse(f"--device is {device!r}; expected cuda, or cpu for a rehearsal in tiny sizes")
    folder = out or Path(f"gpu-check-{device}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        refuse(f"--out is {folder}, which is not empty; give a new folder, so that no earlier result is mixed in")
    ranks = _ranks(device)
    folder.mkdir(parents=True, exist_ok=True)

    rows = []
    for command in commands(device, ranks, folder):
        print(f"\n{command}", flush=True)
        began = time.monotonic()
        # a command that fails does not end the check: the others' results are wanted too
        code = run_module(command.module, command.words)
        rows.append({"command": str(command), "exit_code": code, "seconds": round(time.monotonic() - began, 1)})

    cells, failed = [], 0
    for row in rows:
        ended = "ok"
        if row["exit_code"] != 0:
            ended = "failed"
            failed += 1
        cells.append((str(row["command"])[:80], f"{row['seconds']} s", ended))
    verdict = "all commands ended well"
    if failed:
        verdict = f"{failed} of {len(rows)} commands failed"
    table = Table(("command", "time", "ended"), cells, ("command",))
    parts: list[Part] = [table, Line(f"{verdict}; kept in {folder}")]
    return Answer(parts, {"format": FORMAT, "device": device, "commands": rows}, code=1 if failed else 0)


def commands(device: str, ranks: int, folder: Path) -> Iterator[Command]:
    """Yield the commands; on the CPU, which is a rehearsal, with a tiny model and without the tests for GPUs."""
    rehearsal = device == "cpu"
    on_device = ["--device", device, "--world-size", str(ranks)]
    if rehearsal:
        on_device += _TINY
    yield Command("fsdplab", ("doctor", "--json", str(folder / "doctor.json")))
    clone = checkout()
    has_pytest = importlib.util.find_spec("pytest") is not None
    if not rehearsal and clone is not None and has_pytest:
        yield Command("pytest", ("-m", "gpu", "-o", "addopts=", "-p", "no:cacheprovider", str(clone / "tests")))
    files = ("--keep", str(folder / "records"), "--json", str(folder / "compare.json"))
    yield Command("fsdplab", ("compare", *on_device, *files, "--link", "none", "--card", "none"))
    rounds = ("--rounds", "2") if rehearsal else ()
    yield Command("fsdplab", ("bench", *on_device, *rounds, "--json", str(folder / "bench.json")))


def _ranks(device: str) -> int:
    """Return one rank for each GPU, and two that share a single GPU, unless its compute mode forbids that."""
    if device == "cpu":
        return 2
    machine = ask("machine")
    why = machine.get("error") or machine["blocks"]
    if why:
        refuse(f"{why}; or try --device cpu, a rehearsal in tiny sizes")
    gpus = machine["gpus"]
    exclusive = any(gpu["exclusive"] for gpu in gpus)
    # one rank alone sends nothing: two share a single GPU where its mode allows that
    fewest = 1 if exclusive else 2
    return max(len(gpus), fewest)
