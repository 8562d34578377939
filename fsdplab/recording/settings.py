"""Describes what is recorded of a job, and where: the launcher passes it to every process of the job by environment."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdplab.common.errors import UserError
from fsdplab.sessions.launch.mailbox import Mailbox

VARIABLE = "FSDPLAB_RECORD"
FILE = "spec.json"
COLUMNS = ("step", "loss", "step_time_s", "tokens", "loading_s", "cpu_s", "activities")  # a rank's row of a step
BOOTSTRAP = Path(__file__).parent / "bootstrap"
TIMED_AFTER = 10  # steps that are timed after the profiled ones
MOST_RANKS = 16  # a job of more has those of its first node recorded


class RecordingError(UserError, ValueError):
    """A recording that cannot be made as it was asked for."""


@dataclass(frozen=True)
class Settings:
    """`folder` gets the record; steps `first` to `end` - 1 are profiled, counted from 0; `ranks` are those that are
    profiled and whose memory is measured, None for the usual ones; `job` is what the record is called.
    """

    folder: str
    first: int = 8
    end: int = 16
    ranks: tuple[int, ...] | None = None
    job: str = "job"

    def __post_init__(self) -> None:
        if not 3 < self.first < self.end:
            raise RecordingError(
                f"the steps to record are {self.first}:{self.end}; expected FIRST:END with FIRST at least 4, such as"
                " 8:16: they are counted from 0, the first makes the optimizer's state, and memory is measured before"
            )

    @property
    def mailbox(self) -> Mailbox:
        """The ranks' files."""
        return Mailbox(Path(self.folder) / "ranks")

    @property
    def file(self) -> Path:
        """Where these settings are kept, for whoever makes the record."""
        return self.mailbox.folder / FILE

    @property
    def last_timed(self) -> int:
        """The last step of which anything is noted; then every hook is passed through."""
        return self.end - 1 + TIMED_AFTER

    def memory_step(self, warmup: int) -> int:
        """Return the step whose memory is measured: before the `warmup` steps that the profiler throws away, and one
        more.

        A step that is compiled ends inside a range that torch opens around compiled code. If one profiler stopped there
        and the next one started, the end of that range would write into the first, whose memory is freed by then.
        """
        # steps 8:16 with one step of warm-up on a GPU: memory in step 5, warm-up in 7
        return self.first - warmup - 2

    def measures(self, rank: int, world_size: int, of_a_node: int) -> bool:
        """Return whether this rank is profiled, or only timed."""
        if self.ranks is not None:
            return rank in self.ranks
        # of 64 ranks on nodes of 8 the first 8
        return world_size <= MOST_RANKS or rank < min(of_a_node, MOST_RANKS)

    def as_text(self) -> str:
        """As the environment holds it."""
        return json.dumps(asdict(self))

    @classmethod
    def of_environment(cls) -> Settings | None:
        """Return what the launcher said; None in a process of no recorded job."""
        said = os.environ.get(VARIABLE)
        return None if said is None else cls.read(said)

    @classmethod
    def read(cls, text: str) -> Settings:
        """Return the settings that `as_text` wrote."""
        content = json.loads(text)
        return cls(**{**content, "ranks": content["ranks"] and tuple(content["ranks"])})

    @classmethod
    def in_file(cls, path: Path) -> Settings | None:
        """Return the settings of the recorded job that a file holds; None where there is none: a run of the lab has
        its spec in a file of that name.
        """
        try:
            return cls.read(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError):
            return None


def steps_of(text: str) -> tuple[int, int]:
    """Return (8, 16) for `"8:16"`."""
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal()):
        raise RecordingError(f"--steps is {text!r}; expected FIRST:END, such as 8:16")
    return int(first), int(end)


def environment(settings: Settings, base: Collection[tuple[str, str]]) -> dict[str, str]:
    """Return the environment of a recorded job: `base` and two variables, and no lines of the profiler's in what it
    prints.
    """
    variables = {"KINETO_LOG_LEVEL": "99", **dict(base)}
    above = variables.get("PYTHONPATH")
    return {
        **variables,
        VARIABLE: settings.as_text(),
        # Python imports `sitecustomize` from the first folder that has one
        "PYTHONPATH": os.pathsep.join([str(BOOTSTRAP), *([above] if above else [])]),
    }
