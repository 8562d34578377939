"""Notebook 03: data parallelism by hand, beside an unsharded twin. Begin with `ddp_by_hand.py`."""
