"""Traces of PyTorch's profiler: from the file to overlapped and exposed time; begin with account.py and overlap.py."""
