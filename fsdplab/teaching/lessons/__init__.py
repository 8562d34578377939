"""One package a notebook, named as it; two notebooks that build one thing share a package. None imports another.

Begin with the module that the notebook imports, such as `teaching/lessons/nb07_overlap/lesson.py`. The exercises
are files of `teaching/exercises`, and what runs on ranks is in `on_ranks.py`.
"""
