"""Notebook 19: cards, strategy and bill of a job of 70 billion parameters, before it runs. Begin with `lesson.py`."""
