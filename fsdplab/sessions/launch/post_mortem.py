"""What ranks have left in their mailbox when they end badly, and where they stand when they do not end: what a report
is made of (failure_report.py).
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping

from fsdplab.common.processes import send
from fsdplab.sessions.launch.failure_report import PostMortem
from fsdplab.sessions.launch.mailbox import Beat, Mailbox, read_beats, read_lines
from fsdplab.sessions.launch.stacks import readable

_LOOK_EVERY_S = 0.05
_ANSWER_WITHIN_S = 2.0


def gather(mailbox: Mailbox, world_size: int) -> PostMortem:
    """Exit codes, notes, beats and what was printed; no stacks, since the ranks may be gone."""
    exits = json.loads(mailbox.exits.read_text()) if mailbox.exits.exists() else {}
    notes = {rank: read_lines(mailbox.of(rank, "failure")) for rank in range(world_size)}
    return PostMortem(
        exits={int(rank): code for rank, code in exits.items()},
        notes={rank: lines[0] for rank, lines in notes.items() if lines},
        beats=read_beats(mailbox, world_size),
        printed=_printed(mailbox, world_size),
    )


def _printed(mailbox: Mailbox, world_size: int) -> str:
    """What explains a rank that left no note: its standard error, or torchrun's log when it did not get that far."""
    errors = [mailbox.of(rank, "err") for rank in range(world_size)]
    texts = [path.read_text(errors="replace") for path in errors if path.exists()]
    return "\n".join(filter(None, texts)) or mailbox.agent_log.read_text(errors="replace")


def ask_for_stacks(mailbox: Mailbox, beats: Mapping[int, Beat]) -> dict[int, str]:
    """Ask every rank where it stands; those that do not answer within two seconds are left out."""
    asked = {rank: mailbox.of(rank, "stack") for rank in beats}
    for path in asked.values():
        os.truncate(path, 0)  # an answer to an earlier question
    for beat in beats.values():
        send(beat.pid, signal.SIGUSR1)
    deadline, seen = time.monotonic() + _ANSWER_WITHIN_S, [0]
    # an answer is written in several pieces
    while time.monotonic() < deadline and not (all(seen) and seen == _sizes(asked)):
        seen = _sizes(asked)
        time.sleep(_LOOK_EVERY_S)
    return {rank: stack for rank, path in asked.items() if (stack := readable(path.read_text(errors="replace")))}


def _sizes(asked: Mapping[int, os.PathLike[str]]) -> list[int]:
    return [os.stat(path).st_size for path in asked.values()]
