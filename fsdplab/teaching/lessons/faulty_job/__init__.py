"""A job with a fault in it, watched on live ranks: what 14 and 17 share. Begin with `job.py`, then `lesson.py`."""
