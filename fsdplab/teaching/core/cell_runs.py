"""`%%exercise`, `%%ranks` and `%ranks` as plain functions, which also work in a script without IPython.

run_ranks("3", "print(rank)")     %%ranks 3       three fresh ranks, which end with the cell
manage_ranks("4")                 %ranks 4        four ranks that stay until `%ranks stop`
run_ranks("", "x = rank")         %%ranks         all that stay; two fresh ones where none do
run_ranks("[0,2]", "print(x)")    %%ranks[0,2]    two of those that stay
"""

from __future__ import annotations

import re
import traceback
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fsdplab.common.words import plural
from fsdplab.sessions import RanksFailed, call_on_ranks
from fsdplab.sessions.cell_ranks.cell_loop import FRESH_TITLE, show_source
from fsdplab.sessions.cell_ranks.ranks import StayingRanks, print_labelled
from fsdplab.sessions.spec import SpecError

from .course_state import current
from .exercise_file import Exercise
from .registry import find, items_of
from .run_submission import ON_RANKS
from .waiting import doing
from .workspace import WorkspaceError, has_code

MOST_RANKS = 16
RANKS_TIME_LIMIT = 90.0
_MANAGE = "%ranks 4, %ranks status, %ranks reset or %ranks stop"
_NEW_ONES = " `%ranks reset` starts new ones."
_LIMIT = re.compile(r"--limit(?:[= ]\s*(\S+))?")
# the learner's frames follow
_OWN_FRAMES = re.compile(rf'  File "[^"]*{re.escape(ON_RANKS.name)}", line .*\n(?:    .*\n)*')


class CellFailed(RuntimeError):
    """A `%%ranks` cell that did not end well; its text is the one report."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@dataclass(frozen=True)
class CellLine:
    """The arguments of `%%ranks`: a number of fresh ranks, some of those that stay, or neither; and the limit in
    seconds.
    """

    fresh: int | None
    chosen: tuple[int, ...] | None
    limit: float


_staying: list[StayingRanks] = []  # one or none


def run_exercise(line: str, cell: str, namespace: dict[str, Any]) -> None:
    """Save the cell of `%%exercise ID` as `my_fsdp/<id>.py`, where ranks can import it, and run it in `namespace` too.

    In the teacher edition a cell of comments stands for the reference.
    """
    try:
        exercise = find(line.strip(), Exercise)
    except (WorkspaceError, LookupError) as error:
        raise usage_error(f"%%exercise: {error}") from error
    if not has_code(cell) and current().edition == "teacher":
        cell = exercise.reference  # a source names the exercise only
    path = current().workspace.save(exercise.id, cell)
    # compiled under the file's name, so that a traceback shows its lines
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)
    if exercise.function not in namespace:
        raise usage_error(f"%%exercise {exercise.id}: the cell must define {exercise.function}(...)")
    following = f"check({exercise.id!r})"
    if _is_written_in_stages(exercise):
        following = "the check of your stage"
    print(f"Saved as {path.parent.name}/{path.name}. Next: {following}")


def _is_written_in_stages(exercise: Exercise) -> bool:
    """Return whether stages of the same notebook check this exercise's function."""
    for item in items_of(exercise.id[:2]):
        if isinstance(item, Exercise) and item.is_stage and item.written_as.id == exercise.id:
            return True
    return False


def run_ranks(line: str, cell: str) -> None:
    """Run the cell of `%%ranks` on ranks, and print what they print, labelled, while they run."""
    wanted = cell_line(line)
    _check_syntax(cell)
    ranks = wanted.fresh or 2
    # a cell without a number runs on the ranks that stay, whatever their number
    if wanted.fresh is None and _staying:
        ranks = _staying[0].world_size
    # how cells reach the GPUs, once for each number of ranks
    _say_devices(ranks)
    if wanted.fresh is None and (wanted.chosen is not None or _staying):
        _run_on_staying(cell, wanted)
        return
    with doing(f"running the cell on {plural(ranks, 'fresh rank')}"):
        printed = run_cell_on_ranks(cell, ranks, limit=wanted.limit, show=True)
    for rank, text in enumerate(printed):
        if not text:
            print_labelled(rank, "(printed nothing)")


@cache
def _say_devices(ranks: int) -> None:
    """Print, once for each number of ranks, how cells reach the GPUs of this machine; nothing where it has none."""
    words = device_words(torch.cuda.device_count(), ranks)
    if words:
        print(words)


def device_words(gpus: int, ranks: int) -> str:
    """Return how `ranks` ranks of a cell use `gpus` GPUs; "" without one."""
    if not gpus:
        return ""
    if gpus < ranks:
        return (
            f'The ranks begin on the CPU. device="cuda" is GPU rank % {gpus}, which ranks share;'
            " gloo carries its tensors through host memory."
        )
    return (
        'The ranks begin on the CPU. device="cuda" is the GPU of each; NCCL carries its tensors, gloo those of the CPU.'
    )


def manage_ranks(line: str) -> None:
    """Start ranks that stay (`%ranks 4`), or do what `%ranks status`, `%ranks reset` or `%ranks stop` asks.

    `reset` starts fresh ranks, of the same number.
    """
    word = line.strip() or "status"
    if word == "status":
        _print_status()
    elif word == "stop":
        print(_stop() or "No ranks stay.")
    elif word == "reset":
        if not _staying:
            raise usage_error("%ranks reset: no ranks stay; write for example %ranks 2")
        _start(_staying[0].world_size)
    elif not word.isdecimal() or not 1 <= int(word) <= MOST_RANKS:
        raise usage_error(
            f"%ranks: expected a number of ranks from 1 to {MOST_RANKS}, status, reset or stop, got {word!r}; write"
            f" {_MANAGE}"
        )
    # running the notebook's first cell again must not lose what they hold
    elif _staying and _staying[0].alive and _staying[0].world_size == int(word):
        print(f"{word} ranks stay already, with what they hold. `%ranks reset` starts fresh ones.")
    else:
        _start(int(word))


def _print_status() -> None:
    """Print what the ranks that stay hold, and why they ended where they did."""
    if not _staying:
        print("No ranks stay. `%ranks 2` starts two.")
        return
    ranks = _staying[0]
    print("\n".join(map(str, ranks.status())))
    if ranks.failure is not None:
        print(ranks.failure.message + _NEW_ONES)


def _start(world_size: int) -> None:
    """Start ranks that stay, in place of those that do; they import what the learner saves before each cell."""
    ended = _stop()
    if ended:
        print(ended)
    before = (
        f"from fsdplab.teaching.core.on_ranks import import_latest\nimport_latest({str(current().workspace.path)!r})\n"
    )
    try:
        _staying[:] = [StayingRanks.start(world_size, before=before)]
    except RanksFailed as failure:
        raise CellFailed(str(failure)) from None
    stay = f"{world_size} {'rank stays' if world_size == 1 else 'ranks stay'}"
    print(f"{stay}: what a `%%ranks` cell defines is there for the next. `%ranks stop` ends them.")


def _stop() -> str:
    """End the ranks that stay and describe what is lost; empty where there were none."""
    if not _staying:
        return ""
    ranks = _staying.pop()
    if not ranks.alive:
        return ""
    # what any of them holds, since cells may define names on some ranks only
    names: set[str] = set()
    for status in ranks.status():
        names.update(status.names)
    ranks.stop()
    ended = f"{ranks.world_size} {'rank' if ranks.world_size == 1 else 'ranks'} ended"
    if not names:
        return f"{ended}."
    return f"{ended}, and what they held: {', '.join(sorted(names))}."


def cell_line(line: str) -> CellLine:
    """Read `""`, `"3"` or `"[0,2]"`, each also with `--limit 5`; a usage error for anything else."""
    limit = RANKS_TIME_LIMIT
    given = _LIMIT.search(line)
    if given is not None:
        limit = _seconds(given[1])
        # what is left is the number, or the ranks
        line = line[: given.start()] + line[given.end() :]
    text = line.strip()
    if text.startswith("["):
        return CellLine(None, _chosen(text), limit)
    if text:
        return CellLine(ranks_wanted(text), None, limit)
    return CellLine(None, None, limit)


def ranks_wanted(line: str) -> int:
    """Return the number in `%%ranks 3`; 2 where none is given."""
    text = line.strip() or "2"
    if not text.isdecimal() or not 1 <= int(text) <= MOST_RANKS:
        raise usage_error(
            f"%%ranks: expected a number of ranks from 1 to {MOST_RANKS}, got {text!r}; write for example %%ranks 3"
        )
    return int(text)


def _chosen(text: str) -> tuple[int, ...]:
    """Return the ranks in `[0,2]`, which must stay."""
    if not _staying:
        raise usage_error(f"%%ranks{text}: no ranks stay; start some with for example %ranks 4")
    staying = range(_staying[0].world_size)
    words = [""]  # wrong, as without a closing bracket
    if text.endswith("]"):
        words = [word.strip() for word in text[1:-1].split(",")]
    ranks = [int(word) for word in words if word.isdecimal() and int(word) in staying]
    # a word that is no rank of these, or one that is there twice
    if len(ranks) < len(words) or len(set(ranks)) < len(ranks):
        raise usage_error(
            f"%%ranks{text}: expected some of the ranks {', '.join(map(str, staying))}, each once; write for example"
            " %%ranks[0]"
        )
    return tuple(ranks)


def _seconds(text: str | None) -> float:
    """Return the seconds of `--limit`; a usage error for anything but a number above 0."""
    try:
        seconds = float(text or "")
    except ValueError:
        seconds = 0.0
    # NaN fails this too
    if not 0 < seconds < float("inf"):
        raise usage_error(
            f"%%ranks --limit: expected seconds above 0, got {text or 'nothing'!r}; write for example %%ranks --limit 5"
        )
    return seconds


def _check_syntax(cell: str) -> None:
    """Raise CellFailed with the learner's line, before any rank is asked."""
    show_source(cell, FRESH_TITLE)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks warn
            compile(cell, FRESH_TITLE, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        raise CellFailed("".join(traceback.format_exception_only(error)).rstrip()) from None


def _run_on_staying(cell: str, wanted: CellLine) -> None:
    """Run a cell on ranks that stay; CellFailed with the report where it does not end well."""
    ranks = _staying[0]
    if not ranks.alive:
        assert ranks.failure is not None, "ranks that have ended say how"
        raise usage_error(f"%%ranks: the ranks that stayed have ended: {ranks.failure.message}{_NEW_ONES}")
    try:
        ranks.run(cell, wanted.chosen, time_limit=wanted.limit)
    except RanksFailed as failure:
        # right behind the report's own message
        said, advice = failure.report.message, "" if ranks.alive else _NEW_ONES
        raise CellFailed(str(failure).replace(said, said + advice, 1)) from None
    except SpecError as refused:
        raise usage_error(f"%%ranks: {refused}") from None


def run_cell_on_ranks(
    source: str, world_size: int, *, limit: float = RANKS_TIME_LIMIT, show: bool = False
) -> list[str]:
    """Return the output of every fresh rank, by rank.

    CellFailed with the report when one raises, dies or does not end.
    """
    payload = {"source": source, "workspace": str(current().workspace.path)}
    on_output = print_labelled if show else None
    try:
        return call_on_ranks(
            ON_RANKS,
            "run_cell",
            world_size=world_size,
            payload=payload,
            time_limit=limit,
            on_output=on_output,
            device="any",
        ).output
    except RanksFailed as failure:
        raise CellFailed(_OWN_FRAMES.sub("", str(failure))) from None


def usage_error(message: str) -> Exception:
    """Return an error that IPython shows in one line, without a traceback; a ValueError without IPython."""
    try:
        from IPython.core.error import UsageError
    except ModuleNotFoundError:
        return ValueError(message)
    return UsageError(message)
