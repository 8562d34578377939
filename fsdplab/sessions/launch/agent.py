"""Starts ranks by torch.distributed.run, which ends when the caller ends.

    caller  ->  python -m fsdplab.sessions.launch.agent CONNECTION CALLER_PID [arguments of torchrun]  ->  ranks

torchrun starts the ranks, gives them their addresses, and ends all when one ends badly. It knows which rank ended with
which exit code but only prints it, so the agent tells the caller (served.py). A signal to torchrun is an exception in
it; the agent ends by that signal, so that the caller does not take it for the end of a rank.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from fsdplab.common.processes import end_as_if_by
from fsdplab.common.pythons import imports_that_stay
from fsdplab.sessions.launch.inherited import signals_of_the_lab
from fsdplab.sessions.launch.mailbox import AGENT_PID
from fsdplab.sessions.launch.parent_death import adopt_orphans, end_children, end_with_caller
from fsdplab.sessions.launch.served import tell

with imports_that_stay():
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(connection: str, caller: str, *arguments: str, when_orphaned: signal.Signals = signal.SIGTERM) -> None:
    """Run torchrun until the ranks end; exit code 1 when a rank failed, and a signal's end when it got one.

    `when_orphaned` is the signal sent when the caller is gone: SIGTERM, on which torchrun ends the ranks' whole process
    groups.
    """
    signals_of_the_lab()
    end_with_caller(int(caller), when_orphaned)
    os.environ[AGENT_PID] = str(os.getpid())
    adopt_orphans()
    exits: dict[int, int] = {}
    try:
        try:
            torchrun.run(torchrun.parse_args(list(arguments)))
        finally:
            end_children()
    except SignalException as asked:
        end_as_if_by(asked.sigval)
    except ChildFailedError as error:
        exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
    tell(socket.socket(fileno=int(connection)), exits=exits)
    sys.exit(1 if exits else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
