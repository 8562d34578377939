"""Fields of a dataclass that carry the help of the flag that is made from them (`cli/options.py`)."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help_text: str, **expected: Any) -> Any:
    """A field with its default, its help text, and what is expected of its value.

    `sessions/spec/rules.py` checks what is expected: `one_of=("cpu", "cuda")`, `least=1`, `most=100`, `above=0`.
    """
    return field(default=default, metadata={"help": help_text, **expected})
