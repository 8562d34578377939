"""The job on live ranks, with a fault in it: what was seen of it comes back, whether it ended or not."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fsdplab.sessions import RanksFailed, call_on_ranks
from fsdplab.teaching.core.waiting import doing

from .faults import FAULTS
from .naming import Row, Seen

STEPS = 10
_TIME_LIMIT = 60.0


def inject(name: str = "none", ranks: int = 2, steps: int = STEPS) -> Seen:
    """The job on live ranks with a fault in it, watched. KeyError for a name that is none of `names()`."""
    source = FAULTS[name].source()
    with tempfile.TemporaryDirectory() as folder, doing(f"the job on {ranks} ranks: {name}"):
        job, began, ended = Path(folder) / "job.py", time.monotonic(), ""
        job.write_text(source, encoding="utf-8")
        payload = {"source": str(job), "folder": folder, "steps": steps}
        values: Sequence[Row] = [{}] * ranks
        try:
            values = call_on_ranks(
                Path(__file__).with_name("on_ranks.py"), "watch", world_size=ranks, payload=payload,
                time_limit=_TIME_LIMIT,
            )  # fmt: skip
        except RanksFailed as error:
            ended = error.report.message.splitlines()[0]
        calls = [_calls(Path(folder) / f"calls{rank}") for rank in range(ranks)]
        return Seen(list(values), calls, ended, round(time.monotonic() - began, 1))


def _calls(path: Path) -> list[Row]:
    """A rank's calls by number: a line when one is issued, and another when its result is there."""
    found: dict[int, Row] = {}
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for each in text.splitlines(keepends=True):
        if each.endswith("\n"):  # a rank that was ended may have written half of its last line
            row = json.loads(each)
            found.setdefault(row["number"], {}).update(row)
    return list(found.values())
