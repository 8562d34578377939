"""The process between the caller and the ranks: torch.distributed.run, ended when the caller ends.

    caller  ->  python -m fsdplab.sessions.launch.agent CALLER_PID FOLDER [arguments of torchrun]  ->  ranks

torchrun starts the ranks, gives them their addresses, and ends all when one ends badly. It knows which rank ended with
which exit code but only prints it, so the agent writes it to FOLDER/exits.json for the report. A signal to torchrun is
an exception in it; the agent ends by that signal, so that the caller does not take it for the end of a rank.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from fsdplab.common.processes import end_as_if_by
from fsdplab.common.pythons import imports_that_stay
from fsdplab.common.temporary import TEMPORARY
from fsdplab.sessions.launch.inherited import signals_of_the_lab
from fsdplab.sessions.launch.mailbox import AGENT_PID, Mailbox
from fsdplab.sessions.launch.parent_death import adopt_orphans, end_children, end_with_parent

with imports_that_stay():
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(caller: str, folder: str, *arguments: str, when_orphaned: signal.Signals = signal.SIGTERM) -> None:
    """Run torchrun until the ranks end; exit code 1 when a rank failed, and a signal's end when it got one.

    `when_orphaned` is the signal sent when the caller is gone: SIGTERM, on which torchrun ends the ranks' whole process
    groups.
    """
    signals_of_the_lab()
    end_with_parent(int(caller), when_orphaned)
    os.environ[AGENT_PID] = str(os.getpid())
    adopt_orphans()
    try:
        try:
            torchrun.run(torchrun.parse_args(list(arguments)))
        finally:
            end_children()
    except SignalException as asked:
        if os.getppid() != int(caller):  # killed, perhaps: then it has left its temporary folders behind
            shutil.rmtree(os.environ[TEMPORARY], ignore_errors=True)
        end_as_if_by(asked.sigval)
    except ChildFailedError as error:
        exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
        Mailbox(Path(folder)).exits.write_text(json.dumps(exits))
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
