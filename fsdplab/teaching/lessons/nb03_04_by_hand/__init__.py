"""Notebooks 03 and 04: data parallelism, then ZeRO-1 and ZeRO-2, by hand and beside an unsharded twin.

Begin with `by_hand.py`; `trainers.py` has the ways to train that it compares, `grading.py` how both notebooks judge.
"""
