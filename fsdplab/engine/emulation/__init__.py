"""Emulated networks, with a bandwidth and a latency; begin in link.py.

link.py waits on the host, stream_link.py on a CUDA stream.
"""
