"""A class's leaderboard: every learner's `fully_shard` tried in all stages of notebook 20, a row each, as a CSV file.

Learners hand in their file `20.fully_shard.py`, or their whole folder `my_fsdp`. Nothing is timed: exposed time is that
of the steady clock, memory and messages are counted, so a row is the same on every machine.
"""

from __future__ import annotations

import csv
import io
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from fsdplab.common.files import write_whole
from fsdplab.sessions import RanksFailed
from fsdplab.teaching.core import checking, judging
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.core.registry import find
from fsdplab.teaching.core.run_submission import Behaviour, behaviours
from fsdplab.teaching.core.verdicts import Feedback
from fsdplab.teaching.core.workspace import Workspace, has_code

WHOLE = "20.fully_shard"
STAGES = ("20.shards", "20.forward", "20.backward", "20.overlap", "20.special", WHOLE)
_FILE = f"{WHOLE}.py"


@dataclass(frozen=True)
class Row:
    """One learner: stages passed of six, and what the passed ones measured (None where not reached): MB at the peak of
    gpt-20m on 2 ranks, all-gathers and reduce-scatters of a step there, ms exposed on the steady clock, lines of code.
    """

    learner: str
    stages: int
    peak_mb: float | None
    collectives: int | None
    exposed_ms: float | None
    lines: int
    stopped_by: str = ""

    @property
    def order(self) -> tuple[float, ...]:
        """Return a key that sorts the best row first.

        Most stages come first, then least exposed, then least memory, then fewest lines.
        """
        most = float("inf")
        return (
            -self.stages,
            most if self.exposed_ms is None else self.exposed_ms,
            most if self.peak_mb is None else self.peak_mb,
            self.lines,
        )


def code_lines(source: str) -> int:
    """Count the lines that are neither blank nor comments."""
    return sum(has_code(line) for line in source.splitlines())


def handed_in(folder: Path) -> list[tuple[str, Path]]:
    """Return (learner, file) of what a folder holds.

    Files are `ada/my_fsdp/20.fully_shard.py`, `ada/20.fully_shard.py` or `ada.py`.
    """
    files = {}
    # the first folder of the path is the learner's name
    for path in sorted(folder.glob(f"*/**/{_FILE}")):
        files[path.relative_to(folder).parts[0]] = path
    for path in folder.glob("*.py"):
        files[path.stem] = path
    return sorted(files.items())


def leaderboard(folder: Path, on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Try each learner's file in `folder`, and return a row for each, the best first.

    Stages are tried up to the first that fails.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="fsdplab-class-") as scratch:
        for learner, path in handed_in(folder):
            rows.append(_row(learner, path, Workspace(Path(scratch) / learner / "my_fsdp")))
            on_row(rows[-1])
    return sorted(rows, key=lambda row: row.order)


def _row(learner: str, path: Path, workspace: Workspace) -> Row:
    """Try one learner's file in all stages up to the first that fails."""
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:  # the others of the class are tried all the same
        return Row(learner, 0, None, None, None, 0, f"{path.name} cannot be read: {error}")
    saved = workspace.save(WHOLE, source)
    passed, stopped = 0, ""
    figures: dict[str, float] = {}
    for seen, feedback in _stages(saved, workspace):
        # figures of stages that passed, and of the one that failed where it returned
        if seen is not None:
            figures |= seen.trials[0][0].returned.get("_leaderboard", {})
        if feedback is not None:
            # as many stages as have passed: the next one is the one that failed
            stopped = f"{STAGES[passed]}: {feedback.cause}"
            break
        passed += 1
    collectives = figures.get("collectives")
    return Row(
        learner,
        passed,
        figures.get("peak_mb"),
        None if collectives is None else int(collectives),
        figures.get("exposed_ms"),
        code_lines(source),
        stopped,
    )


def _stages(path: Path, workspace: Workspace) -> Iterator[tuple[Behaviour | None, Feedback | None]]:
    """Yield what was seen of each stage, and the feedback on it; None where it is right."""
    for stage in STAGES:
        exercise = find(stage, Exercise)
        try:
            # these exercises have EXPECTED facts, so no reference runs beside the learner's file
            (seen,) = behaviours([(exercise, path)], workspace)
        except RanksFailed as failure:
            yield None, checking.feedback_on_failure(exercise, failure.report)
            continue
        yield seen, judging.judge(exercise, seen, None)


def write(rows: list[Row], out: Path) -> None:
    """Write the rows as CSV, a learner a line."""
    text = io.StringIO()
    table = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
    table.writeheader()
    table.writerows(asdict(row) for row in rows)
    write_whole(out, text.getvalue())
