"""Notebook 08: one recorded trace, and the account of where its time went. Begin with `lesson.py`."""
