"""The report of a cell that failed on ranks that stay: one message, and the traceback or stack of each rank, labelled.

Pure functions, as in failure_report.py: `results` holds what each rank wrote at the end of the cell, `stacks` the
stacks of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdplab.common.rows import grouped
from fsdplab.sessions.launch.failure_report import NO_ANSWER, Failure, named
from fsdplab.sessions.launch.mailbox import Heartbeat
from fsdplab.sessions.stopped import RanksStopped

CellResults = Mapping[int, Mapping[str, Any]]
_LOST = "All ranks were ended, and what they held is lost."
_STAY = "All ranks stay, with what they hold."


class CellInterrupted(RanksStopped):
    """The caller was interrupted while a cell ran, and the cell with it; `.report` says where each rank was.

    `line` is what a notebook shows.
    """

    def __init__(self, report: Failure, line: str) -> None:
        super().__init__(str(report))
        self.report, self.line = report, line

    def _render_traceback_(self) -> list[str]:
        return [self.line]


def raised(results: CellResults) -> Failure | None:
    """The report of a cell that every rank has ended; None where it ended well on all."""
    failed = _failed(results)
    if not failed:
        return None
    return Failure("raised", f"{_what_was_raised(failed)}. {_STAY}", min(failed), traceback=_labelled(failed, {}, {}))


def interrupted(
    why: str, heartbeats: Mapping[int, Heartbeat], stacks: Mapping[int, str], results: CellResults, deaf: Sequence[int]
) -> Failure:
    """The report of a cell that was interrupted on the ranks of `heartbeats`; the `deaf` ranks could not be."""
    if deaf:
        became = f"{named(deaf)} could not be interrupted. {_LOST}"
    else:
        became = f"{named(sorted(heartbeats))} {'was' if len(heartbeats) == 1 else 'were'} interrupted. {_STAY}"
    at, blocks = heartbeats[min(deaf or heartbeats)], _labelled(_failed(results), heartbeats, stacks)
    return Failure("hung", f"{why}. {became}", at.rank, None, at.phase, at.collective, blocks)


def waiting_for_ever(
    heartbeats: Mapping[int, Heartbeat], stacks: Mapping[int, str], results: CellResults, world_size: int
) -> Failure:
    """The report of a cell whose ranks in `heartbeats` wait in a collective that the others will not enter."""
    failed, first = _failed(results), heartbeats[min(heartbeats)]
    absent = sorted(failed or set(range(world_size)) - set(heartbeats))
    verb, where = "waits" if len(heartbeats) == 1 else "wait", first.collective or "a collective"
    waiting = f"{named(sorted(heartbeats))} {verb} in {where}"
    if failed:
        waiting = f"{_what_was_raised(failed)}, and {waiting[0].lower()}{waiting[1:]}, which"
    else:
        waiting += f", to which {named(absent).lower()} {'does' if len(absent) == 1 else 'do'} not come, and"
    message, kind = f"{waiting} cannot be interrupted. {_LOST}", "raised" if failed else "hung"
    blocks = _labelled(failed, heartbeats, stacks)
    return Failure(kind, message, absent[0], collective=first.collective, traceback=blocks)


def _failed(results: CellResults) -> CellResults:
    return {rank: each for rank, each in sorted(results.items()) if each["error"]}


def _what_was_raised(failed: CellResults) -> str:
    errors = {each["error"].rstrip(".") for each in failed.values()}
    if len(errors) == 1:
        return f"{named(sorted(failed))} raised {errors.pop()}"
    each = "; ".join(f"rank {rank} raised {result['error'].rstrip('.')}" for rank, result in failed.items())
    return f"R{each[1:]}"


def _labelled(failed: CellResults, heartbeats: Mapping[int, Heartbeat], stacks: Mapping[int, str]) -> str:
    """The tracebacks of ranks that raised, then where those of `heartbeats` stood: `[rank 1] ` before every line of
    rank 1; equal blocks are shown once.
    """
    blocks = {rank: each["traceback"].rstrip() for rank, each in failed.items()}
    for rank, heartbeat in sorted(heartbeats.items()):
        last = f"last collective: {heartbeat.collective or 'none'}; stood in (innermost call first):"
        blocks[rank] = f"{last}\n{stacks.get(rank) or NO_ANSWER}"
    same = grouped(blocks, blocks.__getitem__)
    return "\n\n".join(
        "\n".join(f"[{named(ranks).lower()}] {line}" for line in text.splitlines()) for text, ranks in same.items()
    )
