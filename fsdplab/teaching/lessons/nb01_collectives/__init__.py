"""Notebook 01, collectives: a ring by hand, bytes counted, bandwidth timed. Begin with `lesson.py`."""
