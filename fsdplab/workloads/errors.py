"""What a command refuses in one line; here, so that it knows the error without importing torch."""

from __future__ import annotations


class TextError(ValueError):
    """Text that cannot be trained on: missing, unreadable, empty, or too short."""
