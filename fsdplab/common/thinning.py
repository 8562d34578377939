"""Which points of a long series are kept, so that it can be stored and drawn, and its peaks remain."""

from __future__ import annotations

from collections.abc import Sequence

MAX_POINTS = 500


def downsample(totals: Sequence[float], limit: int = MAX_POINTS) -> list[int]:
    """Choose at most `limit` indices: first, last, the first peak, the lowest and highest of each of equal windows.

    >>> downsample([0, 5, 1, 2, 9, 3, 0, 4, 7, 1], limit=7)
    [0, 4, 6, 8, 9]
    """
    count = len(totals)
    if count <= limit:
        return list(range(count))
    kept = {0, count - 1, max(range(count), key=totals.__getitem__)}
    windows = (limit - len(kept)) // 2
    for number in range(windows):
        window = range(number * count // windows, (number + 1) * count // windows)
        kept |= {min(window, key=totals.__getitem__), max(window, key=totals.__getitem__)}
    return sorted(kept)
