"""Notebook 04: ZeRO-1 and ZeRO-2 by hand, beside an unsharded twin. Begin with `lesson.py`."""
