"""The lab's worker with numbers: `python numbers_worker.py LEFT_OUT FOLDER` trains as fsdplab's ranks do, and computes.

LEFT_OUT names waits that do nothing, so that a test sees the losses change: `wait_event in streams.py` leaves out every
`torch.cuda.Stream.wait_event` that this file of fsdplab calls; `nothing` leaves all as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from fsdplab.sessions.worker import training
from tests.fake_cuda.numbers import HostNumbers


def leave_out(what: str) -> None:
    """Make the named waits do nothing: `leave_out("wait_event in streams.py")`."""
    method, file = what.split(" in ")
    waits: Callable[..., None] = getattr(torch.cuda.Stream, method)

    def wait(stream: Any, awaited: Any) -> None:
        if not sys._getframe(1).f_code.co_filename.endswith(file):
            waits(stream, awaited)

    setattr(torch.cuda.Stream, method, wait)


def main(left_out: str, folder: str) -> None:
    """One rank."""
    if left_out != "nothing":
        leave_out(left_out)
    with HostNumbers():
        training.main(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
