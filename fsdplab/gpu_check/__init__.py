"""Checks a GPU machine in one command, from the driver up to the speed of training, and keeps the results in a folder.

It runs with torch and numpy alone: `python -m fsdplab.gpu_check` from a checkout is enough.
"""
