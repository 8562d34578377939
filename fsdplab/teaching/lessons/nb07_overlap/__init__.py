"""Notebook 07: how much of a job's communication shows behind an emulated link. Begin with `lesson.py`."""
