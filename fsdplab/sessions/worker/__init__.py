"""What runs on a rank; begin in training.py, which trains as a RunSpec says, and engines.py, one builder an engine."""
