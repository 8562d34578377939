"""The code of a rank; begin in training.py, which trains a RunSpec, and engines.py, with a builder for each engine."""
