"""What every lesson uses, and nothing that belongs to one: exercises and their check, answers, hints, predictions, the
learner's folder, what a cell shows, and the half of it that runs on ranks.

Begin with `exercise.py` (what is asked), then `checking.py` (how it is judged) and `on_ranks.py` (where it runs).
"""
