"""Ends the processes of a run in bounded time.

The agent started the ranks: torchrun or the warm starter. torchrun answers SIGTERM by ending the ranks' process groups.
If it does not within its time, or no rank is left, it is killed, which kills the ranks (see parent_death.py); any
remaining process is then killed by id: a rank that was stopped while it started has not asked to end with its parent.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Protocol

from fsdplab.common.processes import gone, send

_PATIENCE_S = 3.0
_LOOK_EVERY_S = 0.02


class Agent(Protocol):
    """The process that starts the ranks of one run and ends after them. `lost` says how it was killed, if it was;
    `left` holds the exit codes of ranks that ended before the others, where it knows them; `started()` are the ids of
    its ranks, also of those without a heartbeat, and of what these have started, as far as it can be known.
    """

    left: dict[int, int]

    @property
    def lost(self) -> str | None: ...
    def started(self) -> list[int]: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def end(agent: Agent, ranks: Sequence[int]) -> None:
    """End the agent and its ranks (process ids) and return once all are gone, after at most about ten seconds."""
    ranks = sorted({*ranks, *agent.started()})
    if agent.poll() is None and not (ranks and all(map(gone, ranks))):  # no rank known: they may be starting
        agent.terminate()
        _wait(agent)
    if agent.poll() is None:
        agent.kill()
        _wait(agent)
    if not _all_gone(ranks):
        for rank in ranks:
            send(rank, signal.SIGKILL)
        _all_gone(ranks)


def _wait(agent: Agent) -> None:
    try:
        agent.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        pass


def _all_gone(ranks: Sequence[int]) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while not all(map(gone, ranks)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True
