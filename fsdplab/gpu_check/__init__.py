"""Checks a GPU machine in one command, from the driver up to the speed of training, and keeps the results in a folder.

`commands.py` is the table of what runs and what is looked at afterwards, `__main__.py` runs it. The foundations
need torch and numpy alone: `python -m fsdplab.gpu_check` from a checkout is enough.
"""
