"""One part of the check, in a process of its own that never has a CUDA context: ranks and probes have them.

python -m fsdplab.gpu_check.part NAME FOLDER SECONDS      FOLDER holds the check.json of the parts before
"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from fsdplab.gpu_check.check import REFUSED, UNFINISHED, Refused, Sheet, open_check
from fsdplab.records import RunRecord
from fsdplab.sessions import RanksFailed, RunSpec, SpecError, run
from fsdplab.sessions.run_and_record import WORKER

MODULES = {
    **dict.fromkeys(("environment", "mechanisms", "nccl", "correctness"), "foundations"),
    **dict.fromkeys(("traces", "speed"), "measures"),
}
_TINY: dict[str, Any] = dict(model="gpt-tiny", batch_size=2, sequence_length=32, steps=2)


class Work(Sheet):
    """A part's sheet, with the machine that it works on.

    `device`: cuda or cpu; `gpus`: the environment's row of each GPU; `ranks`: one for each GPU, and two that share it
    where there is one.
    """

    def __init__(self, name: str, folder: Path, seconds: float) -> None:
        check = open_check(folder)
        self.gpus = next((part.rows for part in check.parts if part.name == "environment"), [])
        super().__init__(name, folder / UNFINISHED, all(gpu["sum"] == 8.0 for gpu in self.gpus))
        self.device, self.commit = check.provenance["device"], check.provenance["commit"]
        one = 1 if any(gpu["exclusive"] for gpu in self.gpus) else 2
        self.ranks = len(self.gpus) if len(self.gpus) > 1 else one
        self._deadline = time.monotonic() + seconds
        faulthandler.dump_traceback_later(max(1.0, seconds - 2.0))  # says where it hangs

    def left(self) -> float:
        """Seconds that remain of the part's limit."""
        return self._deadline - time.monotonic()

    def spec(self, **settings: Any) -> RunSpec:
        """A run on this machine, within the time that is left: gpt-tiny on all GPUs, but for the settings."""
        limit = max(5.0, self.left() - 5.0)
        return RunSpec(**dict(_TINY, device=self.device, world_size=self.ranks, time_limit=limit) | settings)

    def record(self, name: str, program: Sequence[str] = WORKER, **settings: Any) -> RunRecord | None:
        """The record of one run, below the sheet's folder; None where it failed, which is a failed check.

        What ends because its loss is no number is not judged where kernels give wrong values.
        """
        try:
            return run(self.spec(**settings), directory=self.folder / self.name / name, program=program)
        except (RanksFailed, SpecError) as error:
            wrong = first_line(error)
            judge = self.check_value if "the loss is" in wrong else self.check
            judge(f"{name} runs", wrong)
            return None


def first_line(error: Exception) -> str:
    """The first line of an error, cut at 300 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def main(name: str, folder: str, seconds: str) -> int:
    """Do the work of one part: 0 done, 2 nothing can be checked here."""
    work = Work(name, Path(folder), float(seconds))
    work._save()
    try:
        getattr(import_module(f"fsdplab.gpu_check.{MODULES[name]}"), name)(work)
    except Refused as refused:
        print(refused, file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
