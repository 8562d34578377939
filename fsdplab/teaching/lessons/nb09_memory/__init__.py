"""Notebook 09: what a memory timeline says about a peak, and whose it is. Begin with `lesson.py`."""
