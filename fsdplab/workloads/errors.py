"""Defines the errors of models and texts, apart so that a command can refuse a request without importing torch."""

from __future__ import annotations

from fsdplab.common.errors import UserError


class ModelError(UserError, ValueError):
    """An invalid shape or an unknown model; the message is one line: what happened, got, expected, what to do."""


class TextError(UserError, ValueError):
    """Text that cannot be trained on: missing, unreadable, empty, or too short."""
