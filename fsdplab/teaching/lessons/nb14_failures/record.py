"""Records what notebook 14 opens without ranks: cases to guess from, and what PyTorch's own tools print.

python -m fsdplab.teaching.lessons.nb14_failures.record data/failures-14

Of the texts only lines are kept that say something of the fault: no frames of PyTorch's own, no paths, no process ids.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

import torch

from fsdplab.teaching.lessons.faulty_job.lesson import FAULTS, inject

from .lesson import CARDS

_MAIN = """

if __name__ == "__main__":
    import os
    from datetime import timedelta

    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    units, optimizer = build(rank, dist.get_world_size())
    try:
        losses = [train_step(units, optimizer, step, rank) for step in range(10)]
        print(f"rank {rank}: the last loss is {losses[-1]:.4f}")
    finally:
        folder = os.environ.get("DUMPS")
        if folder:  # what NCCL does by itself where a message does not come
            from torch._C._distributed_c10d import _dump_fr_trace

            with open(f"{folder}/rank_{rank}", "wb") as file:
                file.write(_dump_fr_trace())
"""
_DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
TEXTS = {  # name of a text -> the fault, and what is set for it
    "torchrun": ("diverging branch", {}),
    "detail": ("diverging branch", _DETAIL),
    "abort": ("mismatched order", {}),
}


def main(folder: str) -> None:
    """Record the cards, the texts, and a row a fault of what torchrun says."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    for name in CARDS.values():
        inject(name).save(out / f"{name.replace(' ', '_')}.json.gz")
    for text, (name, settings) in TEXTS.items():
        (out / f"{text}.txt").write_text(_torchrun(name, settings)[1], encoding="utf-8")
    (out / "flight_recorder.txt").write_text(_flight_recorder("diverging branch"), encoding="utf-8")
    rows = {name: _row(name) for name in FAULTS if name != "none"}
    made = {"torch": torch.__version__, "backend": "gloo", "ranks": 2, "faults": rows}
    (out / "torchrun.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def _row(name: str) -> dict[str, str | int]:
    """Return how torchrun ends for a fault, and the line that names it.

    TORCH_DISTRIBUTED_DEBUG=DETAIL is set.
    """
    code, text = _torchrun(name, _DETAIL)
    for line in text.splitlines():
        # the first line that names an error, or else the loss with which a silent fault ends
        if "Error: " in line or "last loss" in line:
            says = re.sub(r"^\[rank\d\]: ", "", line)
            return {"exit": code, "says": says[:160]}
    return {"exit": code, "says": ""}


def _torchrun(name: str, settings: dict[str, str]) -> tuple[int, str]:
    """Return (exit code, what was printed) of the job under torchrun, with the fault in it."""
    command = ["torchrun", "--standalone", "--nproc-per-node=2", "job.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **settings}
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.py"
        job.write_text(FAULTS[name].source() + _MAIN, encoding="utf-8")
        done = _printed(["-m", "torch.distributed.run", *command[1:]], folder, environment, 120)
    # the first lines say what was run
    shown_settings = [f"{key}={value}" for key, value in settings.items() if key.startswith("TORCH")]
    shown = " ".join([*shown_settings, *command])
    header = f"# torch {torch.__version__}, 2 ranks over gloo\n$ {shown}\n"
    return done.returncode, header + _cleaned(done.stdout)


def _flight_recorder(name: str) -> str:
    """Return what PyTorch's analysis of the flight recorder's dumps says of a fault.

    torch 2.13 writes no name for gloo's group into a dump, and its analysis looks for one: it is put in.
    """
    command = ["-m", "torch.distributed.flight_recorder.fr_trace", ".", "--prefix", "rank_"]
    with tempfile.TemporaryDirectory() as folder:
        _torchrun(name, {"TORCH_FR_BUFFER_SIZE": "2000", "DUMPS": folder})
        for path in Path(folder).glob("rank_*"):
            dump = pickle.loads(path.read_bytes())
            group, description = dump["entries"][0]["process_group"]
            dump["pg_config"] = {group: {**dump["pg_config"][""], "name": group, "desc": description}}
            path.write_bytes(pickle.dumps(dump))
        done = _printed(command, folder, dict(os.environ), 60)
    header = f"# torch {torch.__version__}, dumps of TORCH_FR_BUFFER_SIZE=2000\n$ python {' '.join(command)}\n"
    return header + _cleaned(done.stdout)


def _printed(command: list[str], folder: str, environment: dict[str, str], limit_s: float) -> CompletedProcess[str]:
    """Run Python; return its outputs as one text."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        timeout=limit_s,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


_SAY_SOMETHING = re.compile(
    r"(# torch|\$ |terminate called|  what\(\)|(\[rank\d\]: )?  File \"job.py|\[rank\d\]: [\w.]*Error|E torch"
    r"|Root Cause"
    r"|  (rank|exitcode) |Collective seq|collective|input sizes|expected ranks|error msg|\w+ at job.py)"
)


def _cleaned(text: str) -> str:
    """Return the lines that say something of the fault, without paths of this machine and process ids."""
    # paths up to the file's name, then times and process numbers, then addresses
    text = re.sub(r"/[^ \"\n]*/(?=job\.py|python\d|bin/python)", "", text)
    text = re.sub(r"^([EWI])\d{4} [\d:.]+ \d+ ", r"\1 ", text, flags=re.MULTILINE)
    text = re.sub(r"\(pid: [^)]*\)( of binary.*)?|/__w/pytorch/pytorch/third_party/|127\.0\.0\.1\S*: ", "", text)
    lines = [line.rstrip()[:300] for line in text.splitlines() if _SAY_SOMETHING.match(line)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(*sys.argv[1:])
