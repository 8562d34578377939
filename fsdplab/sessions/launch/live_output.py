"""The output of ranks, line by line while they run: their files are read as they grow."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fsdplab.sessions.launch.mailbox import Mailbox

OnOutput = Callable[[int, str], None]


class Tail:
    """The complete lines that a growing file has got since the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._begun = path, 0, b""

    def lines(self) -> list[str]:
        """The new lines, without their ends; none where there is no file yet."""
        try:
            size = os.stat(self._path).st_size
        except FileNotFoundError:
            return []
        if size <= self._at:
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            new = file.read(size - self._at)  # no more: a rank may print for ever
        self._at += len(new)
        *whole, self._begun = (self._begun + new).split(b"\n")
        return [_shown(line) for line in whole]

    def last(self) -> list[str]:
        """The new lines and the unfinished one."""
        lines, begun = self.lines(), self._begun
        self._begun = b""
        return [*lines, _shown(begun)] if begun else lines


def _shown(line: bytes) -> str:
    """The line as a terminal shows it: after the last carriage return."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


class LiveOutput:
    """Hands over what the ranks of a mailbox print: `on_output(1, "a line")`; `lines` counts them."""

    def __init__(self, mailbox: Mailbox, world_size: int, on_output: OnOutput) -> None:
        self.on_output, self.lines = on_output, 0
        self._tails = [Tail(mailbox.of(rank, "out")) for rank in range(world_size)]

    def look(self) -> None:
        """Hand over the lines that are complete."""
        self._hand_over([tail.lines() for tail in self._tails])

    def flush(self) -> None:
        """Hand over everything, after the ranks have ended."""
        self._hand_over([tail.last() for tail in self._tails])

    def _hand_over(self, by_rank: list[list[str]]) -> None:
        for rank, lines in enumerate(by_rank):
            for line in lines:
                self.lines += 1
                self.on_output(rank, line)
