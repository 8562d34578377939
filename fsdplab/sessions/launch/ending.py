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
from contextlib import suppress

from fsdplab.common.processes import gone, send
from fsdplab.sessions.launch.served import Ranks

_PATIENCE_S = 3.0
_LOOK_EVERY_S = 0.02


def end_all(running: Sequence[tuple[Ranks, Sequence[int]]]) -> None:
    """End agents and their ranks (process ids), and return once all are gone, after at most about ten seconds."""
    known = [(agent, {*ranks, *agent.started()}) for agent, ranks in running]
    # without a known rank they may be starting
    asked = [agent for agent, ranks in known if agent.poll() is None and not (ranks and all(map(gone, ranks)))]
    for agent in asked:
        agent.terminate()
    wait_for(asked, _PATIENCE_S)
    killed = [agent for agent, _ in known if agent.poll() is None]
    for agent in killed:
        agent.kill()
    wait_for(killed, _PATIENCE_S)
    everyone = sorted({rank for _, ranks in known for rank in ranks})
    if not _all_gone(everyone):
        for rank in everyone:
            send(rank, signal.SIGKILL)
        _all_gone(everyone)


def wait_for(agents: Sequence[Ranks | subprocess.Popen[str]], patience_s: float) -> None:
    """Return when all have ended, or after `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    for agent in agents:
        with suppress(subprocess.TimeoutExpired):
            agent.wait(max(0.0, deadline - time.monotonic()))


def _all_gone(ranks: Sequence[int]) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while not all(map(gone, ranks)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True
