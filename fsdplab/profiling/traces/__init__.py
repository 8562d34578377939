"""Traces of PyTorch's profiler: from the file to what overlapped and what was exposed; begin in overlap.py."""
