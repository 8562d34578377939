"""What ranks observe of functions that return odd values: `tests/test_odd_answers.py` has the feedback on it."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdplab.teaching.core import exercise_file, on_ranks
from fsdplab.teaching.core.course_state import open_course


def observed_on_this_rank(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Try each program on the first case of its exercise; return what was seen, or the traceback of what it raised."""
    open_course(workspace=payload["workspace"])
    return [_try(program) for program in payload["programs"]]


def _try(program: dict[str, Any]) -> dict[str, Any]:
    exercise = exercise_file.Exercise(Path(program["exercise"]))
    observed = on_ranks.Observed(exercise, Path(program["solution"]))
    name, *given = next(iter(exercise.module().cases(dist.get_rank(), dist.get_world_size())))
    try:
        return on_ranks._seen_on_this_rank(name, observed, given, {**program, "path": program["solution"]})
    except Exception:  # whatever an odd value leads to is reported, as a rank's end would be
        dist.barrier()
        return {"raised": traceback.format_exc()}
