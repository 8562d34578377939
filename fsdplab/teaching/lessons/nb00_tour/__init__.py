"""Notebook 00, the tour: first ranks, and the arithmetic of model states. Begin with `lesson.py`."""
