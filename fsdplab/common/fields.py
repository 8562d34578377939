"""Fields of a dataclass that carry the help of the flag that is made from them (`cli/options.py`)."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help_text: str) -> Any:
    """A field with its default and its help text."""
    return field(default=default, metadata={"help": help_text})
