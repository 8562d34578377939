"""Notebook 16: sharding beside tensor, expert and pipeline parallelism, on meshes. Begin with `lesson.py`."""
