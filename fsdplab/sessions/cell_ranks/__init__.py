"""Ranks that stay from cell to cell of a notebook; begin in ranks.py."""
