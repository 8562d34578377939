"""Notebook 03: data parallelism by hand, beside an unsharded twin. Begin with `lesson.py`."""
