"""Bytes that are alive, by category, and their largest sum.

A `Held` stands for a storage: its bytes are alive as long as somebody holds it, as a tensor's are. So what the players
of this package let go of is freed when PyTorch would free it, by the same rule: the last reference is gone.
"""

from __future__ import annotations

from fsdplab.common.names import CATEGORIES

Bytes = dict[str, int]


class Book:
    """Counts what is alive. `peak` is the split at the largest sum since `begin`.

    >>> book = Book()
    >>> first = book.hold(40, "activations")
    >>> del first
    >>> book.total, book.peak["activations"]
    (0, 40)
    """

    def __init__(self) -> None:
        self._now: Bytes = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.begin()

    def begin(self) -> None:
        """The measured step begins: forget the peak so far."""
        self._most, self.peak = self.total, dict(self._now)

    def hold(self, nbytes: int, category: str) -> Held:
        """So many more bytes, for as long as the result is held."""
        return Held(self, nbytes, category)

    def change(self, nbytes: int, category: str) -> None:
        """More bytes of a category, or less."""
        self._now[category] += nbytes
        self.total += nbytes
        if self.total > self._most:
            self._most, self.peak = self.total, dict(self._now)


class Held:
    """Bytes of one storage."""

    __slots__ = ("_book", "category", "nbytes")

    def __init__(self, book: Book, nbytes: int, category: str) -> None:
        self._book, self.nbytes, self.category = book, nbytes, category
        book.change(nbytes, category)

    def __del__(self) -> None:
        self._book.change(-self.nbytes, self.category)
