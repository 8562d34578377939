"""Formats and parses quantities: one way to write bytes and seconds, in figures, tables, pages and flags.

MB is 1e6 bytes, GB 1e9, as on a card's box; MiB is 2**20.
"""

from __future__ import annotations

import re

from .words import MISSING

BYTES = {
    "B": 1.0,
    "kB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
    "TiB": 2.0**40,
}
_MOST_DIGITS = 30
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*", re.ASCII)


def size(nbytes: float | None) -> str:
    """Write bytes with three digits: `size(300_000_000) == "300 MB"`, `size(1536) == "1.54 kB"`."""
    if nbytes is None:
        return MISSING
    for symbol, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= 0.9995 * scale:
            return f"{three_digits(nbytes / scale)} {symbol}"
    return f"{nbytes:.0f} B"


def flops(value: float) -> str:
    """Write floating-point operations with three digits: `flops(1.66e13) == "16.6 TFLOP"`."""
    if value >= 0.9995e12:
        return f"{three_digits(value / 1e12)} TFLOP"
    return f"{three_digits(value / 1e9)} GFLOP"


def flops_per_s(value: float) -> str:
    """Write a rate of them: `flops_per_s(1.66e13) == "16.6 TFLOP/s"`."""
    return f"{flops(value)}/s"


def parse_size(text: str) -> int:
    """Read whole bytes from `300MB`, `1.5 GB`, `2GiB` or a plain number, in upper or lower case; else ValueError.

    >>> parse_size("2GiB"), parse_size("1_000")
    (2147483648, 1000)
    """
    nbytes = 0.0
    match = _SIZE.fullmatch(text.replace("_", ""))
    if match is not None and len(match[1]) <= _MOST_DIGITS:
        scales = {"": 1.0, **{symbol.lower(): scale for symbol, scale in BYTES.items()}}
        nbytes = float(match[1]) * scales.get(match[2].lower(), 0.0)
    if nbytes < 1:
        raise ValueError(f"{text!r} is no size; expected one such as 300MB, 1.5GB or 2GiB")
    return int(nbytes)


def parse_card(text: str) -> int | None:
    """Read the bytes of an emulated card; None for an empty text or `none`; ValueError says what was expected."""
    if text.strip().lower() in ("", "none"):
        return None
    expected = "expected a size such as 300MB, 1.5GB or 2GiB, or none"
    try:
        nbytes = parse_size(text)
    except ValueError:
        raise ValueError(f"card is {text!r}; {expected}") from None
    has_unit = text.rstrip()[-1].isalpha()
    if nbytes < BYTES["MB"] and not has_unit:  # the unit was forgotten: no model fits in so few bytes
        raise ValueError(f"card is {text!r}, which is {nbytes} bytes; {expected}")
    return nbytes


def seconds(value: float | None) -> str:
    """Write a duration with three digits: `seconds(0.0153) == "15.3 ms"`, `seconds(1.4) == "1.40 s"`; none is `0`."""
    if value is None:
        return MISSING
    if abs(value) < 0.5e-8:  # less would read as 0.00 µs
        return "0"
    if abs(value) >= 0.9995:
        return f"{three_digits(value)} s"
    if abs(value) >= 0.9995e-3:
        return f"{three_digits(value * 1e3)} ms"
    return f"{three_digits(value * 1e6)} µs"


def percent(part: float | None) -> str:
    """Write a part as a percentage: `percent(0.65) == "65 %"`."""
    return MISSING if part is None else f"{100 * part:.0f} %"


def three_digits(value: float) -> str:
    """Write a number with three significant digits and no exponent: `three_digits(12.345) == "12.3"`."""
    magnitude = abs(value)
    if magnitude < 9.995:
        return f"{value:,.2f}"
    if magnitude < 99.95:
        return f"{value:,.1f}"
    return f"{value:,.0f}"


def times_as_much(ratio: float) -> str:
    """Compare an amount with another by their ratio, in two digits and without an exponent.

    >>> times_as_much(1.5), times_as_much(448.6), times_as_much(0.002), times_as_much(1.001)
    ('1.5 times as much', '449 times as much', '1/500 as much', 'as much')
    """
    if f"{ratio:.2g}" == "1":
        return "as much"
    if ratio < 0.01:
        return f"1/{1 / ratio:,.0f} as much"
    factor = f"{ratio:.2g}" if ratio < 99.5 else f"{ratio:,.0f}"
    return f"{factor} times as much"
