"""Starts the ranks, watches them, and ends them: no process of a run is left when this module returns.

Ranks of this machine are forked by the warm starter (warm.py), in a tenth of a second and without a listening port.
Where forking is impossible, or with `start="torchrun"`, torch.distributed.run executes them (agent.py). It uses no
fixed port, so several runs can go on at once. Both speak one protocol (served.py).
"""

from __future__ import annotations

import signal
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fsdplab.common.machine import busy_processes_per_core
from fsdplab.common.processes import gone, send
from fsdplab.sessions.launch import failure_report as report
from fsdplab.sessions.launch import warm
from fsdplab.sessions.launch.failure_report import Failure, PostMortem, RanksFailed, StarterLost
from fsdplab.sessions.launch.inherited import rank_environment
from fsdplab.sessions.launch.mailbox import NOT_FORKED, Heartbeat, Mailbox, read_heartbeats
from fsdplab.sessions.launch.program import as_ranks_of_torchrun
from fsdplab.sessions.launch.served import ExecutedRanks, Ranks, execute
from fsdplab.sessions.launch.turns import Turns
from fsdplab.sessions.spec import STARTS, SpecError, check_ranks_run_here

_LOOK_EVERY_S = 0.05
_LOOK_FOR_THE_END_EVERY_S = 0.02
_PATIENCE_S = 3.0  # with ranks that were asked to end, that were killed, and that are gone but for their entries
# After the first step, a pause this many times as long as the longest before it, and at least this long, is a hang.
_STALL_FACTOR, _STALL_LEAST_S = 20.0, 20.0
# At the time limit, ranks that move within this time are slow, not hung; so are ranks whose pause is no longer than
# earlier ones.
_GRACE_S = 5.0
_STILL_MOVING_S = 2.0
_Result = TypeVar("_Result")


@dataclass
class RankActivity:
    """When the ranks last moved, and the longest pause between two moves so far."""

    last: float = field(default_factory=time.monotonic)
    longest_pause: float = 0.0
    heartbeats: dict[int, Heartbeat] = field(default_factory=dict)

    def look(self, heartbeats: dict[int, Heartbeat]) -> None:
        """Take in the latest heartbeats."""
        latest = {**self.heartbeats, **heartbeats}  # a heartbeat that was being rewritten just now is missing
        if latest == self.heartbeats:
            return
        if self.heartbeats:
            # between this move and the one before
            self.longest_pause = max(self.longest_pause, self.idle)
        self.heartbeats, self.last = latest, time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since any rank moved."""
        return time.monotonic() - self.last

    def stalled(self, world_size: int) -> bool:
        """Return whether all ranks have finished a step and none has moved for much longer than before."""
        # before its first step a rank may compile or build for as long as it likes
        trained = len(self.heartbeats) == world_size and all(heartbeat.step for heartbeat in self.heartbeats.values())
        return trained and self.idle > max(_STALL_LEAST_S, _STALL_FACTOR * self.longest_pause)

    def finished(self, world_size: int) -> bool:
        """Return whether all ranks have done their work and ended; torchrun takes half a second more to notice."""
        done = [heartbeat for heartbeat in self.heartbeats.values() if heartbeat.phase == "finished"]
        return len(done) == world_size and all(gone(heartbeat.pid) for heartbeat in done)

    @property
    def moving(self) -> bool:
        """Whether the ranks were still making progress a moment ago."""
        return bool(self.heartbeats) and self.idle < max(_STILL_MOVING_S, self.longest_pause)


def run_ranks(
    program: Sequence[str],
    mailbox: Mailbox,
    *,
    world_size: int,
    time_limit: float,
    start: str = "auto",
    on_look: Callable[[], None] = lambda: None,
) -> None:
    """Run `python *program` as `world_size` ranks that write to `mailbox`; RanksFailed on failure or timeout.

    `start` is "warm" (forked; SpecError where forking is impossible), "torchrun", or "auto" (warm where possible).
    `on_look` is called about twenty times a second while the ranks run. An exception in it, Ctrl-C included, ends the
    ranks too.
    """
    ranks = RunningRanks.start(program, mailbox, world_size, time_limit, start, on_look)
    try:
        ranks.watch()
    finally:
        end_ranks([ranks])


def once_more(attempt: Callable[[], _Result]) -> _Result:
    """Return what `attempt()` returns; where its warm starter was lost it is called once more, which begins a new
    starter.
    """
    try:
        return attempt()
    except StarterLost as lost:
        warnings.warn(f"{lost.report.message} It is tried once more.", RuntimeWarning, stacklevel=3)
        return attempt()


@dataclass
class RunningRanks:
    """The ranks of one run, which `start` has started, `watch` follows and `end_ranks` ends.

    `turns` are those of ranks that wait to be told what to do next, None of others.
    """

    agent: Ranks
    mailbox: Mailbox
    world_size: int
    time_limit: float
    on_look: Callable[[], None] = lambda: None
    turns: Turns | None = None
    activity: RankActivity = field(default_factory=RankActivity)
    ended: bool = False
    _used: float = 0.0  # seconds of the time limit

    @classmethod
    def start(
        cls,
        program: Sequence[str],
        mailbox: Mailbox,
        world_size: int,
        time_limit: float,
        start: str = "auto",
        on_look: Callable[[], None] = lambda: None,
        *,
        in_turns: bool = False,
    ) -> RunningRanks:
        """Start ranks and return at once; the caller watches them, and ends them."""
        mailbox.folder.mkdir(parents=True, exist_ok=True)
        turns = Turns(mailbox, world_size) if in_turns else None
        try:
            agent = _start_ranks(program, mailbox, world_size, start, on_look)
        except BaseException:
            if turns is not None:
                turns.close()
            raise
        return cls(agent, mailbox, world_size, time_limit, on_look, turns)

    def watch(self, to_the_end: bool = True) -> bool:
        """Watch the ranks until they have ended (False) or, unless `to_the_end`, all of them wait (True); RanksFailed
        where they fail or hang.

        The time between two calls is none of the ranks', and does not count for the time limit.
        """
        turns = None if to_the_end else self.turns
        began = self.activity.last = time.monotonic()
        try:
            # of 120 s a run that was watched for 50 s has 70 s left
            failure = self._watch(turns, began + self.time_limit - self._used)
        finally:
            self._used += time.monotonic() - began
        if failure is not None:
            raise StarterLost(failure) if self.agent.lost and failure.rank is None else RanksFailed(failure)
        return turns is not None and turns.all_wait

    def how_it_ended(self) -> Failure:
        """Return the report of ranks that have ended without finishing their work."""
        # the report needs exit codes: the agent has them once it has ended
        post_mortem = report.gather(self.mailbox, self.world_size, self.agent.failed())
        if self.agent.lost and not report.blames_a_rank(post_mortem):
            return report.lost_agent(self.agent.lost, post_mortem)
        return report.failed_first(post_mortem)

    def _watch(self, turns: Turns | None, deadline: float) -> Failure | None:
        while self._runs_on(turns):
            self._look()
            # all have ended well, or all wait to be told what is next
            if self.activity.finished(self.world_size) or turns is not None and turns.all_wait:
                return None
            if time.monotonic() > deadline:
                return self._late()
            if self.activity.stalled(self.world_size) and (failure := self._stalled()) is not None:
                return failure
        return self._ended()

    def _runs_on(self, turns: Turns | None) -> bool:
        """Return whether the agent still runs, after a twentieth of a second or as soon as all ranks wait."""
        if turns is None:
            return self.agent.running(_LOOK_EVERY_S)
        turns.look(_LOOK_EVERY_S)
        return self.agent.running()

    def _look(self) -> None:
        self.activity.look(read_heartbeats(self.mailbox, self.world_size))
        self.on_look()

    def _ended(self) -> Failure | None:
        """Return the outcome once the agent has ended: after all ranks, or after one failed and it has ended the
        others.
        """
        self._look()
        return None if self.activity.finished(self.world_size) else self.how_it_ended()

    def _late(self) -> Failure | None:
        """Return the outcome of a run whose time is up: it may end just now, and may be slow or hung."""
        # a rank without a heartbeat has not started
        if len(self.activity.heartbeats) < self.world_size:
            return report.not_started(
                report.gather(self.mailbox, self.world_size, {}), self.time_limit, self.world_size
            )
        busy = self._watch_longer()
        if not self.agent.running():
            return self._ended()
        post_mortem = self._position(busy)
        if self.activity.moving or report.computing(post_mortem) is not None:
            return report.too_slow(post_mortem, self.time_limit)
        return report.hung(post_mortem, self.activity.idle)

    def _stalled(self) -> Failure | None:
        """Return the report of a hang before the time limit; None where a rank has moved or ended after all, or
        computes.
        """
        since = self.activity.last
        busy = self._watch_longer()
        if self.activity.last != since or not self.agent.running():
            return None
        post_mortem = self._position(busy)
        if report.computing(post_mortem) is None:
            return report.hung(post_mortem, self.activity.idle)
        self.activity.last = time.monotonic()  # computing is a move: the next look at it is after another such pause
        return None

    def _watch_longer(self) -> dict[int, float]:
        """Look at the ranks until one moves, they have ended, or some seconds are over; the part that each used
        meanwhile of what it could get of a core.
        """
        since, began, before = self.activity.last, time.monotonic(), report.used_so_far(self.activity.heartbeats)
        while self.activity.last == since and time.monotonic() < began + _GRACE_S and self.agent.running(_LOOK_EVERY_S):
            self._look()
        used, lasted = report.used_so_far(self.activity.heartbeats), max(time.monotonic() - began, _LOOK_EVERY_S)
        # 5 s with two processes on each core: 2.5 s of a core
        could_use = lasted / busy_processes_per_core()
        return {rank: (used[rank] - before[rank]) / could_use for rank in before if rank in used}

    def _position(self, busy: dict[int, float]) -> PostMortem:
        """Return where the ranks stand, by their heartbeats and stacks, and how busy they were."""
        beats = self.activity.heartbeats
        return PostMortem(heartbeats=beats, stacks=report.ask_for_stacks(self.mailbox, beats), busy=busy)


def end_ranks(runs: Sequence[RunningRanks]) -> None:
    """End the ranks of those runs whose ranks were not ended before; none is left when this returns, after at most
    about ten seconds.

    torchrun answers SIGTERM by ending the ranks' process groups. An agent that does not end within its time, or that
    has no rank left, is killed, which kills the ranks (see parent_death.py); any remaining process is then killed by
    id: a rank that was stopped while it started has not asked to end with its parent.
    """
    running = [run for run in runs if not run.ended]
    beats = {id(run): read_heartbeats(run.mailbox, run.world_size).values() for run in running}
    known = {id(run): {*(each.pid for each in beats[id(run)]), *run.agent.started()} for run in running}
    # without a known rank they may be starting
    asked = [run.agent for run in running if not (known[id(run)] and all(map(gone, known[id(run)])))]
    # first a request, for what a rank has still to write
    _end_each(asked, lambda agent: agent.terminate())
    # then by force, which ends the ranks with their agent
    _end_each([run.agent for run in running], lambda agent: agent.kill())
    # last by process id, where a rank has survived its agent
    everyone = sorted({pid for pids in known.values() for pid in pids})
    if not _all_gone(everyone):
        for pid in everyone:
            send(pid, signal.SIGKILL)
        _all_gone(everyone)
    for run in running:
        run.ended = True
        if run.turns is not None:
            run.turns.close()


def _end_each(agents: Sequence[Ranks], end: Callable[[Ranks], None]) -> None:
    """End those that run, and return when they have ended, or after some seconds."""
    running = [agent for agent in agents if agent.running()]
    for agent in running:
        end(agent)
    deadline = time.monotonic() + _PATIENCE_S
    for agent in running:
        agent.running(max(0.0, deadline - time.monotonic()))


def _all_gone(pids: Sequence[int]) -> bool:
    """Return whether all have ended, now or within some seconds."""
    deadline = time.monotonic() + _PATIENCE_S
    while not all(map(gone, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_FOR_THE_END_EVERY_S)
    return True


def _start_ranks(
    program: Sequence[str], mailbox: Mailbox, world_size: int, start: str, on_look: Callable[[], None]
) -> Ranks:
    check_ranks_run_here()
    if start not in STARTS:
        raise SpecError(f"unknown start {start!r}; expected one of {', '.join(STARTS)}", "start")
    _check_loopback()
    if start == "torchrun":
        return start_torchrun(program, mailbox, world_size)
    # a look at the system may say why not; else the starter's trial does
    not_forked, failed = warm.why_not(), False
    if not_forked is None:
        try:
            return warm.start(program, mailbox, world_size, on_look)
        except warm.StarterFailed as error:
            not_forked, failed = str(error), True
    if start == "warm":
        raise SpecError(f"start is 'warm', but {not_forked}; give start='auto' or 'torchrun'", "start")
    if failed:
        warnings.warn(f"ranks are started by torchrun, which takes seconds: {not_forked}", RuntimeWarning, stacklevel=5)
    return start_torchrun(program, mailbox, world_size, not_forked)


def start_torchrun(program: Sequence[str], mailbox: Mailbox, world_size: int, not_forked: str = "") -> ExecutedRanks:
    """Start the ranks with torch.distributed.run; `not_forked` says why they are not forked, for their record."""
    arguments = [
        "--nnodes=1",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        f"--rdzv-id={uuid.uuid4()}",
        *as_ranks_of_torchrun(program, world_size, "127.0.0.1"),
    ]
    environment = {**rank_environment(), NOT_FORKED: not_forked}
    return execute("fsdplab.sessions.launch.agent", arguments, mailbox, environment)


def _check_loopback() -> None:
    """SpecError where ranks of this machine cannot meet; gloo would say so in its own words, torchrun after minutes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            trial.connect(("127.0.0.1", 9))  # nothing is sent
        except OSError as error:
            raise SpecError(
                f"ranks meet at 127.0.0.1, which this machine does not reach ({error.strerror}); bring its loopback"
                " interface up: ip link set lo up"
            ) from None
