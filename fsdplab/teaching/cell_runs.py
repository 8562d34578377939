"""What `%%exercise` and `%%ranks` do, as plain functions: a script says with them what a cell says, also where there is no IPython."""

from __future__ import annotations

import re
from typing import Any

from fsdplab.sessions import RanksFailed, call_on_ranks

from .course_state import current
from .exercise import Exercise
from .exercises import find
from .home import HomeError
from .trials import ON_RANKS

MOST_RANKS = 16
RANKS_TIME_LIMIT = 90.0
_OWN_FRAMES = re.compile(rf'  File "[^"]*{re.escape(ON_RANKS.name)}", line .*\n(?:    .*\n)*')  # the learner's frames follow


class CellFailed(RuntimeError):
    """A `%%ranks` cell that did not end well; its text is the launcher's one report."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def run_exercise(line: str, cell: str, namespace: dict[str, Any]) -> None:
    """`%%exercise ID`: save the cell as `my_fsdp/<id>.py`, where ranks can import it, and run it in `namespace` too."""
    try:
        found = find(line.strip(), Exercise)
    except (HomeError, LookupError) as error:
        raise usage_error(f"%%exercise: {error}") from error
    path = current().home.save(found.id, cell)
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)
    if found.function not in namespace:
        raise usage_error(f"%%exercise {found.id}: the cell must define {found.function}(...)")
    print(f"Saved as {path.parent.name}/{path.name}. Next: check({found.id!r})")


def run_ranks(line: str, cell: str) -> None:
    """`%%ranks 2`: run the cell on fresh ranks, and print what each printed, in rank order."""
    for rank, text in enumerate(run_cell_on_ranks(cell, ranks_wanted(line))):
        lines = text.splitlines() or ["(printed nothing)"]
        print("\n".join(f"[rank {rank}] {each}" for each in lines))


def ranks_wanted(line: str) -> int:
    """The number in `%%ranks 3`; 2 where none is given."""
    text = line.strip() or "2"
    if not text.isdecimal() or not 1 <= int(text) <= MOST_RANKS:
        raise usage_error(f"%%ranks: expected a number of ranks from 1 to {MOST_RANKS}, got {text!r}; write for example %%ranks 3")
    return int(text)


def run_cell_on_ranks(source: str, world_size: int) -> list[str]:
    """What every rank printed, by rank; CellFailed with the launcher's report when one raises, dies or does not end."""
    payload = {"source": source, "home": str(current().home.path)}
    try:
        return call_on_ranks(ON_RANKS, "run_cell", world_size=world_size, payload=payload, time_limit=RANKS_TIME_LIMIT)
    except RanksFailed as failure:
        raise CellFailed(_OWN_FRAMES.sub("", str(failure))) from None


def usage_error(message: str) -> Exception:
    """What IPython shows in one line, without a traceback; a ValueError where there is no IPython."""
    try:
        from IPython.core.error import UsageError
    except ModuleNotFoundError:
        return ValueError(message)
    return UsageError(message)
