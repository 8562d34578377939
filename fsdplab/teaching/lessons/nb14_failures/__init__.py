"""Notebook 14: ten faults on live ranks, and the reports that name them. Begin with `job.py`, then `faults.py`."""
