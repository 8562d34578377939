"""The report of a cell that failed on ranks that stay: one message, and the traceback or stack of each rank, labelled.

Pure functions, as in failure_report.py: `results` holds what each rank wrote at the end of the cell, `stacks` the
stacks of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdplab.sessions.launch.failure_report import NO_ANSWER, Failure, named
from fsdplab.sessions.launch.mailbox import Heartbeat

CellResults = Mapping[int, Mapping[str, Any]]
_LOST = "All ranks were ended, and what they held is lost."
_STAY = "All ranks stay, with what they hold."


class CellInterrupted(KeyboardInterrupt):
    """The caller was interrupted while a cell ran, and the cell with it; `.report` says whether the ranks stay."""

    def __init__(self, report: Failure) -> None:
        super().__init__(str(report))
        self.report = report

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows instead of a traceback through the library."""
        return [str(self)]


def raised(results: CellResults) -> Failure | None:
    """The report of a cell that every rank has ended; None where it ended well on all."""
    failed = {rank: each for rank, each in results.items() if each["error"]}
    if not failed:
        return None
    return Failure(
        "raised", f"{_what_was_raised(failed)}. {_STAY}", min(failed), traceback=_labelled(_tracebacks(failed))
    )


def interrupted(
    why: str, heartbeats: Mapping[int, Heartbeat], stacks: Mapping[int, str], results: CellResults, deaf: Sequence[int]
) -> Failure:
    """The report of a cell that was interrupted on the ranks of `heartbeats`; the `deaf` ranks could not be."""
    blocks = _tracebacks({rank: each for rank, each in results.items() if each["error"]}) | _stood(heartbeats, stacks)
    became = (
        f"{named(deaf)} could not be interrupted. {_LOST}"
        if deaf
        else f"{named(sorted(heartbeats))} {_was(heartbeats)} interrupted. {_STAY}"
    )
    rank = min(deaf or heartbeats)
    return Failure(
        "hung",
        f"{why}. {became}",
        rank,
        phase=heartbeats[rank].phase,
        collective=heartbeats[rank].collective,
        traceback=_labelled(blocks),
    )


def waiting_for_ever(
    heartbeats: Mapping[int, Heartbeat], stacks: Mapping[int, str], results: CellResults, world_size: int
) -> Failure:
    """The report of a cell whose ranks in `heartbeats` wait in a collective that the others will not enter."""
    failed = {rank: each for rank, each in results.items() if each["error"]}
    absent = sorted(failed or set(range(world_size)) - set(heartbeats))
    first, alone = heartbeats[min(heartbeats)], len(heartbeats) == 1
    waiting, where = (
        f"{named(sorted(heartbeats))} {'waits' if alone else 'wait'} in",
        first.collective or "a collective",
    )
    if failed:
        message = (
            f"{_what_was_raised(failed)}, and {waiting[0].lower()}{waiting[1:]} {where}, which cannot be interrupted."
            f" {_LOST}"
        )
    else:
        come = f"{named(absent).lower()} {'does' if len(absent) == 1 else 'do'} not come"
        message = f"{waiting} {where}, to which {come}, and cannot be interrupted. {_LOST}"
    blocks = _tracebacks(failed) | _stood(heartbeats, stacks)
    return Failure(
        "raised" if failed else "hung", message, absent[0], collective=first.collective, traceback=_labelled(blocks)
    )


def _what_was_raised(failed: CellResults) -> str:
    errors = {each["error"].rstrip(".") for each in failed.values()}
    if len(errors) == 1:
        return f"{named(sorted(failed))} raised {errors.pop()}"
    return "; ".join(f"rank {rank} raised {failed[rank]['error'].rstrip('.')}" for rank in sorted(failed)).replace(
        "rank", "Rank", 1
    )


def _was(ranks: Mapping[int, Heartbeat]) -> str:
    return "was" if len(ranks) == 1 else "were"


def _tracebacks(failed: CellResults) -> dict[int, str]:
    return {rank: failed[rank]["traceback"].rstrip() for rank in sorted(failed)}


def _stood(heartbeats: Mapping[int, Heartbeat], stacks: Mapping[int, str]) -> dict[int, str]:
    last = {
        rank: f"last collective: {heartbeat.collective or 'none'}; stood in (innermost call first):"
        for rank, heartbeat in heartbeats.items()
    }
    return {rank: f"{last[rank]}\n{stacks.get(rank) or NO_ANSWER}" for rank in sorted(heartbeats)}


def _labelled(blocks: Mapping[int, str]) -> str:
    """`[rank 1] ` before every line of rank 1; equal blocks are shown once."""
    who: dict[str, list[int]] = {}
    for rank in blocks:
        who.setdefault(blocks[rank], []).append(rank)
    return "\n\n".join(
        "\n".join(f"[{named(ranks).lower()}] {line}" for line in text.splitlines()) for text, ranks in who.items()
    )
