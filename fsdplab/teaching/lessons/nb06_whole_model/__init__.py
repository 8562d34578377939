"""Notebook 06: a whole model under an engine of the learner's own functions; begin with `engine.py`."""
