"""The report of a failed run: which rank, which step, which collective, and why.

When one rank fails the others fail after it: their connections close, or they wait for ever and are ended. The report
is about the first. `gather` and `ask_for_stacks` collect the data from the mailbox and the ranks; the reports are pure
functions of a `PostMortem`.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fsdplab.common.errors import RunError
from fsdplab.common.processes import KILL, name_of, processor_seconds, send
from fsdplab.sessions.launch.mailbox import BUILDING, Heartbeat, Mailbox, read_heartbeats
from fsdplab.sessions.launch.stacks import readable, waits_for_device, waits_for_others

if TYPE_CHECKING:
    from fsdplab.records import RunRecord


@dataclass(frozen=True)
class Failure:
    """Why a run ended early. `kind`: died, raised, hung, diverged, or timeout (still working when the time was up).

    `rank` is None when all ranks wait for each other and none can be blamed.
    """

    kind: str
    message: str
    rank: int | None = None
    step: int | None = None
    phase: str | None = None
    collective: str | None = None
    traceback: str | None = None
    error: str | None = None  # what a rank raised, without its number

    def __str__(self) -> str:
        """The message, and the traceback or the stacks below it."""
        return "\n\n".join(filter(None, (self.message, (self.traceback or "").rstrip())))

    def as_dict(self) -> dict[str, Any]:
        """All fields, JSON-able."""
        return asdict(self)


class RanksFailed(RunError, RuntimeError):
    """A run ended early; `.report` is the Failure, `str()` the whole report, `.record` the record of the run if there
    is one.
    """

    def __init__(self, report: Failure, record: RunRecord | None = None) -> None:
        super().__init__(str(report))
        self.report = report
        self.record = record


class StarterLost(RanksFailed):
    """The warm starter was killed or stopped, and its ranks with it, by no fault of theirs: a second try helps."""


@dataclass(frozen=True)
class Note:
    """What a rank wrote of the exception that ended it: it raised or diverged, when, and where it was."""

    kind: str
    error: str
    traceback: str
    time: float
    at: Heartbeat


@dataclass(frozen=True)
class PostMortem:
    """The data of a failed run: each rank's exit code, exception, last heartbeat and stack; and torchrun's output.

    `busy` is the part of a core that a rank used while it was watched without a move, where that was measured.
    """

    exits: Mapping[int, int] = field(default_factory=dict)
    notes: Mapping[int, Note] = field(default_factory=dict)
    heartbeats: Mapping[int, Heartbeat] = field(default_factory=dict)
    stacks: Mapping[int, str] = field(default_factory=dict)
    busy: Mapping[int, float] = field(default_factory=dict)
    printed: str = ""


_LOOK_EVERY_S = 0.05
_ANSWER_WITHIN_S = 2.0


def gather(mailbox: Mailbox, world_size: int, exits: Mapping[int, int]) -> PostMortem:
    """Exit codes, notes, heartbeats and what was printed; no stacks, since the ranks may be gone."""
    return PostMortem(
        exits=exits,
        notes={
            rank: Note(**{**note, "at": Heartbeat(**note["at"])}) for rank, note in mailbox.reports("failure").items()
        },
        heartbeats=read_heartbeats(mailbox, world_size),
        printed=_printed(mailbox, world_size),
    )


def _printed(mailbox: Mailbox, world_size: int) -> str:
    """The output of a rank without a note: its standard error, or torchrun's log if it never started."""
    errors = [mailbox.of(rank, "err") for rank in range(world_size)]
    texts = [path.read_text(errors="replace") for path in errors if path.exists()]
    return "\n".join(filter(None, texts)) or mailbox.agent_log.read_text(errors="replace")


def ask_for_stacks(mailbox: Mailbox, heartbeats: Mapping[int, Heartbeat]) -> dict[int, str]:
    """The stack of every rank; ranks that do not answer within two seconds are left out."""
    asked = {rank: mailbox.of(rank, "stack") for rank in heartbeats}
    for path in asked.values():
        os.truncate(path, 0)  # an answer to an earlier question
    for heartbeat in heartbeats.values():
        send(heartbeat.pid, signal.SIGUSR1)
    deadline, seen = time.monotonic() + _ANSWER_WITHIN_S, [0]
    # an answer is written in several pieces
    while time.monotonic() < deadline and not (all(seen) and seen == _sizes(asked)):
        seen = _sizes(asked)
        time.sleep(_LOOK_EVERY_S)
    return {rank: stack for rank, path in asked.items() if (stack := readable(path.read_text(errors="replace")))}


def _sizes(asked: Mapping[int, os.PathLike[str]]) -> list[int]:
    return [os.stat(path).st_size for path in asked.values()]


def used_so_far(heartbeats: Mapping[int, Heartbeat]) -> dict[int, float]:
    """Processor seconds of each rank until now, of those that have not ended."""
    used = {rank: processor_seconds(heartbeat.pid) for rank, heartbeat in heartbeats.items()}
    return {rank: seconds for rank, seconds in used.items() if seconds is not None}


# Messages of gloo, nccl and the engine's shared memory when a peer is gone: another rank failed.
_PEER_IS_GONE = re.compile(
    r"gloo/transport|rank \d+ has (died|ended normally)|connection (was )?(closed|reset|refused)|broken pipe"
    r"|remote process exited|ncclRemoteError|ncclSystemError",
    re.IGNORECASE,
)
# the last is what saving a profile says (profiling/profiler.py): torch's exporter gives no reason
_DISK_IS_FULL = re.compile("No space left on device|File too large|Disk quota exceeded|a full disk or a limit")
_ENDED = " All ranks were ended."
_OWN_FAULT_SIGNALS = (KILL, signal.SIGSEGV, getattr(signal, "SIGBUS", None), signal.SIGILL, signal.SIGFPE)


def failed_first(post_mortem: PostMortem) -> Failure:
    """The report of a run in which a rank raised or died."""
    suspects = sorted(set(post_mortem.exits) | set(post_mortem.notes), key=lambda rank: _blame(rank, post_mortem))
    if not suspects:
        return _left_early(post_mortem) or Failure(
            "died", f"The ranks ended without a result and without an error.{_tail(post_mortem.printed)}"
        )
    rank = suspects[0]
    if _blame(rank, post_mortem)[0] >= _FOLLOWS and (left := _left_early(post_mortem)) is not None:
        return left
    return _raised(rank, post_mortem) if rank in post_mortem.notes else _died(rank, post_mortem)


_FOLLOWS = 4  # from here on, consequences of another failure


def _blame(rank: int, post_mortem: PostMortem) -> tuple[int, float, int]:
    """Sort key, the likeliest cause first: a crash, an exception of its own, an exit, a consequence of a lost peer."""
    note, code = post_mortem.notes.get(rank), post_mortem.exits.get(rank, 0)
    if note is not None:
        return (_FOLLOWS if _PEER_IS_GONE.search(note.error) else 1, note.time, rank)
    if -code in _OWN_FAULT_SIGNALS:
        return (0, 0.0, rank)
    # SIGTERM is how torchrun ends the others; SIGABRT is how C++ ends when a connection closes in its own thread
    return ({-signal.SIGABRT: 3, -signal.SIGTERM: _FOLLOWS + 1}.get(code, 2), 0.0, rank)


def blames_a_rank(post_mortem: PostMortem) -> bool:
    """Whether a rank ended by its own fault; not one that was ended, or that lost a peer."""
    suspects = set(post_mortem.exits) | set(post_mortem.notes)
    return any(_blame(rank, post_mortem)[0] < _FOLLOWS for rank in suspects)


def _left_early(post_mortem: PostMortem) -> Failure | None:
    """A rank that ended with exit code 0 and did not finish: torchrun does not notice."""
    unexplained = set(post_mortem.heartbeats) - set(post_mortem.exits) - set(post_mortem.notes)
    quitters = [
        post_mortem.heartbeats[rank] for rank in sorted(unexplained) if post_mortem.heartbeats[rank].phase != "finished"
    ]
    if not quitters:
        return None
    heartbeat = quitters[0]
    how = "with exit code 0 before its work was done (sys.exit or os._exit)"
    message = f"Rank {heartbeat.rank} left{_where(heartbeat)} {how}.{_after(heartbeat)}"
    return _at(heartbeat, "died", message, heartbeat.rank)


def _raised(rank: int, post_mortem: PostMortem) -> Failure:
    note = post_mortem.notes[rank]
    message = f"Rank {rank} {note.kind}{_where(note.at)}: {note.error.rstrip('.')}.{_after(note.at)}{_ENDED}"
    done = [
        other for other, heartbeat in post_mortem.heartbeats.items() if heartbeat.phase == "finished" and other != rank
    ]
    if done and _PEER_IS_GONE.search(note.error):
        message += f" {named(done)} had already finished, so rank {rank} waited for a message that no rank sends."
    full = _DISK_IS_FULL.search(note.error) is not None  # no line of a program is to blame
    if full:
        message += " Give a place with free space, and no limit on the size of files (ulimit -f)."
    return replace(_at(note.at, note.kind, message, rank, None if full else note.traceback), error=note.error)


def _died(rank: int, post_mortem: PostMortem) -> Failure:
    code, heartbeat = post_mortem.exits[rank], post_mortem.heartbeats.get(rank)
    if heartbeat is None:
        return Failure(
            "died", f"Rank {rank} ended with {_exit(code)} before it could start.{_tail(post_mortem.printed)}", rank
        )
    hint = " The system ends a process so when memory runs out." if code == -signal.SIGKILL else ""
    message = (
        f"Rank {rank} died{_where(heartbeat)}: it ended with"
        f" {_exit(code)}.{hint}{_after(heartbeat)}{_unlike(post_mortem)}{_ENDED}"
    )
    return _at(heartbeat, "died", message, rank)


def lost_agent(how: str, post_mortem: PostMortem) -> Failure:
    """The report of a run whose launcher was killed; its ranks ended with it."""
    heartbeat = min(post_mortem.heartbeats.values(), key=_progress, default=None)
    if heartbeat is None:
        return Failure("died", how)
    return _at(heartbeat, "died", f"{how} The run was{_where(heartbeat) or ' starting'}.", None)


def not_started(post_mortem: PostMortem, time_limit: float, world_size: int) -> Failure:
    """The report of a run that reached its time limit before all ranks had started."""
    silent = sorted(set(range(world_size)) - set(post_mortem.heartbeats))
    return Failure(
        "timeout",
        f"{named(silent)} did not start within the time limit of {time_limit:g} s.{_tail(post_mortem.printed)}",
        silent[0],
    )


def hung(post_mortem: PostMortem, idle_s: float) -> Failure:
    """The report of a run without progress: the rank that is behind, or the only one outside a collective."""
    rank, ranks = _behind(post_mortem), sorted(post_mortem.heartbeats)
    heartbeat = post_mortem.heartbeats[ranks[0] if rank is None else rank]
    subject = "All ranks wait for each other" if rank is None else f"Rank {rank} hung"
    waited = ", and the other ranks waited for it" if rank is not None and len(ranks) > 1 else ""
    message = (
        f"{subject}{_where(heartbeat)}: no progress for {idle_s:.0f}"
        f" s{waited}.{_after(heartbeat)}{_unlike(post_mortem)}{_ENDED}"
    )
    return _at(heartbeat, "hung", message, rank, _stood(post_mortem, ranks))


def _at(heartbeat: Heartbeat, kind: str, message: str, rank: int | None, traceback: str | None = None) -> Failure:
    """A report with the position of a heartbeat."""
    return Failure(kind, message, rank, heartbeat.step, heartbeat.phase, heartbeat.collective, traceback)


def _stood(post_mortem: PostMortem, ranks: Sequence[int]) -> str:
    return "\n\n".join(
        f"rank {each} stood in (innermost call first):\n{post_mortem.stacks.get(each) or NO_ANSWER}" for each in ranks
    )


NO_ANSWER = "  (it did not answer: the process is stopped, or stuck in the kernel)"


def too_slow(post_mortem: PostMortem, time_limit: float) -> Failure:
    """The report of a run that was still working at its time limit; of a rank that computed it shows where."""
    heartbeat = min(post_mortem.heartbeats.values(), key=_progress)
    rank = computing(post_mortem)
    heartbeat = heartbeat if rank is None else post_mortem.heartbeats[rank]
    working = (
        "its ranks still made progress"
        if rank is None
        else f"rank {rank} computed, at {_busy(post_mortem, rank):.0%} of a core"
    )
    message = (
        f"The time limit of {time_limit:g} s ended the run{_where(heartbeat)} while {working};"
        " give a longer time limit or fewer steps."
    )
    stood = None if rank is None else _stood(post_mortem, [rank])
    return _at(heartbeat, "timeout", message, heartbeat.rank, stood)


# Between two looks a rank that waits uses next to nothing, one that computes what others leave it of a core.
_COMPUTING = 0.1


def computing(post_mortem: PostMortem) -> int | None:
    """The rank that the others wait for, if it computes: it is not hung, however old its heartbeat is; else None.

    A host that waits for a GPU is busy too, so where the stack says that, being busy says nothing.
    """
    rank = _behind(post_mortem)
    if rank is None or waits_for_device(post_mortem.stacks.get(rank, "")):
        return None
    return rank if _busy(post_mortem, rank) >= _COMPUTING else None


def _busy(post_mortem: PostMortem, rank: int) -> float:
    return post_mortem.busy.get(rank, 0.0)


def _behind(post_mortem: PostMortem) -> int | None:
    least = min(map(_progress, post_mortem.heartbeats.values()))
    behind = [rank for rank, heartbeat in post_mortem.heartbeats.items() if _progress(heartbeat) == least]
    if len(behind) > 1:
        behind = [rank for rank in behind if not waits_for_others(post_mortem.stacks.get(rank, ""))]
    return min(behind, default=None)


def _progress(heartbeat: Heartbeat) -> tuple[int, int]:
    return heartbeat.phases, heartbeat.collectives


def _where(heartbeat: Heartbeat) -> str:
    if heartbeat.step is not None:
        return f" in step {heartbeat.step} ({heartbeat.phase})"
    return f" while {heartbeat.phase}" if heartbeat.phase == BUILDING else ""


def _after(heartbeat: Heartbeat) -> str:
    entered = f" The last collective it entered: {heartbeat.collective}." if heartbeat.collective else ""
    return entered + (f" The last it completed: {heartbeat.completed}." if heartbeat.completed else "")


_BETWEEN_TWO = ("send", "recv", "isend", "irecv")
UNLIKE = "ranks of one group make equal calls in one order"  # ends the report where two ranks' last calls do not agree


def _unlike(post_mortem: PostMortem) -> str:
    """What two ranks entered as the same collective by number, where it is not the same; a message between two ranks
    is another on each.
    """
    beats = [beat for _, beat in sorted(post_mortem.heartbeats.items()) if beat.collective is not None]
    for beat in beats[1:]:
        pair = (beats[0], beat)
        names = {str(each.collective) for each in pair}
        between_two = any(name.partition(" ")[0] in _BETWEEN_TWO for name in names)
        if beat.collectives == beats[0].collectives and len(names) == 2 and not between_two:
            told = ", ".join(f"rank {each.rank} entered {each.collective}" for each in pair)
            return f" As collective number {beat.collectives}, {told}: {UNLIKE}."
    return ""


def _exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"{name_of(-code)} (signal {-code})"


def named(ranks: Sequence[int]) -> str:
    """`"Ranks 0, 1 and 3"`, as a sentence begins."""
    return f"Rank {ranks[0]}" if len(ranks) == 1 else f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _tail(printed: str, lines: int = 12) -> str:
    kept = printed.strip().splitlines()[-lines:]
    return "\n" + "\n".join(kept) if kept else ""
