"""All that needs a GPU, in one command: parts that run each in its own process, and the record they leave.

It runs with torch and numpy alone: `python -m fsdplab.gpu_check` from a checkout is enough.
"""
