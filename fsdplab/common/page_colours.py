"""Colours of text for the page on which a notebook's output stands: JupyterLab, VS Code or Colab, light or dark."""

from __future__ import annotations

TEXT = "#1b1e23"  # where the page tells no colour of its own
INK = f"var(--jp-content-font-color1, var(--vscode-foreground, var(--colab-primary-text-color, {TEXT})))"
_COLOURED = 60  # percent of its own colour that a coloured text keeps; the page's ink makes it darker or lighter


def readable(colour: str) -> str:
    """Return a style's colour that the page's ink makes darker on a light page and lighter on a dark one.

    >>> readable("#2a9d5c").startswith("color-mix(in srgb, #2a9d5c 60%, var(")
    True
    """
    return f"color-mix(in srgb, {colour} {_COLOURED}%, {INK})"
