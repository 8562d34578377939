"""Traces of PyTorch's profiler: from the file to overlapped and exposed time; begin in overlap.py."""
