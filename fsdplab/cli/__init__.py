"""The command line: `app.py` has every command and its flags, and names the file of what each does."""

from __future__ import annotations

from .app import main

__all__ = ["main"]
