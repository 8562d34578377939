"""Waiting until files can be read, whatever their numbers: `select` fails from the 1,024th open file on."""

from __future__ import annotations

import math
import select
from collections.abc import Iterable
from socket import socket


def readable(files: Iterable[int | socket], within_s: float) -> list[int]:
    """The descriptors among `files` that can be read or have ended, as soon as there is one; none after `within_s`
    seconds.
    """
    waiting = select.poll()
    for file in files:
        waiting.register(file, select.POLLIN)
    return [number for number, _ in waiting.poll(math.ceil(1000 * max(0.0, within_s)))]
