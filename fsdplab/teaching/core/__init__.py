"""Shared by all lessons: exercises and their check, answers, hints, predictions, the learner's folder, output of cells,
and the part that runs on ranks.

Begin with `exercise_file.py` and `exercise.py` (an exercise and a question, as their files have them), then
`checking.py` (the check) and `on_ranks.py` (the ranks' side).
"""
