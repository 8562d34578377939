"""A part of the GPU check that goes wrong in the way that its name says. The tests start it for real.

It loads no torch, so that it starts at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fsdplab.gpu_check.check import UNFINISHED, Sheet
from fsdplab.records import RunRecord, Summary

SLEEPER = "import time; time.sleep(601.25)"  # told from other sleepers by its seconds


def child() -> int:
    """The id of a process in a session of its own, as ranks are, that nothing ties to its parent."""
    return subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True).pid


def keeps_a_record(sheet: Sheet) -> None:
    folder = sheet.folder / "keeps_a_record" / "run-a"
    spec = {"strategy": "full_shard", "engine": "lab", "world_size": 1}
    sheet.keep(RunRecord(folder, spec=spec, summary=Summary(losses=(2.5,))).save().path, "run-a")


def hangs(sheet: Sheet) -> None:
    sheet.note(f"{os.getpid()} {child()}")
    time.sleep(600)


def hangs_and_hears_nothing(sheet: Sheet) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hangs(sheet)


def fails(sheet: Sheet) -> None:
    child()
    raise RuntimeError(f"the third row is wrong in {Path(__file__)}")


def dies(sheet: Sheet) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuses(sheet: Sheet) -> None:
    sys.exit("nothing can be checked here; try elsewhere")


def does_not_hold(sheet: Sheet) -> None:
    sheet.check("peak within 3 %", "it is 7 % too large")
    sheet.check_value("losses", "losses are wrong")
    sheet.values = False
    sheet.check_value("gradients", "values are wrong: 0.0, expected 3.0")


def is_good(sheet: Sheet) -> None:
    sheet.note("all in order")


if __name__ == "__main__":
    sheet = Sheet(sys.argv[1], Path(sys.argv[2]) / UNFINISHED)
    sheet.row(step=1, milliseconds=2.5)
    print(f"{sheet.name} says hello")
    globals()[sheet.name](sheet)
