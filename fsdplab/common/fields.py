"""Fields of a dataclass: the help of their flag and what is expected of their value stand with them, once."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import field
from typing import Any


def option(default: Any, help_text: str, **expected: Any) -> Any:
    """Return a field with its default, its help text, and what is expected of its value (see `refusal`).

    `cli/options.py` makes a flag of it.
    """
    return field(default=default, metadata={"help": help_text, **expected})


def refusal(
    value: object,
    default: object,
    *,
    one_of: Collection[object] = (),
    least: int | None = None,
    most: int | None = None,
    above: float | None = None,
    remark: str = "",
    **_: object,
) -> str:
    """Return what was expected of the value of a field; "" where it is that.

    `one_of` are all values, `least` and `most` the limits of a whole number, `above` the limit of a number. A default
    of None stands for a value that is not given. Other keywords, such as a field's help, are passed over.

    >>> refusal(0, 8, least=1, most=100)
    'a whole number from 1 to 100'
    >>> refusal("zip", "fast", one_of=("fast", "small"))
    'one of fast, small'
    >>> refusal(None, None, least=1)
    ''
    """
    if default is None and value is None:
        return ""
    if one_of and value not in one_of:
        return f"one of {', '.join(str(word) for word in one_of if word is not None)}"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if above is not None and not (is_number and above < value < math.inf):  # type: ignore[operator]
        return f"a number above {above:g}"
    if least is None:
        return ""
    is_whole = isinstance(value, int) and is_number
    if is_whole and least <= value and (most is None or value <= most):  # type: ignore[operator]
        return ""
    if most is None:
        return f"a whole number of at least {least}{remark}"
    return f"a whole number from {least} to {most:,}{remark}"
