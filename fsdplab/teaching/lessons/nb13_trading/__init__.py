"""Notebook 13: memory bought with digits, work or transfers, and what each price is. Begin with `lesson.py`."""
