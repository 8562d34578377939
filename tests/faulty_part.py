"""A part of the GPU check that goes wrong on demand: `python -m tests.faulty_part ... --behave hangs`. The tests start
it for real.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from fsdplab.gpu_check.part import Sheet, part_parser, run_part
from fsdplab.records import RunRecord, Summary

SLEEPER = "import time; time.sleep(601.25)"  # told from other sleepers by its seconds


def child() -> int:
    """The id of a process in a session of its own, as ranks are, that nothing ties to its parent."""
    return subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True).pid


def keeps_a_record(sheet: Sheet, folder: Path) -> None:
    RunRecord(
        folder / "run-a",
        spec={"strategy": "full_shard", "engine": "lab", "world_size": 1},
        summary=Summary(losses=(2.5,)),
    ).save()
    sheet.record("run-a")


def hangs(sheet: Sheet, folder: Path) -> None:
    told = folder / "pids.new"
    told.write_text(f"{os.getpid()} {child()}")
    told.rename(folder / "pids")
    time.sleep(600)


def fails(sheet: Sheet, folder: Path) -> None:
    child()
    raise RuntimeError("the third row cannot be")


def dies(sheet: Sheet, folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def writes_garbage(sheet: Sheet, folder: Path) -> None:
    sheet.path.write_text('{"part": "writes_gar')


def does_not_hold(sheet: Sheet, folder: Path) -> None:
    sheet.check("peak within 3 %", False, "7 %", "at most 3 %")


def is_good(sheet: Sheet, folder: Path) -> None:
    sheet.note("all in order")


if __name__ == "__main__":
    name = sys.argv[sys.argv.index("--behave") + 1]
    parser = part_parser(name)
    parser.add_argument("--behave")

    def work(sheet: Sheet, device: torch.device) -> None:
        sheet.row(step=1, milliseconds=2.5)
        print(f"{name} says hello from {sheet.folder}")
        globals()[name](sheet, sheet.folder)

    sys.exit(run_part(name, work, parser.parse_args()))
