"""Numbers with units, as learners write them: `36`, `36e6`, `"36 MB"`, `"1.2 GB/s"`.

An answer of the right size in the wrong unit is the most common slip of all, so a unit is never guessed: a bare number
is in the question's own unit, a text carries its unit, and the two must measure the same kind of thing.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from fsdplab.common.sizes import BYTES

_BITS = {"bit": 1 / 8, "kbit": 1e3 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8}  # in bytes
_OF_RATES = ("B", "kB", "MB", "GB", "MiB", "GiB")
_SCALES = {
    "bytes": {**_BITS, **BYTES},
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0},
    "bytes a second": {
        **{f"{unit}/s": BYTES[unit] for unit in _OF_RATES},
        "Mbit/s": _BITS["Mbit"],
        "Gbit/s": _BITS["Gbit"],
    },
    "a plain number": {"": 1.0, "x": 1.0, "%": 0.01},
}
# a comma stands between thousands only: "3,5" may mean 3.5 to its writer, and must not become 35
_WRITTEN = re.compile(
    r"\s*([-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([^\d\s,]*)\s*\Z"
)


_SPELT = {
    "bytes": "B",
    "byte": "B",
    "kilobytes": "kB",
    "megabytes": "MB",
    "gigabytes": "GB",
    "bits": "bit",
    "seconds": "s",
    "second": "s",
    "milliseconds": "ms",
    "times": "x",
    "percent": "%",
}
_OF_EACH = re.compile(r"\s*(/|\b(a|an|per|each)\b)\s*(parameter|rank|step|block|GPU|card)s?\s*\Z")
_ABOUT = re.compile(r"\A\s*(about|roughly|approximately|~|≈)\s*")


class QuantityError(ValueError):
    """A value that is not a number with a known unit."""


def kind_of(unit: str) -> str:
    """Return the kind of quantity of a unit: `kind_of("MiB") == "bytes"`; QuantityError for an unknown unit."""
    for kind, scales in _SCALES.items():
        if unit in scales:
            return kind
    known = ", ".join(name for scales in _SCALES.values() for name in scales if name)
    raise QuantityError(f"unknown unit {unit!r}; known units: {known}")


def scale_of(unit: str) -> float:
    """Return how many base units (bytes, seconds, bytes a second, 1) one `unit` is: `scale_of("MB") == 1e6`."""
    return _SCALES[kind_of(unit)][unit]


def quantity(value: float | str, unit: str) -> float:
    """Return the value in `unit`: `quantity("36 MB", "kB") == 36000`, `quantity(5, "kB") == 5`.

    QuantityError for what is no number, and for a unit of another kind.
    """
    if isinstance(value, str):
        return _written(value, unit)
    number = single_number(value)
    example = f"12 {unit}".strip()
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise QuantityError(f'expected a number or a text such as "{example}", got {value!r} ({type(value).__name__})')
    return float(number)


def single_number(value: Any) -> Any:
    """Return a numpy number, or a tensor or array that holds one number, as Python's own; anything else as it is."""
    if not hasattr(value, "item"):
        return value
    # numpy's scalar, its array with `size`, torch's tensor with `numel()`
    is_number = isinstance(value, np.generic)
    is_array_of_one = getattr(value, "size", None) == 1
    is_tensor_of_one = hasattr(value, "numel") and value.numel() == 1
    if is_number or is_array_of_one or is_tensor_of_one:
        return value.item()
    return value


def plain(value: Any) -> Any:
    """Return the value with numpy's numbers as Python's own and fractions as floats.

    This holds in lists, tuples, sets and dicts too: `plain({"steps": np.int64(3)}) == {"steps": 3}`. A learner's
    settings may come from numpy, and a rank can only send plain values back. Tensors and arrays stay as they are.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (Fraction, Decimal)):
        return float(value)
    if type(value) in (list, tuple, set):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {plain(key): plain(item) for key, item in value.items()}
    return value


def _written(text: str, unit: str) -> float:
    """Return the number that a text gives, in `unit`; QuantityError for a text that gives none of that kind."""
    number_and_unit = _ABOUT.sub("", _OF_EACH.sub("", text))  # "about 5 MB per rank" is 5 MB
    match = _WRITTEN.match(number_and_unit)
    if not match:
        example = f"12 {unit}".strip()
        point = ", with a decimal point" if "," in text else ""
        expected = "a number and a unit" if unit else "a number"
        raise QuantityError(f'expected {expected} such as "{example}"{point}, got {text!r}')
    digits, word = match[1], match[2]
    number = float(digits.replace(",", "").replace("_", ""))
    # without a word the number is in the question's own unit
    given = _SPELT.get(word, word) or unit
    is_known = any(given in scales for scales in _SCALES.values())
    # "messages" is a word, "MB/s" is none
    is_word = given.replace("_", "").isalpha()
    if not unit and is_word and not is_known:
        given = ""  # "37 messages" answers how many there are
    if kind_of(given) != kind_of(unit):
        raise QuantityError(f"the question asks for {kind_of(unit)} ({unit}), {text!r} measures {kind_of(given)}")
    # 36 MB in kB: 36 x 1e6 / 1e3
    return number * scale_of(given) / scale_of(unit)


def shown(value: float, unit: str) -> str:
    """Return a short text with four digits: `shown(36.0004, "MB") == "36 MB"`."""
    return f"{value:.4g} {unit}".strip()
