"""Helpers of several packages, with the standard library only: names of strategies and of memory's categories, atomic
files, near words, sizes, signals to processes.

Nothing here concerns training; everything may import it.
"""
