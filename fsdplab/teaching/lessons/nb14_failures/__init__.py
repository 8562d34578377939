"""Notebook 14: ten faults on live ranks, and the reports that name them; the job itself is in `faulty_job`."""
