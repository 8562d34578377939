"""Notebook 18: what is said about FSDP, and a verdict with a figure on each statement. Begin with `lesson.py`."""
