"""Shared by all lessons: exercises and their check, answers, hints, predictions, the learner's folder, output of cells,
and the part that runs on ranks.

Begin with `exercise.py` (the data), then `checking.py` (the check) and `on_ranks.py` (the ranks' side).
"""
