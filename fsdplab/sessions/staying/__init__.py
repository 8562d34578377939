"""Ranks that live on from cell to cell of a notebook; begin in ranks.py."""
