"""Ranks of one machine that read each other's memory; begin in transport.py.

arena.py is the memory, slots.py orders who reads what when. process_group.py offers the same to PyTorch's own engines.
"""
