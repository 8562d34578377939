"""Notebook 11: strategies behind one link, and a choice defended with numbers. Begin with `lesson.py`."""
