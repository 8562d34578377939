"""One package a notebook, named as it; two notebooks that build one thing share a package. None imports another.

Begin with the module that the notebook imports, such as `teaching/lessons/nb07_overlap/overlapping.py`. The exercises
are in `exercises.py`, what runs on ranks in `on_ranks.py`, the figures in `figures.py`.
"""
