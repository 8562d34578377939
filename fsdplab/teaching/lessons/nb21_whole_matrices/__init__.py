"""Notebook 21: Muon on shards: what halves do, three ways out, owners, an exchange. Begin with `lesson.py`."""
