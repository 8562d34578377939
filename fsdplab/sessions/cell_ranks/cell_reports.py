"""Reports a cell that failed on ranks that stay: one message, and the traceback or stack of each rank, labelled.

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
        """Return the line that IPython shows instead of a traceback through the library."""
        return [self.line]


def raised(results: CellResults) -> Failure | None:
    """Report a cell that every rank has ended; None where it ended well on all."""
    failed = _failed(results)
    if not failed:
        return None
    message = f"{_what_was_raised(failed)}. {_STAY}"
    return Failure("raised", message, min(failed), traceback=_labelled(failed, {}, {}))


def interrupted(
    why: str, heartbeats: Mapping[int, Heartbeat], stacks: Mapping[int, str], results: CellResults, deaf: Sequence[int]
) -> Failure:
    """Report a cell that was interrupted on the ranks of `heartbeats`; the `deaf` ranks could not be."""
    if deaf:
        outcome = f"{named(deaf)} could not be interrupted. {_LOST}"
    else:
        verb = "was" if len(heartbeats) == 1 else "were"
        outcome = f"{named(sorted(heartbeats))} {verb} interrupted. {_STAY}"
    # the report stands where the first rank is that does not answer
    at = heartbeats[min(deaf or heartbeats)]
    blocks = _labelled(_failed(results), heartbeats, stacks)
    return Failure("hung", f"{why}. {outcome}", at.rank, None, at.phase, at.collective, blocks)


def waiting_for_ever(
    heartbeats: Mapping[int, Heartbeat], stacks: Mapping[int, str], results: CellResults, world_size: int
) -> Failure:
    """Report a cell whose ranks in `heartbeats` wait in a collective that the others will not enter."""
    failed = _failed(results)
    collective = heartbeats[min(heartbeats)].collective
    # a rank that raised does not come; where none raised, those that do not wait stay away
    absent = sorted(failed or set(range(world_size)) - set(heartbeats))
    wait = "waits" if len(heartbeats) == 1 else "wait"
    # Ranks 0 and 2 wait in all_reduce of 4096 bytes
    waiting = f"{named(sorted(heartbeats))} {wait} in {collective or 'a collective'}"
    if failed:
        kind = "raised"
        sentence = f"{_what_was_raised(failed)}, and {waiting[0].lower()}{waiting[1:]}, which"
    else:
        kind = "hung"
        do = "does" if len(absent) == 1 else "do"
        sentence = f"{waiting}, to which {named(absent).lower()} {do} not come, and"
    message = f"{sentence} cannot be interrupted. {_LOST}"
    blocks = _labelled(failed, heartbeats, stacks)
    return Failure(kind, message, absent[0], collective=collective, traceback=blocks)


def _failed(results: CellResults) -> CellResults:
    return {rank: result for rank, result in sorted(results.items()) if result["error"]}


def _what_was_raised(failed: CellResults) -> str:
    """Say what the ranks raised: once for all of them where it is the same."""
    errors = {rank: result["error"].rstrip(".") for rank, result in failed.items()}
    if len(set(errors.values())) == 1:
        return f"{named(sorted(failed))} raised {errors[min(errors)]}"
    sentence = "; ".join(f"rank {rank} raised {error}" for rank, error in errors.items())
    # rank 0 raised ...; rank 1 raised ... -> Rank 0 raised ...
    return f"R{sentence[1:]}"


def _labelled(failed: CellResults, heartbeats: Mapping[int, Heartbeat], stacks: Mapping[int, str]) -> str:
    """Join the tracebacks of ranks that raised, then where those of `heartbeats` stood.

    `[rank 1] ` is before every line of rank 1; equal blocks are shown once.
    """
    texts = {rank: result["traceback"].rstrip() for rank, result in failed.items()}
    for rank, heartbeat in sorted(heartbeats.items()):
        last = f"last collective: {heartbeat.collective or 'none'}; stood in (innermost call first):"
        texts[rank] = f"{last}\n{stacks.get(rank) or NO_ANSWER}"
    blocks = []
    for text, ranks in grouped(texts, texts.__getitem__).items():
        label = f"[{named(ranks).lower()}]"
        blocks.append("\n".join(f"{label} {line}" for line in text.splitlines()))
    return "\n\n".join(blocks)
