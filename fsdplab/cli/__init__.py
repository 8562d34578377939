"""The command line: `app.py` has every command and its flags; what a command does is in the file of its name."""

from __future__ import annotations

from .app import main

__all__ = ["main"]
