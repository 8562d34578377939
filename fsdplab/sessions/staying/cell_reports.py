"""What is told of a cell on ranks that stay when it does not end well: one message, and the traceback or stack of each
rank, labelled.

Pure functions, as those in failure_report.py: `said` is what each rank wrote when it ended the cell, `stacks` where the
others stood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdplab.sessions.launch.failure_report import NO_ANSWER, Failure, named
from fsdplab.sessions.launch.mailbox import Beat

Said = Mapping[int, Mapping[str, Any]]
_LOST = "All ranks were ended, and what they held is lost."
_STAY = "All ranks stay, with what they hold."


class CellInterrupted(KeyboardInterrupt):
    """The caller was interrupted while a cell ran, and the cell with it; `.report` says what became of the ranks."""

    def __init__(self, report: Failure) -> None:
        super().__init__(in_full(report))
        self.report = report

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback through the library."""
        return [str(self)]


def in_full(report: Failure) -> str:
    """The message, and what each rank said."""
    return "\n\n".join(filter(None, (report.message, report.traceback)))


def raised(said: Said) -> Failure | None:
    """The report of a cell that every rank has ended; None where it ended well on all."""
    failed = {rank: each for rank, each in said.items() if each["error"]}
    if not failed:
        return None
    return Failure(
        "raised", f"{_what_was_raised(failed)}. {_STAY}", min(failed), traceback=_labelled(_tracebacks(failed))
    )


def interrupted(
    why: str, beats: Mapping[int, Beat], stacks: Mapping[int, str], said: Said, deaf: Sequence[int]
) -> Failure:
    """The report of a cell that was interrupted while the ranks of `beats` ran it; the `deaf` did not let themselves be
    interrupted.
    """
    blocks = _tracebacks({rank: each for rank, each in said.items() if each["error"]}) | _stood(beats, stacks)
    became = (
        f"{named(deaf)} could not be interrupted. {_LOST}"
        if deaf
        else f"{named(sorted(beats))} {_was(beats)} interrupted. {_STAY}"
    )
    rank = min(deaf or beats)
    return Failure(
        "hung",
        f"{why}. {became}",
        rank,
        phase=beats[rank].phase,
        collective=beats[rank].collective,
        traceback=_labelled(blocks),
    )


def waiting_for_ever(beats: Mapping[int, Beat], stacks: Mapping[int, str], said: Said, world_size: int) -> Failure:
    """The report of a cell whose last ranks, those of `beats`,
    wait in a collective to which the others will not come.
    """
    failed = {rank: each for rank, each in said.items() if each["error"]}
    absent = sorted(failed or set(range(world_size)) - set(beats))
    first, alone = beats[min(beats)], len(beats) == 1
    waiting, where = f"{named(sorted(beats))} {'waits' if alone else 'wait'} in", first.collective or "a collective"
    if failed:
        message = (
            f"{_what_was_raised(failed)}, and {waiting[0].lower()}{waiting[1:]} {where}, which cannot be interrupted."
            f" {_LOST}"
        )
    else:
        come = f"{named(absent).lower()} {'does' if len(absent) == 1 else 'do'} not come"
        message = f"{waiting} {where}, to which {come}, and cannot be interrupted. {_LOST}"
    blocks = _tracebacks(failed) | _stood(beats, stacks)
    return Failure(
        "raised" if failed else "hung", message, absent[0], collective=first.collective, traceback=_labelled(blocks)
    )


def _what_was_raised(failed: Said) -> str:
    errors = {each["error"].rstrip(".") for each in failed.values()}
    if len(errors) == 1:
        return f"{named(sorted(failed))} raised {errors.pop()}"
    return "; ".join(f"rank {rank} raised {failed[rank]['error'].rstrip('.')}" for rank in sorted(failed)).replace(
        "rank", "Rank", 1
    )


def _was(ranks: Mapping[int, Beat]) -> str:
    return "was" if len(ranks) == 1 else "were"


def _tracebacks(failed: Said) -> dict[int, str]:
    return {rank: failed[rank]["traceback"].rstrip() for rank in sorted(failed)}


def _stood(beats: Mapping[int, Beat], stacks: Mapping[int, str]) -> dict[int, str]:
    last = {
        rank: f"last collective: {beat.collective or 'none'}; stood in (innermost call first):"
        for rank, beat in beats.items()
    }
    return {rank: f"{last[rank]}\n{stacks.get(rank) or NO_ANSWER}" for rank in sorted(beats)}


def _labelled(blocks: Mapping[int, str]) -> str:
    """`[rank 1] ` before every line of what rank 1 says; ranks that say the same say it once."""
    who: dict[str, list[int]] = {}
    for rank in blocks:
        who.setdefault(blocks[rank], []).append(rank)
    return "\n\n".join(
        "\n".join(f"[{named(ranks).lower()}] {line}" for line in text.splitlines()) for text, ranks in who.items()
    )
