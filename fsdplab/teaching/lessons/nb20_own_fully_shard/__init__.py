"""Notebook 20: a fully_shard of one's own, from an empty file, in five graded stages. Begin with `lesson.py`."""
