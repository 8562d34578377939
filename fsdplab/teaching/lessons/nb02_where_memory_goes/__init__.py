"""Notebook 02: what training holds in memory, counted, computed and measured. Begin with `lesson.py`."""
