"""Notebook 12: shard groups, slow links between nodes, a mesh for a network. Begin with `lesson.py`."""
