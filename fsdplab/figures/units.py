"""How quantities read: one way to write bytes and seconds, in figures, tables and pages alike.

MB is 1e6 bytes, GB 1e9, as on a card's box.
"""

from __future__ import annotations

MISSING = "–"


def size(nbytes: float | None) -> str:
    """Bytes as a reader sees them, three digits: `size(300_000_000) == "300 MB"`, `size(1536) == "1.54 kB"`."""
    if nbytes is None:
        return MISSING
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= 0.9995 * scale:
            return f"{three_digits(nbytes / scale)} {unit}"
    return f"{nbytes:.0f} B"


def seconds(value: float | None) -> str:
    """A duration, three digits: `seconds(0.0153) == "15.3 ms"`, `seconds(1.4) == "1.40 s"`."""
    if value is None:
        return MISSING
    if value >= 0.9995:
        return f"{three_digits(value)} s"
    return f"{three_digits(value * 1e3)} ms" if value >= 0.9995e-3 else f"{three_digits(value * 1e6)} µs"


def three_digits(value: float) -> str:
    """A number with three significant digits and no exponent: `three_digits(12.345) == "12.3"`."""
    magnitude = abs(value)
    decimals = 2 if magnitude < 9.995 else 1 if magnitude < 99.95 else 0
    return f"{value:,.{decimals}f}"


def plural(count: int, noun: str) -> str:
    """`plural(2, "rank") == "2 ranks"`, `plural(1, "rank") == "1 rank"`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
