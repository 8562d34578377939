"""Notebooks 05 and 06: one sharded unit, then a whole model, under an engine of the learner's own functions.

Begin with `mini_fsdp.py`, which the notebooks call, and `engine.py`, which calls the learner's functions.
"""
