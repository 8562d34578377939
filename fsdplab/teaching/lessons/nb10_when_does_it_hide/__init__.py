"""Notebook 10: from which batch on communication hides, computed and imitated. Begin with `lesson.py`."""
