"""A command of the GPU check that goes wrong in the way that its name says. The tests start it for real.

It loads no torch, so that it starts at once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fsdplab.records import RunRecord, Summary

SLEEPER = "import time; time.sleep(601.25)"  # told from other sleepers by its seconds


def child() -> int:
    """The id of a process in a session of its own, as ranks are, that nothing ties to its parent."""
    return subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True).pid


def keeps_a_record(flag: str, out: str) -> None:
    spec = {"strategy": "full_shard", "engine": "lab", "world_size": 1, "model": "gpt-tiny", "batch_size": 2}
    more = {"sequence_length": 32, "profile": 1}
    RunRecord(Path(out), spec=spec | more, summary=Summary(losses=(2.5,))).save()


def hangs(pids: str) -> None:
    Path(pids).write_text(f"{os.getpid()} {child()} .")
    time.sleep(600)


def hangs_and_hears_nothing(pids: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hangs(pids)


def fails() -> None:
    child()
    raise RuntimeError(f"the third row is wrong in {Path(__file__)}")


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuses() -> None:
    print("fsdplab: nothing of this can be done here; try elsewhere", file=sys.stderr)
    sys.exit(2)


def loses_its_numbers() -> None:
    print("Rank 0 raised: the loss is nan")
    sys.exit(1)


def is_good() -> None:
    print(json.dumps({"milliseconds": 2.5}))


if __name__ == "__main__":
    print(f"{sys.argv[1]} says hello", flush=True)
    globals()[sys.argv[1]](*sys.argv[2:])
