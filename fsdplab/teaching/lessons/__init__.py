"""One package a notebook, named as it; two notebooks that build one thing share a package. None imports another.

Begin with the module that the notebook imports, `nb07_overlap/overlapping.py` for one. What is asked is in
`exercises.py`, what runs on ranks in `on_ranks.py`, what is drawn in `figures.py`.
"""
