"""Rows by a key, and as lines of a text."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group items by a key, in order of first appearance.

    >>> grouped([3, 1, 5, 2], lambda number: number % 2)
    {1: [3, 1, 5], 0: [2]}
    """
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Align lines of as many cells each, so that columns begin below each other.

    >>> aligned([["rank", "bytes"], ["0", "36"]])
    ['rank  bytes', '0     36']
    """
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    texts = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths)]
        texts.append("  ".join(cells).rstrip())
    return texts
