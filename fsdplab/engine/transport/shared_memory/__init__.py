"""Ranks of one machine that read each other's memory; begin in transport.py.

process_group.py offers the same to PyTorch's own engines.
"""
