"""Trains runs with numbers, in one process under the stand-in: `python -m tests.fake_cuda.train CASES LOSSES.json`.

CASES is a JSON list of `{"spec": {...}, "left_out": "nothing"}`. LOSSES.json becomes the list of their losses by step,
or of the line that says why a run failed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from fsdplab.sessions.launch.failure_report import RanksFailed
from fsdplab.sessions.run_and_record import run
from fsdplab.sessions.spec import RunSpec

WORKER = Path(__file__).parent / "numbers_worker.py"


def losses(spec: RunSpec, left_out: str) -> list[float] | str:
    """The losses of a run, or why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            record = run(spec, directory=Path(folder) / "run", program=(str(WORKER), left_out))
        except RanksFailed as error:
            return str(error).splitlines()[0]
        return [float(loss) for loss in record.summary.losses if loss is not None]


def main(cases: str, answers: str) -> None:
    """Train all cases."""
    said = json.loads(cases)
    found = [losses(RunSpec(**case["spec"]), case.get("left_out", "nothing")) for case in said]
    Path(answers).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
