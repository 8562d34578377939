"""Reports a failed run: which rank, which step, which collective, and why.

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
        """Return the message, and the traceback or the stacks below it."""
        parts = (self.message, (self.traceback or "").rstrip())
        return "\n\n".join(part for part in parts if part)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, JSON-able."""
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
    """Collect exit codes, notes, heartbeats and what was printed; no stacks, since the ranks may be gone."""
    notes = {}
    for rank, note in mailbox.reports("failure").items():
        notes[rank] = Note(**{**note, "at": Heartbeat(**note["at"])})
    return PostMortem(
        exits=exits, notes=notes, heartbeats=read_heartbeats(mailbox, world_size), printed=_printed(mailbox, world_size)
    )


def _printed(mailbox: Mailbox, world_size: int) -> str:
    """Return the output of a rank without a note: its standard error, or torchrun's log if it never started."""
    errors = [mailbox.of(rank, "err") for rank in range(world_size)]
    texts = [path.read_text(errors="replace") for path in errors if path.exists()]
    printed = "\n".join(text for text in texts if text)
    return printed or mailbox.agent_log.read_text(errors="replace")


def ask_for_stacks(mailbox: Mailbox, heartbeats: Mapping[int, Heartbeat]) -> dict[int, str]:
    """Return the stack of every rank; ranks that do not answer within two seconds are left out."""
    paths = {rank: mailbox.of(rank, "stack") for rank in heartbeats}
    for path in paths.values():
        os.truncate(path, 0)  # an answer to an earlier question
    for heartbeat in heartbeats.values():
        send(heartbeat.pid, signal.SIGUSR1)
    # an answer is written in several pieces: it is whole when all files have text and none has grown
    deadline = time.monotonic() + _ANSWER_WITHIN_S
    sizes = [0]
    while time.monotonic() < deadline and not (all(sizes) and sizes == _sizes(paths)):
        sizes = _sizes(paths)
        time.sleep(_LOOK_EVERY_S)
    stacks = {rank: readable(path.read_text(errors="replace")) for rank, path in paths.items()}
    return {rank: stack for rank, stack in stacks.items() if stack}


def _sizes(paths: Mapping[int, os.PathLike[str]]) -> list[int]:
    return [os.stat(path).st_size for path in paths.values()]


def used_so_far(heartbeats: Mapping[int, Heartbeat]) -> dict[int, float]:
    """Return the processor seconds of each rank until now, of those that have not ended."""
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
    """Report a run in which a rank raised or died."""
    suspects = sorted(set(post_mortem.exits) | set(post_mortem.notes), key=lambda rank: _blame(rank, post_mortem))
    if not suspects:
        return _left_early(post_mortem) or Failure(
            "died", f"The ranks ended without a result and without an error.{_tail(post_mortem.printed)}"
        )
    rank = suspects[0]
    if _blame(rank, post_mortem)[0] >= _FOLLOWS:
        # all that is known follows from another rank's end: the likeliest is one that went without a trace
        quitter = _left_early(post_mortem)
        if quitter is not None:
            return quitter
    if rank in post_mortem.notes:
        return _raised(rank, post_mortem)
    return _died(rank, post_mortem)


_FOLLOWS = 4  # from here on, consequences of another failure
# SIGTERM is how torchrun ends the others; SIGABRT is how C++ ends when a connection closes in its own thread
_BLAME_OF_EXITS = {-signal.SIGABRT: 3, -signal.SIGTERM: _FOLLOWS + 1}


def _blame(rank: int, post_mortem: PostMortem) -> tuple[int, float, int]:
    """Return a sort key, the likeliest cause first: a crash, an exception of its own, an exit, a consequence of a lost
    peer.
    """
    # 0 a crash, 1 an exception of its own, 2 an exit code, 3 an abort, 4 a lost peer, 5 ended by torchrun
    note = post_mortem.notes.get(rank)
    if note is not None:
        follows = _PEER_IS_GONE.search(note.error) is not None
        return (_FOLLOWS if follows else 1, note.time, rank)
    code = post_mortem.exits.get(rank, 0)
    if -code in _OWN_FAULT_SIGNALS:
        return (0, 0.0, rank)
    return (_BLAME_OF_EXITS.get(code, 2), 0.0, rank)


def blames_a_rank(post_mortem: PostMortem) -> bool:
    """Return whether a rank ended by its own fault; not one that was ended, or that lost a peer."""
    suspects = set(post_mortem.exits) | set(post_mortem.notes)
    return any(_blame(rank, post_mortem)[0] < _FOLLOWS for rank in suspects)


def _left_early(post_mortem: PostMortem) -> Failure | None:
    """Report a rank that ended with exit code 0 and did not finish, which torchrun does not notice; else None."""
    unexplained = set(post_mortem.heartbeats) - set(post_mortem.exits) - set(post_mortem.notes)
    for rank in sorted(unexplained):
        heartbeat = post_mortem.heartbeats[rank]
        # no bad exit code and no exception is known of it, and yet it has not finished
        if heartbeat.phase != "finished":
            how = "with exit code 0 before its work was done (sys.exit or os._exit)"
            message = f"Rank {heartbeat.rank} left{_where(heartbeat)} {how}.{_after(heartbeat)}"
            return _at(heartbeat, "died", message, heartbeat.rank)
    return None


def _raised(rank: int, post_mortem: PostMortem) -> Failure:
    note = post_mortem.notes[rank]
    message = f"Rank {rank} {note.kind}{_where(note.at)}: {note.error.rstrip('.')}.{_after(note.at)}{_ENDED}"
    traceback: str | None = note.traceback
    finished = [other for other, heartbeat in post_mortem.heartbeats.items() if heartbeat.phase == "finished"]
    done = [other for other in finished if other != rank]
    # the peer is gone because it was done, not because it failed
    if done and _PEER_IS_GONE.search(note.error):
        message += f" {named(done)} had already finished, so rank {rank} waited for a message that no rank sends."
    if _DISK_IS_FULL.search(note.error):
        message += " Give a place with free space, and no limit on the size of files (ulimit -f)."
        traceback = None  # no line of a program is to blame
    return replace(_at(note.at, note.kind, message, rank, traceback), error=note.error)


def _died(rank: int, post_mortem: PostMortem) -> Failure:
    code, heartbeat = post_mortem.exits[rank], post_mortem.heartbeats.get(rank)
    if heartbeat is None:
        return Failure(
            "died", f"Rank {rank} ended with {_exit(code)} before it could start.{_tail(post_mortem.printed)}", rank
        )
    hint = ""
    if code == -signal.SIGKILL:
        hint = " The system ends a process so when memory runs out."
    message = (
        f"Rank {rank} died{_where(heartbeat)}: it ended with"
        f" {_exit(code)}.{hint}{_after(heartbeat)}{_unlike(post_mortem)}{_ENDED}"
    )
    return _at(heartbeat, "died", message, rank)


def lost_agent(how: str, post_mortem: PostMortem) -> Failure:
    """Report a run whose launcher was killed; its ranks ended with it."""
    # the rank that is furthest behind says where the run was
    heartbeat = min(post_mortem.heartbeats.values(), key=_progress, default=None)
    if heartbeat is None:
        return Failure("died", how)
    return _at(heartbeat, "died", f"{how} The run was{_where(heartbeat) or ' starting'}.", None)


def not_started(post_mortem: PostMortem, time_limit: float, world_size: int) -> Failure:
    """Report a run that reached its time limit before all ranks had started."""
    # a rank writes its first heartbeat when it starts
    silent = sorted(set(range(world_size)) - set(post_mortem.heartbeats))
    return Failure(
        "timeout",
        f"{named(silent)} did not start within the time limit of {time_limit:g} s.{_tail(post_mortem.printed)}",
        silent[0],
    )


def hung(post_mortem: PostMortem, idle_s: float) -> Failure:
    """Report a run without progress: the rank that is behind, or the only one outside a collective."""
    rank = _behind(post_mortem)
    ranks = sorted(post_mortem.heartbeats)
    waited = ""
    if rank is None:
        subject = "All ranks wait for each other"
        heartbeat = post_mortem.heartbeats[ranks[0]]
    else:
        subject = f"Rank {rank} hung"
        heartbeat = post_mortem.heartbeats[rank]
        if len(ranks) > 1:
            waited = ", and the other ranks waited for it"
    message = (
        f"{subject}{_where(heartbeat)}: no progress for {idle_s:.0f}"
        f" s{waited}.{_after(heartbeat)}{_unlike(post_mortem)}{_ENDED}"
    )
    return _at(heartbeat, "hung", message, rank, _stood(post_mortem, ranks))


def _at(heartbeat: Heartbeat, kind: str, message: str, rank: int | None, traceback: str | None = None) -> Failure:
    """Return a report with the position of a heartbeat."""
    return Failure(kind, message, rank, heartbeat.step, heartbeat.phase, heartbeat.collective, traceback)


def _stood(post_mortem: PostMortem, ranks: Sequence[int]) -> str:
    blocks = []
    for rank in ranks:
        stack = post_mortem.stacks.get(rank) or NO_ANSWER
        blocks.append(f"rank {rank} stood in (innermost call first):\n{stack}")
    return "\n\n".join(blocks)


NO_ANSWER = "  (it did not answer: the process is stopped, or stuck in the kernel)"


def too_slow(post_mortem: PostMortem, time_limit: float) -> Failure:
    """Report a run that was still working at its time limit; of a rank that computed it shows where."""
    rank = computing(post_mortem)
    if rank is None:
        heartbeat = min(post_mortem.heartbeats.values(), key=_progress)
        working = "its ranks still made progress"
        stood = None
    else:
        heartbeat = post_mortem.heartbeats[rank]
        working = f"rank {rank} computed, at {_busy(post_mortem, rank):.0%} of a core"
        stood = _stood(post_mortem, [rank])
    message = (
        f"The time limit of {time_limit:g} s ended the run{_where(heartbeat)} while {working};"
        " give a longer time limit or fewer steps."
    )
    return _at(heartbeat, "timeout", message, heartbeat.rank, stood)


# Between two looks a rank that waits uses next to nothing, one that computes what others leave it of a core.
_COMPUTING = 0.1


def computing(post_mortem: PostMortem) -> int | None:
    """Return the rank that the others wait for, if it computes: it is not hung, however old its heartbeat is.

    A host that waits for a GPU is busy too, so where the stack says that, being busy says nothing.
    """
    rank = _behind(post_mortem)
    if rank is None or waits_for_device(post_mortem.stacks.get(rank, "")):
        return None
    if _busy(post_mortem, rank) < _COMPUTING:
        return None
    return rank


def _busy(post_mortem: PostMortem, rank: int) -> float:
    return post_mortem.busy.get(rank, 0.0)


def _behind(post_mortem: PostMortem) -> int | None:
    """Return the rank with the least progress; of several the one that does not wait for others, None without one."""
    # (phases, collectives) entered: (9, 40) is behind (9, 41)
    least = min(map(_progress, post_mortem.heartbeats.values()))
    behind = [rank for rank, heartbeat in post_mortem.heartbeats.items() if _progress(heartbeat) == least]
    if len(behind) > 1:
        # equally far, but one of them is outside of a collective: it keeps the others waiting
        behind = [rank for rank in behind if not waits_for_others(post_mortem.stacks.get(rank, ""))]
    return min(behind, default=None)


def _progress(heartbeat: Heartbeat) -> tuple[int, int]:
    return heartbeat.phases, heartbeat.collectives


def _where(heartbeat: Heartbeat) -> str:
    if heartbeat.step is not None:
        return f" in step {heartbeat.step} ({heartbeat.phase})"
    if heartbeat.phase == BUILDING:
        return f" while {heartbeat.phase}"
    return ""


def _after(heartbeat: Heartbeat) -> str:
    text = ""
    if heartbeat.collective:
        text += f" The last collective it entered: {heartbeat.collective}."
    if heartbeat.completed:
        text += f" The last it completed: {heartbeat.completed}."
    return text


_BETWEEN_TWO = ("send", "recv", "isend", "irecv")
UNLIKE = "ranks of one group make equal calls in one order"  # ends the report where two ranks' last calls do not agree


def _unlike(post_mortem: PostMortem) -> str:
    """Say what two ranks entered as the same collective by number, where it is not the same.

    A message between two ranks is another on each, and tells nothing.
    """
    beats = [beat for _, beat in sorted(post_mortem.heartbeats.items()) if beat.collective is not None]
    for beat in beats[1:]:
        first = beats[0]
        # the same number and another name: the ranks' calls do not agree
        if beat.collectives != first.collectives or beat.collective == first.collective:
            continue
        if not _is_message(first) and not _is_message(beat):
            pair = f"rank {first.rank} entered {first.collective}, rank {beat.rank} entered {beat.collective}"
            return f" As collective number {beat.collectives}, {pair}: {UNLIKE}."
    return ""


def _is_message(heartbeat: Heartbeat) -> bool:
    """Return whether the last call was between two ranks: `send of ...`."""
    return str(heartbeat.collective).partition(" ")[0] in _BETWEEN_TWO


def _exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"{name_of(-code)} (signal {-code})"


def named(ranks: Sequence[int]) -> str:
    """Name the ranks as a sentence begins: `"Ranks 0, 1 and 3"`."""
    *others, last = ranks
    if not others:
        return f"Rank {last}"
    return f"Ranks {', '.join(map(str, others))} and {last}"


def _tail(printed: str, lines: int = 12) -> str:
    last_lines = printed.strip().splitlines()[-lines:]
    return "".join(f"\n{line}" for line in last_lines)
