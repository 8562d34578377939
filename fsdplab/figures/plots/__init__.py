"""One kind of figure a file; `timeline.py` and `memory.py` are typical."""
