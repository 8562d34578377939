"""Collects the data for failure_report.py: the mailbox content of failed ranks, and the stacks of ranks that hang."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping

from fsdplab.common.processes import send
from fsdplab.sessions.launch.failure_report import PostMortem
from fsdplab.sessions.launch.mailbox import Heartbeat, Mailbox, read_heartbeats, read_lines
from fsdplab.sessions.launch.stacks import readable

_LOOK_EVERY_S = 0.05
_ANSWER_WITHIN_S = 2.0


def gather(mailbox: Mailbox, world_size: int) -> PostMortem:
    """Exit codes, notes, heartbeats and what was printed; no stacks, since the ranks may be gone."""
    exits = json.loads(mailbox.exits.read_text()) if mailbox.exits.exists() else {}
    notes = {rank: read_lines(mailbox.of(rank, "failure")) for rank in range(world_size)}
    return PostMortem(
        exits={int(rank): code for rank, code in exits.items()},
        notes={rank: lines[0] for rank, lines in notes.items() if lines},
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
