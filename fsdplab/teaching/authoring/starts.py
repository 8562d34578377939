"""Start times of a `%%ranks` cell and of a check of notebook 05, cold and warm. `fsdplab bench --starts` runs this.

    python -m fsdplab.teaching.authoring.starts REPETITIONS      one line of JSON a row

Cold is what both took before ranks were forked: torch.distributed.run and new Pythons.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable

from fsdplab.sessions.launch.launcher import ranks_started_by, start_torchrun
from fsdplab.sessions.starts import COLD, in_turn
from fsdplab.teaching.core.cell_runs import run_ranks
from fsdplab.teaching.core.checking import grade
from fsdplab.teaching.core.course_state import current, open_course
from fsdplab.teaching.core.exercise import Exercise
from fsdplab.teaching.core.registry import find

CHECKED = "05.reduce"  # runs on ranks, three of them
_CELL = "import torch.distributed as dist\nprint(dist.get_rank())\n"


def main(repetitions: str) -> None:
    """Time both, and print a line of JSON for each."""
    with tempfile.TemporaryDirectory(prefix="fsdplab-starts-") as folder:
        open_course("learner", folder)
        workspace = current().workspace
        workspace.save(CHECKED, find(CHECKED, Exercise).reference)
        for name, ask in (("%%ranks cell", lambda: run_ranks("2", _CELL)), (f"check({CHECKED!r})", check_once)):
            print(json.dumps(in_turn(name, lambda start: started(start, ask), int(repetitions)).as_dict()), flush=True)


def check_once() -> None:
    """One check of the reference solution; RuntimeError when it does not pass."""
    verdict = grade(CHECKED)
    if not verdict.passed:
        raise RuntimeError(str(verdict))


def started(start: str, ask: Callable[[], None]) -> None:
    """Call `ask` with ranks of torchrun, or with forked ones, and discard its output."""
    how = ranks_started_by(start_torchrun) if start == COLD else contextlib.nullcontext()
    with how, contextlib.redirect_stdout(io.StringIO()):
        ask()


if __name__ == "__main__":
    main(*sys.argv[1:])
