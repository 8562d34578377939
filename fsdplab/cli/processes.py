"""Parts of the command line that run in a separate process: JupyterLab, the course, the check of a GPU.

The command line must not import them, or they are other programs; they handle Ctrl-C themselves.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType


def run_module(module: str, arguments: Sequence[str]) -> int:
    """Run `python -m module ...` in the foreground; its exit code, 128 + n where signal n killed it.

    Ctrl-C in a terminal reaches both processes: this one waits until the other has ended. A signal to this process
    alone (SIGTERM, SIGHUP) is forwarded.
    """
    process = subprocess.Popen([sys.executable, "-m", module, *arguments])

    def hand_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    handed_on = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, hand_on) for number in handed_on}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
